"""The build (setup.py) and the loading of what it made (gn_override/_library.py).

Nothing here compiles a kernel or asks the network for anything: the builds that run are of a copy
of the tree in which every source file is a line or two.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from processes import run_python

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


def load_setup(root: Path) -> ModuleType:
    """The setup.py of a tree as a module: its functions, without a build."""
    spec = importlib.util.spec_from_file_location("gn_override_setup", root / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py, which finds no CUDA toolkit outside of what a test gives it."""
    module = load_setup(ROOT)
    monkeypatch.setattr(module, "DEFAULT_HOME", tmp_path / "no such toolkit")
    return module


# ---------------------------------------------------------------- CUDA toolkits


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_toolkit(home: Path, inside: str = ".", release: str = "13.0") -> Path:
    """A directory that looks like a CUDA toolkit, with its files under home/inside."""
    for directory, name in (("include", "cuda_runtime.h"), ("lib", "libcudart.so")):
        (home / inside / directory).mkdir(parents=True)
        (home / inside / directory / name).touch()
    executable(
        home / "bin" / "nvcc",
        f"""#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --list-gpu-arch) printf 'compute_80\\ncompute_90\\ncompute_100\\n' ;;
  --dryrun) echo '#$ _SPACE_= ' >&2; echo '#$ TOP={home}/bin/..' >&2 ;;
esac
""",
    )
    return home


@pytest.mark.parametrize("inside", [".", "targets/x86_64-linux"])
def test_toolkit_on_path(setup: ModuleType, tmp_path: Path, inside: str) -> None:
    home = make_toolkit(tmp_path / "cuda", inside)
    found = setup.find_toolkit({"PATH": str(home / "bin")})
    assert found.home == home
    assert found.version == (13, 0)
    assert found.archs == ("8.0", "9.0", "10.0")
    assert [d.resolve() for d in found.includes] == [(home / inside / "include").resolve()]
    assert [d.resolve() for d in found.libraries] == [(home / inside / "lib").resolve()]


def test_nvcc_wrapper_is_seen_through(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    wrapper = executable(
        tmp_path / "usr" / "bin" / "nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n'
    )
    found = setup.find_toolkit({"PATH": str(wrapper.parent)})
    assert found.home == home.resolve()


def test_nvcc_link_is_followed(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    assert setup.find_toolkit({"PATH": str(tmp_path / "bin")}).home == home.resolve()


def test_cuda_home_goes_before_path(setup: ModuleType, tmp_path: Path) -> None:
    first = make_toolkit(tmp_path / "first")
    second = make_toolkit(tmp_path / "second", release="12.8")
    found = setup.find_toolkit({"PATH": str(first / "bin"), "CUDA_HOME": str(second)})
    assert (found.home, found.version) == (second, (12, 8))


def test_wrapper_of_nothing_is_reported_with_the_fix(setup: ModuleType, tmp_path: Path) -> None:
    wrapper = executable(tmp_path / "bin" / "nvcc", "#!/bin/sh\nexit 1\n")
    reason = setup.find_toolkit({"PATH": str(wrapper.parent)})
    assert str(wrapper) in reason and "set CUDA_HOME" in reason


def test_no_nvcc(setup: ModuleType, tmp_path: Path) -> None:
    assert "no nvcc" in setup.find_toolkit({"PATH": str(tmp_path)})


def test_wrong_cuda_home_is_an_error(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    (home / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(setup.BuildError, match=r"CUDA_HOME is .*cuda_runtime\.h"):
        setup.find_toolkit({"PATH": "", "CUDA_HOME": str(home)})


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_toolkit_of_this_machine() -> None:
    found = load_setup(ROOT).find_toolkit(os.environ)
    assert (found.home / "bin" / "nvcc").exists()
    assert (found.includes[0] / "cuda_runtime.h").exists()
    assert "9.0" in found.archs


# ---------------------------------------------------------------- architectures

KNOWN = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


@pytest.mark.parametrize(
    ("asked", "visible", "known", "archs"),
    [
        ("9.0", [], KNOWN, ["9.0"]),
        ("9.0", [(8, 0)], KNOWN, ["9.0"]),
        ("8.0;8.6 9.0a+PTX", [], KNOWN, ["8.0", "8.6", "9.0a+PTX"]),
        ("8.0 8.0;", [], KNOWN, ["8.0"]),
        ("Ampere;Hopper", [], KNOWN, ["8.0", "8.6+PTX", "9.0+PTX"]),
        ("Ampere+Tegra", [], (*KNOWN, "8.7"), ["8.7"]),
        (None, [(9, 0), (8, 0), (9, 0)], KNOWN, ["8.0", "9.0"]),
        ("native", [(8, 9)], KNOWN, ["8.9"]),
        (None, [(10, 3)], KNOWN, ["10.0+PTX"]),
        (None, [(12, 1), (13, 0)], KNOWN, ["12.0+PTX"]),
        (None, [(9, 0), (7, 5)], KNOWN, ["9.0"]),
        (None, [(7, 5)], KNOWN, ["8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0"]),
        ("", [], KNOWN, ["8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0"]),
        (None, [], KNOWN[:5], ["8.0", "8.6", "8.9", "9.0+PTX"]),
    ],
)
def test_architectures(
    setup: ModuleType,
    asked: str | None,
    visible: list[tuple[int, int]],
    known: tuple[str, ...],
    archs: list[str],
) -> None:
    assert setup.select_archs(asked, visible, known)[0] == archs


@pytest.mark.parametrize("asked", ["sm_90", "9", "13.0", "8.0;9.0+SASS"])
def test_unknown_architecture_is_an_error(setup: ModuleType, asked: str) -> None:
    with pytest.raises(setup.BuildError, match="TORCH_CUDA_ARCH_LIST asks for"):
        setup.select_archs(asked, [], KNOWN)


def test_gencode(setup: ModuleType) -> None:
    assert setup.gencode(["8.0", "9.0a+PTX"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


# ---------------------------------------------------------------- what is built


def fake_torch(cuda: str | None, *gpus: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.14.1",
        __file__=torch.__file__,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_capability=lambda i: gpus[i],
        ),
    )


def test_cuda_torch_without_gpu_builds_both(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    config = setup.configure(fake_torch("13.2"), {"PATH": str(home / "bin")})
    assert config.backends == ["cpu", "cuda"]
    assert config.archs == ["8.0", "9.0+PTX", "10.0"]
    assert len(config.notes) == 1
    assert "no GPU of compute" in config.notes[0] and "TORCH_CUDA_ARCH_LIST" in config.notes[0]


def test_cuda_torch_with_gpu(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    config = setup.configure(fake_torch("13.0", (9, 0)), {"PATH": str(home / "bin")})
    assert config.archs == ["9.0"]


@pytest.mark.parametrize(
    ("cuda", "environ", "reason"),
    [
        (None, {}, "torch 2.14.1 has no CUDA"),
        ("13.0", {"PATH": ""}, "there is no nvcc"),
        ("13.0", {"GN_OVERRIDE_CUDA": "0"}, "GN_OVERRIDE_CUDA=0"),
    ],
)
def test_cpu_only_is_said_once(
    setup: ModuleType, cuda: str | None, environ: dict[str, str], reason: str
) -> None:
    config = setup.configure(fake_torch(cuda), environ)
    assert config.backends == ["cpu"]
    assert not [s for s in config.sources if s.endswith(".cu")]
    assert len(config.notes) == 1 and f"CPU backend only: {reason}" in config.notes[0]


def test_toolkit_of_another_major_version_is_an_error(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda", release="12.8")
    with pytest.raises(setup.BuildError, match=r"CUDA 13\.0, but the toolkit in .* is CUDA 12\.8"):
        setup.configure(fake_torch("13.0"), {"PATH": str(home / "bin")})


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "2.15.0a0+git12", "2.15.1"])
def test_supported_torch(setup: ModuleType, version: str) -> None:
    setup.check_torch_version(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.16.0.dev2026", "3.0.0", "2.2.0"])
def test_unsupported_torch_is_an_error(setup: ModuleType, version: str) -> None:
    with pytest.raises(setup.BuildError, match=r"not supported: run `pip install 'torch>=2\.11"):
        setup.check_torch_version(version)


def test_missing_source_is_an_error(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    with pytest.raises(setup.BuildError, match=r"missing from .*native/plan/plan\.cpp"):
        setup.configure(fake_torch(None), {})


def test_source_lists_name_every_source(setup: ModuleType) -> None:
    listed = [*setup.SOURCES, *setup.INSTRUCTION_SETS, *setup.CUDA_SOURCES]
    on_disk = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "native").rglob("*")
        if path.suffix in (".cpp", ".cu")
    ]
    assert sorted(listed) == sorted(on_disk)


def test_another_torch_compiles_the_binding_again(setup: ModuleType, tmp_path: Path) -> None:
    """Objects of one torch must not be linked for the next, but for the planner's and kernels'."""
    home = make_toolkit(tmp_path / "cuda")
    stock = fake_torch("13.0")
    other = SimpleNamespace(**{**vars(stock), "__version__": "2.15.0"})
    config = setup.configure(stock, {"PATH": str(home / "bin")})
    one, two = (
        setup.extension(torch, [f"/{torch.__version__}"], config, {"NAME": value})
        for torch, value in ((stock, True), (other, False))
    )
    assert one.extra_compile_args["torch"] != two.extra_compile_args["torch"]
    for alone in ("cxx", "nvcc"):
        assert one.extra_compile_args[alone] == two.extra_compile_args[alone]


def test_torch_headers_are_out_of_the_kernels_reach(setup: ModuleType, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    config = setup.configure(fake_torch("13.0"), {"PATH": str(home / "bin")})
    flags = setup.extension(torch, ["/torch/include"], config, {"NAME": True}).extra_compile_args
    of_torch = {"/torch/include", "-DGN_OVERRIDE_NAME=1", "-DGN_OVERRIDE_WITH_CUDA=1"}
    assert of_torch <= {*flags["torch"]}
    for compiler in ("cxx", "nvcc"):
        assert "/torch/include" not in flags[compiler]
        assert not [f for f in flags[compiler] if f.startswith("-DGN_OVERRIDE")]
        assert not [f for f in flags[compiler] if "fast" in f or "-march" in f]


def test_sources_have_the_flags_that_they_need(setup: ModuleType, monkeypatch) -> None:
    """The binding those of torch, some kernels those of their instruction set; objects are linked
    in the order of the lists."""
    monkeypatch.setenv("MAX_JOBS", "1")
    sources = [*setup.SOURCES, *setup.INSTRUCTION_SETS, *setup.CUDA_SOURCES]
    flags: dict[str, list[str]] = {}

    def compile_all(chosen: list[str], output_dir: str, extra_postargs: dict[str, list[str]]):
        flags.update({source: extra_postargs["cxx"] for source in chosen})
        return [f"{output_dir}/{source}" for source in chosen]

    postargs = {"cxx": ["-O3"], "torch": ["-DTORCH"], "nvcc": []}
    objects = setup.by_flags(compile_all)(sources, "out", postargs)
    assert len(set(objects)) == len(sources)
    for source in sources:
        expected = setup.INSTRUCTION_SETS.get(source, [])
        if source.endswith(".cpp") and not source.startswith(("native/plan", "native/cpu")):
            expected = ["-DTORCH"]
        if source.endswith(".cpp"):
            assert flags[source] == ["-O3", *expected]
    of_sets = [o for o in objects if o.endswith(tuple(setup.INSTRUCTION_SETS))]
    assert objects[-2:] == of_sets and of_sets[0].endswith("avx2.cpp")


def test_flags_of_both_backends(setup: ModuleType, tmp_path: Path) -> None:
    """Fast, on all threads, with no symbol that another library could see or must have."""
    home = make_toolkit(tmp_path / "cuda")
    config = setup.configure(fake_torch("13.0"), {"PATH": str(home / "bin")})
    built = setup.extension(torch, [], config, {})
    assert {"-O3", "-DNDEBUG", "-fopenmp", "-fvisibility=hidden"} <= {
        *built.extra_compile_args["cxx"]
    }
    assert {"-O3", "-DNDEBUG", *setup.gencode(config.archs)} <= {*built.extra_compile_args["nvcc"]}
    assert "-Xcompiler=-fvisibility=hidden" in " ".join(built.extra_compile_args["nvcc"])
    assert {"-fopenmp", "-Wl,--no-undefined"} <= {*built.extra_link_args}
    assert built.libraries == ["c10", "torch_cpu", "c10_cuda", "torch_cuda", "cudart"]
    assert str(home / "lib") in built.library_dirs
    cpu = setup.extension(torch, [], setup.configure(fake_torch(None), {}), {})
    assert cpu.libraries == ["c10", "torch_cpu"]


def test_record_of_both_backends(setup: ModuleType, tmp_path: Path) -> None:
    """A build without CUDA is one for any torch's CUDA."""
    home, stock = make_toolkit(tmp_path / "cuda"), fake_torch("13.0")
    for environ, expected in (
        ({"PATH": str(home / "bin")}, ("13.0", ["8.0", "9.0+PTX", "10.0"], ["cpu", "cuda"])),
        ({"GN_OVERRIDE_CUDA": "0"}, (None, [], ["cpu"])),
    ):
        info = setup.build_info(stock, setup.configure(stock, environ), {})
        assert (info["torch_cuda"], info["cuda_archs"], info["backends"]) == expected


# ---------------------------------------------------------------- what the build needs


def test_old_setuptools_is_an_error(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.setuptools, "__version__", "76.1.0")
    with pytest.raises(setup.BuildError, match=r"76\.1\.0 is too old: run `pip install 'setup"):
        setup.build_arguments()


def test_ninja_is_put_on_path(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(BIN_DIR="/ninja/bin"))
    setup.require_ninja()
    assert os.environ["PATH"] == f"/ninja/bin{os.pathsep}{tmp_path}"
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(setup.BuildError, match="needs ninja: run `pip install ninja"):
        setup.require_ninja()


# ---------------------------------------------------------------- whole builds

HIDE_TORCH = 'raise ModuleNotFoundError("No module named torch", name="torch")\n'


@pytest.mark.parametrize("command", ["build_ext", "bdist_wheel", "dist_info", "editable_wheel"])
def test_torch_missing_is_one_line_with_the_command(tmp_path: Path, command: str) -> None:
    (tmp_path / "torch.py").write_text(HIDE_TORCH)
    result = run_python(ROOT / "setup.py", command, cwd=ROOT, status=1, PYTHONPATH=str(tmp_path))
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "pip install --no-build-isolation ." in result.stderr


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what setup.py reads, with sources that compile in no time."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("gn_override", "codegen"):
        shutil.copytree(
            ROOT / name,
            root / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json"),
        )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, root)
    (root / "README.md").write_text("readme\n")
    setup = load_setup(ROOT)
    for source in [*setup.SOURCES, *setup.CUDA_SOURCES]:
        (root / source).parent.mkdir(parents=True, exist_ok=True)
        (root / source).write_text("#ifdef __AVX2__\n#error a flag of another file\n#endif\n")
    for source, macro in (("avx2", "__AVX2__"), ("avx512", "__AVX512VL__")):
        (root / f"native/cpu/kernels_{source}.cpp").write_text(
            f"#ifndef {macro}\n#error flags are missing\n#endif\n"
        )
    (root / "native/plan/plan.h").touch()
    return root


def test_sdist_has_what_the_build_needs(small_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(HIDE_TORCH)  # it needs no torch
    for left in ("tests/.ruff_cache/0.1/a", "aten_patch/.hypothesis/b", "native/.DS_Store"):
        (small_tree / left).parent.mkdir(parents=True, exist_ok=True)
        (small_tree / left).touch()
    run_python("setup.py", "-q", "sdist", "-d", tmp_path, cwd=small_tree, PYTHONPATH=str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    setup = load_setup(ROOT)
    needed = {*setup.SOURCES, *setup.INSTRUCTION_SETS, *setup.CUDA_SOURCES}
    needed |= {"native/plan/plan.h", "codegen/group_norm.yaml", "codegen/conditions.py"}
    needed |= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "gn_override/py.typed"}
    needed |= {str(p.relative_to(ROOT)) for p in (ROOT / "codegen" / "templates").iterdir()}
    assert needed <= names
    unwanted = r"\.so$|\.pyc$|__pycache__|_build_info|_cache/|\.hypothesis|\.DS_Store"
    assert not [n for n in names if re.search(unwanted, n)]


@pytest.fixture(scope="module")
def wheel(small_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the small tree, CPU backend only."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    directory = tmp_path_factory.mktemp("wheel")
    result = run_python(
        "setup.py", "-q", "bdist_wheel", "-d", directory, cwd=small_tree, GN_OVERRIDE_CUDA="0"
    )
    assert result.stderr.count("CPU backend only") == 1
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_is_for_every_python(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert re.search(r"gn_override-[\d.]+-cp310-abi3-linux_\w+\.whl$", wheel.filename)


def test_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "gn_override").glob("*.py")}
    assert names == modules | {
        "gn_override/_C.abi3.so",
        "gn_override/_build_info.json",
        "gn_override/py.typed",
    }


def test_wheel_says_what_it_was_built_for(wheel: zipfile.ZipFile) -> None:
    info = json.loads(wheel.read("gn_override/_build_info.json"))
    assert info["torch"] == torch.__version__
    assert info["torch_cuda"] is None and info["cuda_archs"] == []
    assert info["backends"] == ["cpu"]
    assert info["conditions"] and all(isinstance(v, bool) for v in info["conditions"].values())
    metadata = next(n for n in wheel.namelist() if n.endswith("/METADATA"))
    assert f"Version: {info['version']}" in wheel.read(metadata).decode().splitlines()


def test_build_in_place(small_tree: Path, wheel: zipfile.ZipFile) -> None:
    """After the wheel, whose objects serve again."""
    run_python("setup.py", "-q", "build_ext", "--inplace", cwd=small_tree, GN_OVERRIDE_CUDA="0")
    package = small_tree / "gn_override"
    assert (package / "_C.abi3.so").exists()
    info = json.loads((package / "_build_info.json").read_text())
    assert info == json.loads(wheel.read("gn_override/_build_info.json"))


def test_build_elsewhere(small_tree: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """One folder for the path, with the package in it."""
    command = ("setup.py", "-q", "build", "--build-base", tmp_path)
    run_python(*command, cwd=small_tree, GN_OVERRIDE_CUDA="0")
    (package,) = tmp_path.glob("lib.*/gn_override")
    built = {path.name for path in package.iterdir()}
    assert {"__init__.py", "_C.abi3.so", "_build_info.json"} <= built


def test_editable_install(small_tree: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Python finds the tree, and what was built is in it. Touches nothing that is installed."""
    pytest.importorskip("pip")
    package = small_tree / "gn_override"
    built = [package / "_C.abi3.so", package / "_build_info.json"]
    for path in built:
        path.unlink(missing_ok=True)
    run_python(
        *("-m", "pip", "install", "--no-build-isolation", "-e", ".[test,dev]"),
        *("--no-deps", "--no-index", "--target", tmp_path),
        cwd=small_tree,
        GN_OVERRIDE_CUDA="0",
    )
    code = (
        "import importlib.util, site, sys\n"
        "site.addsitedir(sys.argv[1])\n"
        "print(importlib.util.find_spec('gn_override').origin)\n"
    )
    found = run_python("-I", "-S", "-c", code, tmp_path, cwd=tmp_path)  # not what is installed
    assert Path(found.stdout.strip()).parent == package
    assert all(path.exists() for path in built)


def test_failed_build_leaves_no_record(small_tree: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(small_tree, tree, ignore=shutil.ignore_patterns("build", "*.so"))
    record = tmp_path / "lib" / "gn_override" / "_build_info.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    (tree / "native/plan/plan.cpp").write_text("#error broken\n")
    result = run_python(
        *("setup.py", "-q", "build", "--build-lib", tmp_path / "lib"),
        cwd=tree,
        status=1,
        GN_OVERRIDE_CUDA="0",
    )
    assert "#error broken" in result.stdout
    assert "Traceback" not in result.stderr
    assert not record.exists()


# ---------------------------------------------------------------- loading


@pytest.fixture
def library() -> ModuleType:
    return importlib.import_module("gn_override._library")


RECORD = {"torch": "2.13.0+cpu", "torch_cuda": None}
CUDA_RECORD = {"torch": "2.14.1", "torch_cuda": "13.0"}


@pytest.mark.parametrize(
    ("record", "version", "cuda", "reason"),
    [
        (RECORD, "2.13.0+cpu", None, None),
        (RECORD, "2.13.1", None, None),
        (RECORD, "2.13.0+cu130", "13.0", None),
        (RECORD, "2.14.0", None, r"built for torch 2.13.0\+cpu, and this is torch 2.14.0$"),
        (RECORD, "2.1.3", None, "this is torch 2.1.3"),
        (RECORD, "3.13.0", None, "this is torch 3.13.0"),
        (CUDA_RECORD, "2.14.1", "13.2", None),
        (CUDA_RECORD, "2.14.0a0+git1234", "13.0", None),
        (CUDA_RECORD, "2.14.1+cpu", None, r"this is torch 2.14.1\+cpu without CUDA"),
        (CUDA_RECORD, "2.14.1", "12.8", r"\(CUDA 13.0\), and this is .* \(CUDA 12.8\)"),
    ],
)
def test_mismatch(
    library: ModuleType,
    record: dict[str, str | None],
    version: str,
    cuda: str | None,
    reason: str | None,
) -> None:
    answer = library.mismatch(record, version, cuda)
    if reason is None:
        assert answer is None
    else:
        assert re.search(reason, answer)


@pytest.fixture
def installed(tmp_path: Path, library: ModuleType) -> Path:
    """A copy of the package under test, which a test may damage."""
    shutil.copytree(
        Path(library.__file__).parent,
        tmp_path / "gn_override",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return tmp_path / "gn_override"


def import_error(package: Path) -> str:
    """The ImportError of `import gn_override` in a new process; fails if it is anything else."""
    result = run_python("-c", "import gn_override", cwd=package.parent, status=1)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: "), result.stderr
    assert "pip install --no-build-isolation" in last
    return last


def test_intact_copy_loads(installed: Path) -> None:
    """From the path, before what is installed."""
    result = run_python(
        *("-c", "import gn_override; print(gn_override.__file__)"),
        cwd=Path(__file__).parent,
        PYTHONPATH=str(installed.parent),
    )
    assert Path(result.stdout.strip()).parent == installed


def test_extension_for_another_torch(installed: Path) -> None:
    record = installed / "_build_info.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "torch": "2.10.0"}))
    message = import_error(installed)
    assert "built for torch 2.10.0" in message and f"this is torch {torch.__version__}" in message


def test_extension_is_missing(installed: Path) -> None:
    (installed / "_C.abi3.so").unlink()
    assert "has no extension in" in import_error(installed)


def test_extension_is_garbage(installed: Path) -> None:
    (installed / "_C.abi3.so").write_bytes(b"not a library" * 1000)
    message = import_error(installed)
    assert "cannot be loaded" in message and "invalid ELF header" in message


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"torch": 2.13}', "\xff"])
def test_record_is_damaged(
    installed: Path, library: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    record = installed / "_build_info.json"
    record.unlink()
    if text is not None:
        record.write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(library, "BUILD_INFO", record)
    with pytest.raises(ImportError, match="is not the record of a build") as caught:
        library.build_info.__wrapped__()
    assert "pip install --no-build-isolation" in str(caught.value)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_library_needs_no_python(library: ModuleType) -> None:
    """One build serves every Python, so it may use none of its symbols."""
    listing = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", "--dynamic", str(library.LIBRARY)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        timeout=300,
    ).stdout
    assert not re.findall(r" UND _?Py\w+", listing)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", listing))
    assert {"libc10", "libtorch_cpu"} <= needed
    assert needed <= {
        *("libc10", "libtorch", "libtorch_cpu", "libc10_cuda", "libtorch_cuda", "libcudart"),
        *("libstdc++", "libgcc_s", "libm", "libc", "libpthread", "libdl", "ld-linux-x86-64"),
        "libgomp",
        *("ld-linux-aarch64",),
    }
