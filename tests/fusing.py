"""What the tests of fuse() share: models, and the checks that a model is fused or left."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from reference import FUSED, calls, lay_out
from torch import Tensor, nn

import gn_override
from gn_override import SkippedNorm

FORWARD, BACKWARD = FUSED
NO_ACTIVATION = "no activation that can be fused is seen to follow it"


def image(device: str = "cpu", layout: str = "channels_last", C: int = 8) -> Tensor:
    return lay_out(torch.randn(2, C, 6, 5, device=device), layout)


def gradients(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of all tensors and of a module's parameters."""
    tensors = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    Y = function(*tensors)
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    return Y.detach(), *torch.autograd.grad(Y.cos().sum(), [*tensors, *weights])


def check_fused(
    model: nn.Module, *inputs: Tensor, pairs: int, calls_made: int
) -> gn_override.Fusion:
    """fuse() finds so many pairs, and results and gradients stay what they were."""
    device = inputs[0].device.type
    expected = gradients(model, *inputs)
    keys = list(model.state_dict())
    fusion = gn_override.fuse(model)
    assert len(fusion.fused) == pairs, str(fusion)
    assert list(model.state_dict()) == keys
    torch.ops.gn_override.reset_counters()
    actual = gradients(model, *inputs)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (calls_made, 0)
    for mine, theirs in zip(actual, expected, strict=True):
        # Norms of norms: an error is one of the largest value.
        atol = 1e-4 * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
    return fusion


def check_left(model: nn.Module, *inputs: Tensor) -> tuple[SkippedNorm, ...]:
    """fuse() changes nothing; why."""
    kinds = {name: type(module) for name, module in model.named_modules()}
    expected = gradients(model, *inputs)
    fusion = gn_override.fuse(model)
    assert fusion.fused == (), str(fusion)
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    torch.ops.gn_override.reset_counters()
    assert all(map(torch.equal, gradients(model, *inputs), expected))
    assert calls(FORWARD, "cpu") == (0, 0)
    return fusion.skipped


class NormAct(nn.GroupNorm):
    """A norm with its activation, as timm has it."""

    def __init__(self, fast: bool = False) -> None:
        super().__init__(4, 8)
        self.drop, self.act, self.fast = nn.Identity(), nn.ReLU(inplace=True), fast

    def forward(self, x: Tensor) -> Tensor:
        if self.fast:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps) * 1.0
        else:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        x = self.act(x)
        return x


class Calls(nn.Module):
    """A module that calls its norm and its activation in the way that a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout(0.0)


class ActivatedNorm(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.act(self.norm(x))
        return h


class TwoPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.act(h)
        h = self.second(h)
        h = self.act(h)
        return h


def takes(model: nn.Module) -> int:
    """How many calls of fused kernels a forward makes."""
    torch.ops.gn_override.reset_counters()
    model(image())
    return calls(FORWARD, "cpu")[0]
