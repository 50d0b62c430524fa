"""Small real networks in channels-last.

A network is run in float64 by stock for the reference. Its bound is stock's own error plus the
floor of reference.py, once for each norm on the way and once for the result itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from reference import (
    BACKWARD,
    FORWARD,
    calls,
    floor,
    max_error,
    override_off,
    randomised,
)
from torch import Tensor, nn

import gn_override  # noqa: F401  (loads the extension and switches on)

pytestmark = pytest.mark.usefixtures("poison", "exact_convolutions")


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """Convolutions in full float32 and in one order: their errors must not drown the norms'."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


class ResBlock(nn.Module):
    """norm - SiLU - conv, twice, with a shortcut: the block of diffusion UNets."""

    def __init__(self, C: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, C), nn.Conv2d(C, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(C, out, 1) if C != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Attention over pixels: its norm sees [N, C, L] as a transposed view."""

    def __init__(self, C: int, groups: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(groups, C), nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        normed = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(normed).chunk(3, dim=-1)
        out = tokens + F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Down, middle with attention, up with a skip connection."""

    def __init__(self, C: int = 24, groups: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(4, C, 3, padding=1)
        self.down, self.shrink = (
            ResBlock(C, C, groups),
            nn.Conv2d(C, 2 * C, 3, stride=2, padding=1),
        )
        self.middle = nn.Sequential(
            ResBlock(2 * C, 2 * C, groups), Attention(2 * C, groups), ResBlock(2 * C, C, groups)
        )
        self.up = ResBlock(2 * C, C, groups)
        self.outlet = nn.Sequential(nn.GroupNorm(groups, C), nn.SiLU(), nn.Conv2d(C, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.inlet(x))
        h = self.middle(self.shrink(x))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return self.outlet(self.up(torch.cat([h, x], dim=1)))


class Bottleneck(nn.Module):
    """ResNet's block, with GroupNorm and in-place activations."""

    def __init__(self, C: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(C, width, 1, bias=False),
            nn.GroupNorm(16, width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.GroupNorm(16, width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.GroupNorm(16, out),
        )
        self.skip = nn.Sequential(nn.Conv2d(C, out, 1, stride, bias=False), nn.GroupNorm(16, out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.body(x) + self.skip(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, 2, 1, bias=False),
        nn.GroupNorm(16, 32),
        nn.ReLU(inplace=True),
        Bottleneck(32, 32, 64, 1),
        Bottleneck(64, 32, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Conv3d(nn.Conv3d):
    """Its output is NDHWC on every device: float convolutions of volumes on the CPU drop it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous(memory_format=torch.channels_last_3d)


def video_decoder() -> nn.Module:
    """A volume decoder: NDHWC. A norm takes out what a bias adds: no gradient to compare."""
    return nn.Sequential(
        Conv3d(4, 16, 3, padding=1, bias=False),
        nn.GroupNorm(8, 16),
        nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="nearest"),
        Conv3d(16, 16, 3, padding=1, bias=False),
        nn.GroupNorm(16, 16),
        nn.SiLU(),
        nn.Conv3d(16, 3, 1),
    )


NETWORKS = {
    "unet": (UNet, (2, 4, 16, 12)),
    "resnet": (resnet, (4, 4, 24, 20)),
    "video_decoder": (video_decoder, (1, 4, 3, 8, 6)),
}


def step(net: nn.Module, image: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Output, loss and every gradient of one training step."""
    net.zero_grad()
    x = image.detach().requires_grad_()
    out = net(x)
    (out * target).sum().backward()
    result = {"output": out.detach(), "input.grad": x.grad}
    return result | {f"{name}.grad": p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
def test_network(device, name, dtype):
    """Forward and one training step, on against off, both against float64."""
    build, shape = NETWORKS[name]
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    net = randomised(build().to(device, dtype, memory_format=last), weight=1, deviation=0.1)
    norms = sum(isinstance(module, nn.GroupNorm) for module in net.modules())
    image = torch.randn(shape).to(device, dtype).to(memory_format=last)
    with torch.no_grad():
        target = torch.randn_like(net(image))

    torch.ops.gn_override.reset_counters()
    ours = step(net, image, target)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (norms, 0)
    with override_off():
        theirs = step(net, image, target)
        exact = step(net.double(), image.double(), target.double())
    for key, value in ours.items():
        reference = exact[key]
        allowance = (norms + 1) * floor(float(reference.abs().max()), dtype)
        limit = max_error(theirs[key], reference) + allowance
        error = max_error(value, reference)
        assert error <= limit, f"{key}: {error:.3e} exceeds {limit:.3e}"


@pytest.mark.parametrize("name", NETWORKS)
def test_network_inference(device, name):
    """inference_mode and no_grad take the same kernels and give the same bits."""
    build, shape = NETWORKS[name]
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    net = build().to(device, memory_format=last)
    norms = sum(isinstance(module, nn.GroupNorm) for module in net.modules())
    image = torch.randn(shape).to(device).to(memory_format=last)
    want = net(image).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        torch.ops.gn_override.reset_counters()
        with mode():
            assert torch.equal(net(image), want)
        assert calls(FORWARD, device) == (norms, 0)


def test_training_goes_down(device):
    """A few steps of gradient descent: the loss falls as it does with the override off."""
    net = resnet().to(device, memory_format=torch.channels_last)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    image = torch.randn(8, 4, 16, 16).to(device).to(memory_format=torch.channels_last)
    label = torch.arange(8, device=device)

    def train() -> list[float]:
        net.load_state_dict(state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(image), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    ours = train()
    for op in (FORWARD, BACKWARD):
        taken, declined = calls(op, device)
        assert taken > 0 and declined == 0
    with override_off():
        theirs = train()
    assert ours[-1] < 0.8 * ours[0]
    # Rounding differences grow with the steps; they start at an ulp of float32.
    for step_number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(a - b) <= 1e-5 * 4**step_number * abs(b)
