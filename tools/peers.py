"""Other packages' channels-last group normalisation, where they can be imported.

apex_one_pass, apex_two_pass, apex_v2   NVIDIA's apex, built with --group_norm
gnnhwc                                  gnNHWC, installed or cloned into a folder of that name
stable_fast                             stable-fast's Triton kernels

Kernels are called directly: the packages' modules hand shapes that they do not support to
F.group_norm, which would be measured under their name.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timing
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Peer:
    """Where a package has its function, and how that is called.

    modules   the function's module; the first that can be imported
    adapt     from the function to timing.Norm
    """

    modules: tuple[str, ...]
    function: str
    adapt: Callable[[Any], timing.Norm]


def _input_groups(function: Any) -> timing.Norm:
    """(X, G, gamma, beta, eps): apex, stable-fast."""

    def norm(X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
        return function(X, G, gamma, beta, EPS)

    return norm


def _gnnhwc(function: Any) -> timing.Norm:
    """An autograd.Function of (X, gamma, beta, G, eps, activation), which is 0 for none."""

    def norm(X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
        return function.apply(X, gamma, beta, G, EPS, 0)

    return norm


_APEX = ("apex.contrib.group_norm.group_norm",)
PEERS = {
    "apex_one_pass": Peer(_APEX, "cuda_group_norm_nhwc_one_pass", _input_groups),
    "apex_two_pass": Peer(_APEX, "cuda_group_norm_nhwc_two_pass", _input_groups),
    "apex_v2": Peer(_APEX, "cuda_group_norm_v2_nhwc", _input_groups),
    "gnnhwc": Peer(("gnnhwc.custom_gn", "gnNHWC.custom_gn"), "GN_NHWC_Func", _gnnhwc),
    "stable_fast": Peer(("sfast.triton.torch_ops",), "group_norm", _input_groups),
}

_PATH = re.compile(r"(?:/[\w.+-]+){2,}")


def reason(error: BaseException) -> str:
    """An error in one short line, without the paths of the machine."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {_PATH.sub('...', lines[0])}"[:200]


def find() -> tuple[dict[str, timing.Norm], dict[str, str]]:
    """The peers that can be used, and why one that is installed cannot."""
    found: dict[str, timing.Norm] = {}
    unusable: dict[str, str] = {}
    for name, peer in PEERS.items():
        for module in peer.modules:
            try:
                found[name] = peer.adapt(getattr(importlib.import_module(module), peer.function))
                unusable.pop(name, None)
                break
            except ModuleNotFoundError as error:
                if error.name != module.partition(".")[0]:  # there, but not whole
                    unusable[name] = reason(error)
            except Exception as error:  # whatever a package raises at its import
                unusable[name] = reason(error)
    return found, unusable
