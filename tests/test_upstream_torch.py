"""The upstream half against the installed torch: what is verified with its definitions, and the
in-tree glue, compiled and, on a GPU, run behind PyTorch's own dispatch stubs."""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import code_size
import pytest
import render_readme
import results
import torch
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # after what is installed
model = importlib.import_module("codegen.model")
upstream = importlib.import_module("codegen.upstream")
verify = importlib.import_module("codegen.verify")
StagingError = upstream.StagingError

CHANGE = model.load().upstream
KERNEL = "aten/src/ATen/native/cuda/group_norm_kernel.cu"

has_clang_format = pytest.mark.skipif(
    verify.tool("clang-format") is None, reason="clang-format is not installed"
)


# --- what is verified ------------------------------------------------------------------------


def definitions() -> dict[str, str]:
    installed = model.installed_torch()
    return {
        verify.NATIVE_FUNCTIONS: installed.native_functions_yaml.read_text(),
        verify.TAGS: installed.tags_yaml.read_text(),
        verify.DERIVATIVES: installed.derivatives_yaml.read_text(),
    }


def verified(path: str, text: str, before: dict[str, str] | None = None) -> list[str]:
    commit = upstream.Rendered("title", "body", {path: text})
    return verify.verify([commit], (definitions() | (before or {})).get)


def test_edits_of_the_definitions_are_parsed():
    """No base needs one today; if one does, what it leaves has to parse and to fit our kernels."""
    texts = definitions()
    formula = "result2: group_norm_invstd_jvp(input_p, input_t, result1, result2, group)"
    for path, old, new, error in (
        (verify.DERIVATIVES, formula, formula.replace("input_t", "input_p"), None),
        (verify.DERIVATIVES, formula, "result9: nothing", "cannot parse"),
        (verify.NATIVE_FUNCTIONS, "Tensor? bias, SymInt N", "Tensor? b, SymInt N", "schema"),
    ):
        text = texts[path].replace(old, new)
        assert text != texts[path]
        if error is None:
            assert verified(path, text, texts) == verified("a.txt", "")
        else:
            with pytest.raises(StagingError, match=error):
                verified(path, text, texts)


def edited_function(name: str, module: ModuleType):
    """A function of the installed torch, without decorators, as the edits for 2.14 leave it."""
    file = Path(module.__file__)
    text = file.read_text()
    for edit in (e for c in upstream.commits(CHANGE, "2.14") for e in c.edits):
        if file.match(edit.file) and edit.anchor in text:
            text = text.replace(edit.anchor, edit.text)
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    (function,) = (f for f in functions if f.name == name)
    function.decorator_list = []
    namespace = dict(vars(module))
    exec(compile(ast.Module([function], []), str(file), "exec"), namespace)
    return namespace[name]


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11", "2.12", "2.13")), reason="no base: older than 2.14"
)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (2, 8, 3, 5, 2), (1, 6, 1, 4), (2, 8, 7)])
def test_fake_tensors_have_the_strides_of_real_ones(device, shape):
    """Those of X, whatever dY's are: on main as it is, on 2.14 by the edits."""
    forward = edited_function("native_group_norm", torch._refs)
    backward = edited_function("native_group_norm_backward", torch._decomp.decompositions)
    formats = [torch.contiguous_format]
    if len(shape) > 3:
        formats += [torch.channels_last if len(shape) == 4 else torch.channels_last_3d]
    N, C = shape[:2]
    sizes = (N, C, math.prod(shape[2:]), 2)
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16):
            gamma = torch.empty(C, dtype=dtype, device=device)
            for of_X, of_dY in itertools.product(formats, formats):
                X, dY = (
                    torch.empty(shape, dtype=dtype, device=device, memory_format=form)
                    for form in (of_X, of_dY)
                )
                for weight in (gamma, None):
                    Y, mean, rstd = forward(X, weight, weight, *sizes, 1e-5)
                    dX, _, _ = backward(dY, X, mean, rstd, weight, *sizes, [True] * 3)
                    assert (Y.stride(), dX.stride()) == (X.stride(), X.stride())
                    assert Y.dtype == dX.dtype == dtype


def test_launch_without_a_check():
    text = "void f() {\n  kernel<<<1, 1>>>();\n}\n"
    with pytest.raises(StagingError, match=r"a\.cu: a kernel launch"):
        verified("a.cu", text)
    verified("a.cu", text.replace("();\n", "();\n  C10_CUDA_KERNEL_LAUNCH_CHECK();\n"))
    # PyTorch checks once after both of its branches, which the linter does not see.
    verified("a.cu", text + "\n// of ours\n", {"a.cu": text})
    with pytest.raises(StagingError, match=r"a\.cu: a kernel launch"):
        verified("a.cu", text + text, {"a.cu": text})


@has_clang_format
def test_format():
    with pytest.raises(StagingError, match=r"a\.h: is not as clang-format"):
        verified("a.h", "int  a;\n")
    with pytest.raises(StagingError, match=r"a\.h: is not as clang-format"):
        verified("a.h", "int  a;\n", {"a.h": "int b;\n"})
    verified("a.h", "int  a;\n", {"a.h": "int  b;\n"})  # was not before


def test_python_that_was_valid():
    with pytest.raises(StagingError, match=r"a\.py: is not valid Python"):
        verified("a.py", "def f(:\n", {"a.py": "def f():\n  pass\n"})


# --- the glue, without building PyTorch ------------------------------------------------------

needs_nvcc = pytest.mark.skipif(
    torch.version.cuda is None or verify.find_nvcc() is None or platform.machine() != "x86_64",
    reason="compiling needs nvcc, a torch with CUDA, and x86-64",
)


def test_nvcc_is_that_of_cuda_home_or_on_the_path(tmp_path, monkeypatch):
    for name in ("first", "second"):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch(mode=0o755)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "first" / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "second"))
    assert verify.find_nvcc() == str(tmp_path / "second" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "third"))
    assert verify.find_nvcc() is None
    monkeypatch.delenv("CUDA_HOME")
    assert verify.find_nvcc() == str(tmp_path / "first" / "bin" / "nvcc")


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered files and aten_patch as a library that installs them behind the stubs."""
    from torch.utils.cpp_extension import include_paths

    folder = tmp_path_factory.mktemp("stub")
    architecture = "sm_90"
    if torch.cuda.is_available():
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    objects = verify.compile_units(code_size.new_files(), folder, [f"-arch={architecture}", "-O2"])
    library = folder / "stub.so"
    torch_libraries = Path(torch.__file__).parent / "lib"
    subprocess.run(
        [
            verify.find_nvcc(),
            "-std=c++20",
            "-shared",
            "-cudart=shared",
            "-Xcompiler=-fPIC",
            # As PyTorch was built: the signature of what a stub asks depends on them.
            "-DHAVE_AVX2_CPU_DEFINITION",
            "-DHAVE_AVX512_CPU_DEFINITION",
            f"-I{folder / 'aten/src'}",
            *(f"-I{path}" for path in include_paths()),
            str(ROOT / "tests" / "upstream_stub.cpp"),
            *map(str, objects),
            f"-L{torch_libraries}",
            *(f"-l{name}" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda")),
            "-o",
            str(library),
        ],
        check=True,
        timeout=900,
    )
    return library


@needs_nvcc
def test_glue_compiles_and_links(stub_library, tmp_path):
    """Against the headers and libraries of the installed torch; every symbol is found."""
    code = f"import torch; torch.ops.load_library({str(stub_library)!r})"
    run_python("-c", code, cwd=tmp_path)


@needs_nvcc
def test_glue_leaves_operands_off_their_elements_to_others(stub_library, tmp_path):
    """Before it asks for a device, so that tensors of the CPU show it."""
    script = f"""if True:
        import torch
        from upstream_parity import assert_left_to_others
        torch.ops.load_library({str(stub_library)!r})
        stub = torch.ops.group_norm_stub
        stub.install()
        for dtype in (torch.float32, torch.float64):
            X = torch.empty(2, 8, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
            odd = torch.empty(0, dtype=dtype)
            storage = torch.UntypedStorage(X.nbytes + 8)[2:]
            odd.set_(storage, 0, X.shape, X.stride())
            assert odd.data_ptr() % 4 == 2
            statistics = X.new_empty(2, 2, 4)
            assert_left_to_others(
                lambda: stub.forward(odd, None, None, 2, 8, 16, 4, 1e-5),
                lambda: stub.backward(odd, X, *statistics, None, 2, 8, 16, 4, [True] * 3),
            )
    """
    run_python("-c", script, cwd=tmp_path)


@needs_nvcc
def test_code_size(tmp_path, monkeypatch, capsys):
    """Of each GPU that it names, of CUDA files alone; and what the results file says in text."""
    assert KERNEL not in code_size.new_files()
    small = {"aten/a.cu": "__global__ void a(int* x) { *x = 1; }\n", "aten/b.cpp": "#error\n"}
    monkeypatch.setattr(code_size, "new_files", lambda: small)
    assert code_size.main(["--output", "size-test", "--folder", str(tmp_path)]) == 0
    content = results.read(tmp_path / "size-test.json")
    assert [row["name"] for row in content["rows"]] == list(code_size.ARCHITECTURES)
    assert all(row["files"] == {"a": row["bytes"]} for row in content["rows"])
    assert render_readme.size(content) in capsys.readouterr().out


@pytest.mark.cuda
@needs_nvcc
@pytest.mark.parametrize("whole_chip", ["0", "1"])
def test_glue_agrees_with_stock_through_the_stubs(whole_chip, stub_library, tmp_path):
    """In a process of its own: what is behind the stubs cannot be asked for and put back."""
    script = Path(__file__).parent / "upstream_parity.py"
    environ = {"TORCH_GROUP_NORM_WHOLE_CHIP": whole_chip}
    run_python(script, stub_library, cwd=tmp_path, **environ)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_cases_for_test_nn_pass_on_our_kernels(device, tmp_path, monkeypatch):
    """The semantics that the cases ask for are those of the override: on a CPU as well."""
    pytest.importorskip("expecttest", reason="torch's own test classes import it")
    text = (ROOT / "aten_patch/test/test_nn.py").read_text()
    if device == "cpu":  # but for the one of 2^31 elements, which would take minutes
        text = text.replace("    @onlyCUDA\n    @dtypes", "    @dtypes")
    file = tmp_path / "cases.py"
    file.write_text(f"import gn_override\n{text}")
    # With CI set torch's own runner writes reports, by a package of its own.
    monkeypatch.delenv("CI", raising=False)
    done = run_python(file, "-k", device.upper(), cwd=tmp_path)
    assert int(re.findall(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)[0]) >= 15
