"""Which calls of a norm with an activation are for this package's operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Other classes, and what stands for a tensor in a trace, know PyTorch's operators alone.
_KNOWN = {Tensor, torch.nn.Parameter, FakeTensor, type(None)}
# Of others F.group_norm knows whether it takes them.
_INTEGERS = {int, torch.SymInt}
_NUMBERS = {float, int}

# Looked up once: a call is a few microseconds.
_is_enabled = torch.ops.gn_override.is_enabled.default
_add_group_norm_act = torch.ops.gn_override.add_group_norm_act.default
_transform = torch._C._functorch.maybe_current_level  # of torch.func


def takes(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> bool:
    """Whether group_norm_act runs functional.group_norm() with these and an activation."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or _transform() is not None
        or not {type(input), type(weight), type(bias)} <= _KNOWN
        or input.is_contiguous()
        or not _is_enabled()
        # What F.group_norm refuses before it calls an operator is among these.
        or type(num_groups) not in _INTEGERS
        or type(eps) not in _NUMBERS
        or input.dim() < 2
        or num_groups <= 0
        or input.numel() < 2 * num_groups
    )


def group_norm_of_sum(
    input: Tensor,
    addend: object,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor | None:
    """``functional.group_norm(input + addend, ...)`` as one kernel; None where none does that.

    The kernel rounds no sum, and has no backward.

    Args:
        input: [N, C, *spatial].
        addend: [N, C, 1, ...], in input's dtype.
        num_groups, weight, bias, eps, activation: as in functional.group_norm().
    """
    if (
        type(addend) not in _KNOWN
        or not isinstance(addend, Tensor)
        or not takes(input, num_groups, weight, bias, eps)
        or not input.is_cuda
        or addend.device != input.device
        or addend.dtype != input.dtype
        or addend.dim() != input.dim()
        or addend.shape[:2] != input.shape[:2]
        or addend.numel() != addend.shape[0] * addend.shape[1]
        or torch.is_autocast_enabled("cuda")
        or (
            torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (input, addend, weight, bias))
        )
    ):
        return None
    added = addend.reshape(addend.shape[:2])
    output: Tensor = _add_group_norm_act(input, added, num_groups, weight, bias, eps, activation)
    return output
