"""Checks what codegen/upstream.py rendered, as PyTorch's own build and lint would."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from codegen import model
from codegen.generate import ROOT
from codegen.upstream import Read, Rendered, StagingError

NATIVE_FUNCTIONS = "aten/src/ATen/native/native_functions.yaml"
TAGS = "aten/src/ATen/native/tags.yaml"
DERIVATIVES = "tools/autograd/derivatives.yaml"

CPP = (".h", ".cpp", ".cu", ".cuh")

# As PyTorch compiles its own kernels: among others, without CUDA's operators on halves.
NVCC_FLAGS = (
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
)


def verify(commits: Sequence[Rendered], read: Read) -> list[str]:
    """Checks the tree with the commits on top, and returns what could not be checked here.

    Raises StagingError where the operator definitions do not parse or have other signatures than
    the kernels; where more kernel launches are not followed by a check than before; where a C++
    file is not as clang-format leaves it, or a Python file does not parse, that did before or is
    new.
    """
    staged = {path: text for commit in commits for path, text in commit.files.items()}
    definitions = []
    for path in (NATIVE_FUNCTIONS, TAGS, DERIVATIVES):
        text = staged.get(path) or read(path)
        if text is None:
            raise StagingError(f"{path}: there is no such file")
        definitions.append(text)
    _check_definitions(*definitions)
    for path, text in staged.items():
        if path.endswith(".py") and _is_python(read(path) or "") and not _is_python(text):
            raise StagingError(f"{path}: is not valid Python any more")
    changes = {p: (read(p), t) for p, t in staged.items() if p.endswith(CPP)}
    return _check_launches(changes) + _check_format(changes)


def compile_units(
    files: Mapping[str, str], folder: Path, flags: Sequence[str] = (), *, cubins: bool = False
) -> list[Path]:
    """Compiles the C++ and CUDA files among ``files``, texts by their paths in PyTorch, against
    the headers of the installed torch, and returns the object files in ``folder``; with
    ``cubins`` those of machine code that the CUDA files alone have.

    ``flags`` are nvcc's. Raises StagingError with what the compiler says.
    """
    from torch.utils.cpp_extension import include_paths

    nvcc = find_nvcc()
    if nvcc is None:
        raise StagingError("compiling needs nvcc: put one on PATH or set CUDA_HOME")
    units = []
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if path.endswith(".cu" if cubins else (".cpp", ".cu")):
            units.append(file)
    includes = [f"-I{folder / 'aten/src'}", *(f"-I{path}" for path in include_paths())]
    command = [nvcc, "-std=c++20", "-DAT_PER_OPERATOR_HEADERS", *NVCC_FLAGS, *includes, *flags]
    command += ["-cubin"] if cubins else ["-Xcompiler", "-fPIC", "-c"]

    def compile_one(unit: Path) -> Path:
        target = folder / f"{unit.stem}{'.cubin' if cubins else '.o'}"
        done = subprocess.run(
            [*command, str(unit), "-o", str(target)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise StagingError(f"{unit.relative_to(folder)}: {done.stdout}{done.stderr}")
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, units))


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME; else the one on PATH, or in /usr/local/cuda (as setup.py)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def tool(name: str) -> str | None:
    """A program beside the running Python, or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@functools.cache
def _check_definitions(native_functions: str, tags: str, derivatives: str) -> None:
    """Takes the texts of the three files: the same ones are parsed once."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, Path(path).name) for path in (NATIVE_FUNCTIONS, TAGS, DERIVATIVES)]
        for file, text in zip(files, (native_functions, tags, derivatives), strict=True):
            file.write_text(text)
        try:
            model.load(torch=model.Definitions("the checkout", *files))
        except model.CodegenError as error:
            raise StagingError(str(error)) from error
        except Exception as error:  # whatever torchgen raises
            raise StagingError(
                f"the torchgen of torch {version('torch')} cannot parse {NATIVE_FUNCTIONS} or "
                f"{DERIVATIVES}: {error}\n  install a torch that is as new as the checkout"
            ) from error


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _check_launches(files: dict[str, tuple[str | None, str]]) -> list[str]:
    """Takes texts before and after. PyTorch's own files have launches that its linter dislikes."""
    try:
        from torch.testing._internal.check_kernel_launches import (
            check_code_for_cuda_kernel_launches,
        )
    except ImportError:
        return ["kernel launches: torch is not installed"]
    for path, (before, text) in files.items():
        with contextlib.redirect_stderr(io.StringIO()):
            known = check_code_for_cuda_kernel_launches(before or "", path)
        with contextlib.redirect_stderr(io.StringIO()) as report:
            found = check_code_for_cuda_kernel_launches(text, path)
        if found > known:
            raise StagingError(
                f"{path}: a kernel launch is not followed by a check\n{report.getvalue()}"
            )
    return []


def _check_format(files: dict[str, tuple[str | None, str]]) -> list[str]:
    """Takes texts before and after."""
    clang_format = tool("clang-format")
    if clang_format is None:
        return ["format: clang-format is not installed"]

    def is_formatted(path: str, text: str) -> bool:
        return _formatted(clang_format, path, text) == text

    for path, (before, text) in files.items():
        if (before is None or is_formatted(path, before)) and not is_formatted(path, text):
            raise StagingError(f"{path}: is not as clang-format leaves it")
    return []


@functools.cache
def _formatted(clang_format: str, path: str, text: str) -> str:
    style = f"--style=file:{ROOT / '.clang-format'}"
    done = subprocess.run(
        [clang_format, style, f"--assume-filename={path}"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
