"""The activations that can follow a norm inside one kernel, by the names of the field.

identity, relu (max(z, 0)), silu (z sigmoid(z)), gelu (z Phi(z), with erf), gelu_tanh (gelu with
the tanh approximation of Hendrycks and Gimpel, "Gaussian Error Linear Units").
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import modules

VALID = ("identity", "relu", "silu", "gelu", "gelu_tanh")

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _unpatched(function: Any, file: ModuleType, name: str) -> Any:
    """A Python function, if it is what this file of PyTorch's calls so; else what nothing is.

    Patches often have the name and the documentation of what they replace, but other globals.
    """
    globals_, own_name = (getattr(function, key, None) for key in ("__globals__", "__qualname__"))
    return function if globals_ is vars(file) and own_name == name else object()


# The functions of PyTorch that a call may need. What patches them is called instead.
_GROUP_NORM = _unpatched(F.group_norm, F, "group_norm")
_RELU = _unpatched(F.relu, F, "relu")
_SILU = _unpatched(F.silu, F, "silu")
_GELU_FUNCTION = torch._C._nn.gelu
_BUILT_IN = torch._C._VariableFunctions  # as are those of torch

# The methods behind a call of a module, and its forward.
_CALL = _unpatched(nn.Module.__call__, modules.module, "Module._wrapped_call_impl")
_CALL_IMPL = _unpatched(nn.Module._call_impl, modules.module, "Module._call_impl")
_FORWARDS: dict[Any, Any] = {
    getattr(file, name): _unpatched(getattr(file, name).forward, file, f"{name}.forward")
    for file, name in (
        (modules.normalization, "GroupNorm"),
        (modules.activation, "ReLU"),
        (modules.activation, "SiLU"),
        (modules.activation, "GELU"),
        (modules.linear, "Identity"),
    )
}
_MODULES = {
    modules.activation.ReLU: "relu",
    modules.activation.SiLU: "silu",
    modules.activation.GELU: "gelu",
}
_IDENTITY = modules.linear.Identity

# The functions and methods of PyTorch that compute an activation, in place or not.
_NAMES: dict[Any, str] = {
    _RELU: "relu",
    _BUILT_IN.relu: "relu",
    _BUILT_IN.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    _SILU: "silu",
    _GELU_FUNCTION: "gelu",
    torch.ops.aten.relu.default: "relu",
    torch.ops.aten.silu.default: "silu",
    torch.ops.aten.gelu.default: "gelu",
}


def check(activation: str) -> None:
    """Raises what the operators raise for an unknown activation: ValueError that lists them."""
    if activation not in VALID:
        valid = ", ".join(VALID)
        raise ValueError(f'gn_override: activation must be one of {valid}, got "{activation}"')


def stock(z: Tensor, activation: str) -> Tensor:
    """An activation by PyTorch's own functions. torch.jit.script reads this."""
    if activation == "relu":
        return F.relu(z)
    if activation == "silu":
        return F.silu(z)
    if activation == "gelu":
        return F.gelu(z)
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    return z


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


def are_functions_unpatched() -> bool:
    """Whether the functions of a norm and of its activation are those that PyTorch wrote."""
    return (
        F.group_norm is _GROUP_NORM
        and torch.group_norm is _BUILT_IN.group_norm
        and F.relu is _RELU
        and F.silu is _SILU
        and F.gelu is _GELU_FUNCTION
    )


def is_call_unpatched(kind: type[nn.Module]) -> bool:
    """Whether a call of a module of this class runs its forward as PyTorch does."""
    return kind.__call__ is _CALL and kind._call_impl is _CALL_IMPL


def is_pytorchs(kind: type[nn.Module], of: type[nn.Module]) -> bool:
    """Whether a call of a module of class `kind` runs what PyTorch wrote for class `of`."""
    return kind.forward is _FORWARDS[of] and is_call_unpatched(kind)


def is_identity(module: object) -> bool:
    """Whether a module returns what it is given, by PyTorch's own code."""
    return type(module) is _IDENTITY and is_pytorchs(_IDENTITY, _IDENTITY)


def of_module(module: object) -> str | None:
    """The name of what a module computes; None for classes other than PyTorch's own."""
    kind: Any = type(module)
    name = _MODULES.get(kind)
    if name is None or not is_pytorchs(kind, kind):
        return None
    return _GELU.get(module.approximate) if name == "gelu" else name  # type: ignore[attr-defined]
