"""Group normalisation with an activation, as functions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gn_override import _activations, _calls


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
    norm and activation, and so does every input while the override is off, inside a transform of
    ``torch.func`` or under a TorchFunctionMode or TorchDispatchMode, and every subclass of Tensor.
    ``torch.compile`` sees these two as well, and Inductor fuses them as it does in other programs;
    what ``torch.export``, ``torch.jit.trace`` and ``torch.fx`` make of them holds no operator of
    this package.

    Args:
        input: [N, C, *spatial], any dtype that F.group_norm takes.
        num_groups: divides C.
        weight, bias: [C], in input's dtype; float32 too with a half-precision input.
        eps: added to the variance.
        activation: "identity", "relu", "silu", "gelu" (with erf) or "gelu_tanh".

    Returns:
        [N, C, *spatial] in F.group_norm's dtype: dense channels-last where a kernel of this package
        runs, else in the layout that PyTorch gives.

    Raises:
        ValueError: unknown activation; the message lists the valid ones.
        What F.group_norm raises for the other arguments.
    """
    _activations.check(activation)
    output = None
    if activation != "identity":
        output = _calls.group_norm_act(input, None, num_groups, weight, bias, eps, activation)
    if output is None:
        output = _activations.stock(F.group_norm(input, num_groups, weight, bias, eps), activation)
    return output
