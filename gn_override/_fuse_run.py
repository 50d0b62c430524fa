"""What runs where fuse() fused: steps one after another, norms with the activations after them.

What may be fused is looked at in each call, as modules, hooks and functions may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import normalization
from torch.nn.modules.module import _has_any_global_hook

from gn_override import _activations, _calls, _forward
from gn_override.nn import GroupNorm

_OUR_FORWARD = GroupNorm.forward


def run(x: Tensor, *steps: Callable[[Tensor], Tensor]) -> Tensor:
    """What the steps return one after another, norms fused with the activations that follow them.

    Args:
        x: what the first step takes: [N, C, *spatial] where that is a norm.
        steps: modules and other callables. Those that are not fused are called.
    """
    if torch.compiler.is_compiling():  # which fuses what it records
        for step in steps:
            x = step(x)
        return x
    position = 0
    while position < len(steps):
        step = steps[position]
        first, addend = position, None
        if isinstance(step, _forward.Addition) and step.addend is not None:
            first, addend = position + 1, step.addend
        last, activation = after(steps, first)
        y = None
        if activation is not None and obstacle(steps[first : last + 1]) is None:
            norm: Any = steps[first]
            weights = norm.weight, norm.bias
            y = _calls.group_norm_act(x, addend, norm.num_groups, *weights, norm.eps, activation)
        if y is None:
            x = step(x)
            position += 1
        else:
            x = y
            position = last + 1
    return x


def after(steps: Sequence[object], first: int) -> tuple[int, str | None]:
    """Where the step is that follows the norm `first`, and the activation that it computes, if any.

    Where no norm is there, or nothing follows it, that is `first` itself.
    """
    norms = normalization.GroupNorm, _forward.GroupNormCall
    if first < len(steps) and isinstance(steps[first], norms):
        for last in range(first + 1, len(steps)):
            step = steps[last]
            if not _activations.is_identity(step):
                return last, _activation(step)
    return first, None


def _activation(step: object) -> str | None:
    """The name of what a step computes, if that is an activation."""
    if isinstance(step, _forward.ActivationCall):
        return step.activation()
    if isinstance(step, nn.Module):
        return _activations.of_module(step)
    return _activations.of_call(step) if callable(step) else None


def obstacle(steps: Sequence[object]) -> str | None:
    """Why a norm, the activation after it, and what is between them must be called one by one."""
    norm = steps[0]
    if isinstance(norm, nn.Module):
        if not _computes_group_norm(norm):
            return f"{type(norm).__name__} is a GroupNorm with a forward of its own"
        if hasattr(type(norm), "weight") or hasattr(type(norm), "bias"):
            return "parametrizations compute its weight or bias, each time that one looks"
    elif isinstance(norm, _forward.GroupNormCall) and norm.function is not F.group_norm:
        return "what the source calls is not F.group_norm any more"
    if not _activations.are_functions_unpatched():
        return "functions of PyTorch are replaced"
    if _has_any_global_hook():
        return "there are global hooks of modules"
    for module in steps:
        if isinstance(module, nn.Module):
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                return f"hooks on {type(module).__name__}"
            if is_replaced(module):
                return f"forward of {type(module).__name__} is replaced on the instance"
    return None


def is_replaced(module: nn.Module) -> bool:
    """Whether a module has a forward of its own: not that of its class, which some hooks leave."""
    if "forward" not in vars(module):
        return False
    forward = vars(module)["forward"]
    own = getattr(forward, "__self__", None) is module
    return not own or getattr(forward, "__func__", None) is not type(module).forward


def _computes_group_norm(norm: nn.Module) -> bool:
    """Whether a module is nn.GroupNorm, or computes the same."""
    kind = type(norm)
    if _activations.is_pytorchs(kind, normalization.GroupNorm):
        return True
    if isinstance(norm, GroupNorm) and norm.activation == "identity":
        return kind.forward is _OUR_FORWARD and _activations.is_call_unpatched(kind)
    if kind.__module__ == "timm.layers.norm" and kind.__name__ in ("GroupNorm", "GroupNorm1"):
        written_in = getattr(kind.forward, "__globals__", {}).get("__name__")
        return (
            written_in == kind.__module__
            and _activations.is_call_unpatched(kind)
            and not getattr(norm, "_fast_norm", True)  # the other kind has rules of its own
        )
    return False
