"""Loads the extension, after a check that it was built for the torch that runs."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

DIRECTORY = Path(__file__).resolve().parent
LIBRARY = DIRECTORY / "_C.abi3.so"
BUILD_INFO = DIRECTORY / "_build_info.json"

RECORD: dict[str, type | tuple[type, ...]] = {
    "version": str,
    "torch": str,
    "torch_cuda": (str, type(None)),
    "cuda_archs": list,
    "backends": list,
    "conditions": dict,
}

REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."
BUILD_IN_PLACE = "pip install --no-build-isolation -e ."


@functools.cache
def build_info() -> dict[str, Any]:
    """The record that the build left beside the extension.

    Keys: "version", "torch" and "torch_cuda" (the torch it was built for, and its CUDA version
    or None), "cuda_archs" (as "9.0"), "backends" ("cpu", "cuda") and "conditions" (name: bool).
    Raises ImportError where there is no record or where it cannot be read.
    """
    if not LIBRARY.exists():
        raise ImportError(
            f"gn_override has no extension in {DIRECTORY}. If this is the source tree and not "
            "what you installed, run from another directory; to build here, run "
            f"`{BUILD_IN_PLACE}` in {DIRECTORY.parent}"
        )
    try:
        info: dict[str, Any] = json.loads(BUILD_INFO.read_text())
        for key, kind in RECORD.items():
            if not isinstance(info[key], kind):
                raise TypeError(f"{key} is {info[key]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"{BUILD_INFO} is not the record of a build ({error!r}). {_rebuild()}"
        ) from None
    return info


def mismatch(info: dict[str, Any], version: str, cuda: str | None) -> str | None:
    """Why an extension with this record must not be loaded into a torch, or None if it may.

    Args:
        info: the record of the build.
        version: the running torch.__version__, for instance "2.13.0+cpu".
        cuda: the running torch.version.cuda.
    """
    running = f"torch {version}" + (f" (CUDA {cuda})" if cuda else "")
    built = f"torch {info['torch']}" + (
        f" (CUDA {info['torch_cuda']})" if info["torch_cuda"] else ""
    )
    if _release(info["torch"]) != _release(version):
        return f"it was built for {built}, and this is {running}"
    if info["torch_cuda"] and not cuda:
        return f"it was built with CUDA for {built}, and this is {running} without CUDA"
    if info["torch_cuda"] and cuda and info["torch_cuda"].split(".")[0] != cuda.split(".")[0]:
        return f"it was built for {built}, and this is {running}"
    return None


def load() -> None:
    """Loads the extension, which registers its operators; the switch stays off.

    Raises ImportError, with the reason and the command that helps, where the extension is
    missing, was built for another torch than the running one, or cannot be loaded.
    """
    reason = mismatch(build_info(), torch.__version__, torch.version.cuda)
    if reason is not None:
        raise ImportError(f"gn_override's extension does not fit: {reason}. {_rebuild()}")
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:  # of torch's own, whose cause has the linker's words
        why = error.__cause__ or error
        raise ImportError(f"{LIBRARY} cannot be loaded ({why}). {_rebuild()}") from error


def first_import() -> Any:
    """The package as it was first imported, which PyTorch holds functions of.

    Where its modules have left sys.modules since, they are put back, and an import gives them.
    """
    package = vars(torch.ops.gn_override).get("_package", sys.modules["gn_override"])
    for module in (package, *vars(package).values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] == "gn_override":
            sys.modules[module.__name__] = module
    return package


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Context manager (or decorator): no mode sees the operators that are called inside."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def callers(name: str) -> Iterator[FrameType]:
    """The frames of this thread that run a function of that name, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name:
            yield frame
        frame = frame.f_back


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Context manager (or decorator): torch.jit.trace records no operator that is called inside."""
    trace = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]


def _release(version: str) -> list[str]:
    """Major and minor: the binary interface of torch changes with these."""
    return version.split("+")[0].split(".")[:2]


def _rebuild() -> str:
    command = BUILD_IN_PLACE if (DIRECTORY.parent / "setup.py").exists() else REBUILD
    return f"To rebuild it, run `{command}` in the source tree of gn_override"
