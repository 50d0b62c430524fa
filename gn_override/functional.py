"""Group normalisation with an activation, as functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gn_override import _activations

# Other classes, and what stands for a tensor in a trace, know PyTorch's operators alone.
_KNOWN = {Tensor, torch.nn.Parameter, FakeTensor, type(None)}
# Of others F.group_norm knows whether it takes them.
_INTEGERS = {int, torch.SymInt}
_NUMBERS = {float, int}

# Looked up once: a call is a few microseconds.
_is_enabled = torch.ops.gn_override.is_enabled.default
_group_norm_act = torch.ops.gn_override.group_norm_act.default
_add_group_norm_act = torch.ops.gn_override.add_group_norm_act.default
_transform = torch._C._functorch.maybe_current_level  # of torch.func


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
) -> Tensor:
    """``activation(F.group_norm(input, num_groups, weight, bias, eps))``, as one kernel.

    The norm is not rounded before the activation, and backward computes it again from the input:
    nothing is saved but the input, mean, rstd, weight and bias. An NCHW input goes to PyTorch's own
    norm and activation, and so does every input while the override is off or inside a transform of
    ``torch.func``, and every subclass of Tensor. ``torch.compile`` sees these two as well, and
    Inductor fuses them as it does in other programs; what ``torch.export``, ``torch.jit.trace`` and
    ``torch.fx`` make of them runs without this package.

    Args:
        input: [N, C, *spatial], any dtype that F.group_norm takes.
        num_groups: divides C.
        weight, bias: [C], in input's dtype; float32 too with a half-precision input.
        eps: added to the variance.
        activation: "identity", "relu", "silu", "gelu" (with erf) or "gelu_tanh".

    Returns:
        [N, C, *spatial], with F.group_norm's dtype and input's layout.

    Raises:
        ValueError: unknown activation; the message lists the valid ones.
        What F.group_norm raises for the other arguments.
    """
    _activations.check(activation)
    if activation == "identity" or not _takes(input, num_groups, weight, bias, eps):
        return _activations.STOCK[activation](F.group_norm(input, num_groups, weight, bias, eps))
    output: Tensor = _group_norm_act(input, num_groups, weight, bias, eps, activation)[0]
    return output


def group_norm_of_sum(
    input: Tensor,
    addend: object,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor | None:
    """``group_norm(input + addend, ...)`` as one kernel, where one does that; None elsewhere.

    The kernel rounds no sum, and has no backward.

    Args:
        input: [N, C, *spatial].
        addend: [N, C, 1, ...], in input's dtype.
        num_groups, weight, bias, eps, activation: as in group_norm().
    """
    if (
        type(addend) not in _KNOWN
        or not isinstance(addend, Tensor)
        or not _takes(input, num_groups, weight, bias, eps)
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


def _takes(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> bool:
    """Whether a call with an activation is for our operators."""
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
