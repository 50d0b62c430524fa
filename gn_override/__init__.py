"""Channels-last group normalisation for the GroupNorm calls that a program already makes.

    import gn_override

is all: ``torch.nn.GroupNorm`` and ``torch.nn.functional.group_norm`` on channels-last tensors
(NHWC, NDHWC, NLC) now run on this package's kernels, forward and backward. Everything else goes
to PyTorch as before. ``GN_OVERRIDE=0`` in the environment imports without switching on.

The switch is one flag of the process, shared by all threads; it may be flipped at any time, which
drops what torch.compile has made. Where code that a compile runs, a backend for example, flips it
and does not flip it back, that waits for the next enable(), disable() or set_...() outside.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gn_override import _library

if TYPE_CHECKING:
    from gn_override import functional, nn
    from gn_override._explain import Declined, Explanation, explain
    from gn_override._fuse import FusedPair, Fusion, SkippedNorm, fuse
    from gn_override._report import Owner, Report, report

    __version__: str

__all__ = [
    "Declined",
    "Explanation",
    "FusedPair",
    "Fusion",
    "Owner",
    "Report",
    "SkippedNorm",
    "__version__",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "explain",
    "functional",
    "fuse",
    "is_enabled",
    "nn",
    "report",
    "set_autocast",
    "set_inductor",
]

try:
    _library.load()
    _package = _library.first_import()
except ImportError:
    from gn_override import _doctor

    _doctor.take_over()
    raise

# These need the loaded library.
import gn_override._inductor as _inductor
import gn_override._meta as _meta
import gn_override._whole_chip as _whole_chip
from gn_override._autocast import set_autocast
from gn_override._inductor import set_inductor

_LAZY = {
    "Declined": "gn_override._explain",
    "Explanation": "gn_override._explain",
    "explain": "gn_override._explain",
    "FusedPair": "gn_override._fuse",
    "Fusion": "gn_override._fuse",
    "SkippedNorm": "gn_override._fuse",
    "fuse": "gn_override._fuse",
    "Owner": "gn_override._report",
    "Report": "gn_override._report",
    "report": "gn_override._report",
}


if not TYPE_CHECKING:  # by which every name would do

    def __getattr__(name: str) -> Any:
        """What most programs never call is imported on first use, and so is the version."""
        if name == "__version__":
            return _library.build_info()["version"]
        if name in ("functional", "nn"):
            return importlib.import_module(f"gn_override.{name}")
        if name in _LAZY:
            value = getattr(importlib.import_module(_LAZY[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("_"))})


# The switch once more: an operator that is asked would become a part of what is traced.
_on: bool = globals().get("_on", False)  # which a reload finds


def _set_on(on: bool) -> bool:
    global _on
    before: bool = torch.ops.gn_override.set_enabled(on)
    _on = on
    return before


def _set(on: bool) -> bool:
    """Turn the switch, and return what it was."""
    return _inductor.turn(_set_on, on)


def enable() -> None:
    """Send group normalisation that the kernels serve to them, from the next call on.

    Raises:
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    _set(True)


def disable() -> None:
    """Send every call to PyTorch's own kernels: results are then stock's, bit for bit.

    Raises:
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    _set(False)


def is_enabled() -> bool:
    """Whether the override is switched on."""
    return _on


@contextlib.contextmanager
def _switched(on: bool) -> Iterator[None]:
    before = _set(on)
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Context manager (or decorator): on inside, what it was before afterwards.

    The switch is the process's: other threads see it too while the block runs. Each block restores
    what it found, so of two that overlap in different threads, one that began later and ends later
    leaves what the other had set.

    Raises:
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    with _switched(True):
        yield


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Context manager (or decorator): off inside, what it was before afterwards.

    The switch is the process's: other threads see it too while the block runs. Each block restores
    what it found, so of two that overlap in different threads, one that began later and ends later
    leaves what the other had set.

    Raises:
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    with _switched(False):
        yield


with _library.unseen():
    _meta.install()
    _inductor.install()
    _whole_chip.install()
vars(torch.ops.gn_override)["_package"] = _package  # for first_import()
if os.environ.get("GN_OVERRIDE", "1") != "0":
    _package.enable()
