"""Group normalisation with an activation, as a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import normalization

from gn_override import _activations, functional


class GroupNorm(normalization.GroupNorm):
    """``torch.nn.GroupNorm`` followed by an activation, as one kernel.

    Parameters, buffers and ``state_dict`` are those of ``torch.nn.GroupNorm``.

    Args:
        num_groups: divides num_channels.
        num_channels: C of the input [N, C, *spatial].
        eps: added to the variance.
        affine: whether there are a weight and a bias [C].
        device, dtype: of the parameters.
        activation: "identity", "relu", "silu", "gelu" (with erf) or "gelu_tanh".
        options: what else the installed torch.nn.GroupNorm takes (``bias``, say).

    Raises:
        ValueError: unknown activation (the message lists the valid ones), or num_channels is not
            a multiple of num_groups.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "identity",
        **options: Any,
    ) -> None:
        _activations.check(activation)
        super().__init__(
            num_groups, num_channels, eps, affine, device=device, dtype=dtype, **options
        )
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, *spatial] to the same shape; see functional.group_norm for layout and dtype."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            Y = F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
            return _activations.stock(Y, self.activation)
        else:  # which torch.jit.script does not read
            return functional.group_norm(
                input, self.num_groups, self.weight, self.bias, self.eps, self.activation
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
