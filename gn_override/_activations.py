"""The activations that can follow a norm inside one kernel, by the names of the field.

identity, relu (max(z, 0)), silu (z sigmoid(z)), gelu (z Phi(z), with erf), gelu_tanh (gelu with
the tanh approximation of Hendrycks and Gimpel, "Gaussian Error Linear Units").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# PyTorch's own functions.
STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}

# The functions and methods of PyTorch that compute them, in place or not.
_NAMES: dict[Any, str] = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    F.silu: "silu",
    F.gelu: "gelu",
    torch.ops.aten.relu.default: "relu",
    torch.ops.aten.silu.default: "silu",
    torch.ops.aten.gelu.default: "gelu",
}


def check(activation: str) -> None:
    """Raises what the operators raise for an unknown activation: ValueError that lists them."""
    if not isinstance(activation, str) or activation not in STOCK:
        valid = ", ".join(STOCK)
        raise ValueError(f'gn_override: activation must be one of {valid}, got "{activation}"')


def of_call(function: Any, /, *args: Any, **kwargs: Any) -> str | None:
    """The name of what a call computes from its first argument, or None.

    Args:
        function: a function, or the name of a method of Tensor.
        args, kwargs: what the call passes besides the first argument.
    """
    try:
        name = _NAMES.get(function)
    except TypeError:  # cannot be hashed
        return None
    if name == "gelu":
        approximate = kwargs.pop("approximate", "none")
        return None if args or kwargs else _GELU.get(approximate)
    # What remains to be said is whether it happens in place.
    flags = [*args, *kwargs.values()]
    known = len(flags) <= 1 and all(isinstance(flag, bool) for flag in flags)
    return name if known and kwargs.keys() <= {"inplace"} else None


def is_pytorchs(kind: type[nn.Module]) -> bool:
    """Whether a call of such a module runs what PyTorch wrote, and no patch of it."""
    written_in = str(getattr(kind.forward, "__module__", ""))
    return written_in.startswith("torch.nn.modules.") and kind.__call__ is nn.Module.__call__


def of_module(module: object) -> str | None:
    """The name of what a module computes; None for classes other than PyTorch's own."""
    kind = type(module)
    if kind not in (nn.ReLU, nn.SiLU, nn.GELU) or not is_pytorchs(kind):
        return None
    if kind is nn.GELU:
        return _GELU.get(module.approximate)  # type: ignore[attr-defined]
    return "relu" if kind is nn.ReLU else "silu"
