"""python -m gn_override demo: real networks in channels_last, with the override off and on."""

from __future__ import annotations

import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gn_override
from gn_override import _bench
from gn_override.__main__ import to_json
from gn_override._clock import seconds_of

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class _ResnetBlock(nn.Module):
    """The residual block of diffusion UNets: twice GroupNorm, SiLU, 3x3 convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(32, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.skip = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class _Attention(nn.Module):
    """Self-attention over pixels; its GroupNorm sees [N, C, L] with strides (C * L, 1, C)."""

    def __init__(self, channels: int, head_channels: int = 64) -> None:
        super().__init__()
        self.heads = channels // head_channels
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.norm(x.flatten(2)).transpose(1, 2)
        q, k, v = self.qkv(tokens).view(n, h * w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        return x + self.out(y).transpose(1, 2).unflatten(2, (h, w))


class _UNet(nn.Module):
    """Two resolutions of a diffusion UNet: blocks down, attention, blocks up with skips."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.down1 = _ResnetBlock(channels, channels)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.down2 = _ResnetBlock(channels, wide)
        self.attention = _Attention(wide)
        self.middle = _ResnetBlock(wide, wide)
        self.up2 = _ResnetBlock(2 * wide, wide)
        self.up1 = _ResnetBlock(wide + channels, channels)
        self.norm_out = nn.GroupNorm(32, channels)
        self.conv_out = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(self.conv_in(x))
        low = self.down2(self.shrink(high))
        h = self.middle(self.attention(low))
        h = self.up2(torch.cat([h, low], 1))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up1(torch.cat([h, high], 1))
        return self.conv_out(F.silu(self.norm_out(h)))


class _Bottleneck(nn.Module):
    """ResNet's bottleneck with GroupNorm in place of BatchNorm."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.GroupNorm(32, out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(in_channels, out, 1, stride=stride, bias=False), nn.GroupNorm(32, out)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.norm1(self.conv1(x)))
        h = F.relu_(self.norm2(self.conv2(h)))
        return F.relu_(self.norm3(self.conv3(h)) + self.skip(x))


class _ResNet(nn.Module):
    """ResNet of `depths` bottlenecks a stage (3, 4, 6, 3 is ResNet-50) with GroupNorm."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.norm1 = nn.GroupNorm(32, 64)
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(_Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 100)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu_(self.norm1(self.conv1(x))), 3, stride=2, padding=1)
        return self.head(self.blocks(h).mean((2, 3)))


@dataclass(frozen=True)
class _Case:
    """One row of the table: a network, its input, and whether a step trains it."""

    model: str
    network: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    training: bool

    @property
    def name(self) -> str:
        task = "training step" if self.training else "inference"
        return f"{self.model}, {task}, {_SHORT[self.dtype]}"


def _cases(device: str, quick: bool) -> list[_Case]:
    """The same networks everywhere; how large depends on the machine."""
    if device == "cuda":
        inference, training = [torch.float16], [torch.bfloat16]
        unet, latents = 320, (2, 4, 64, 64) if quick else (2, 4, 128, 128)
        depths, images = (3, 4, 6, 3), (8, 3, 224, 224) if quick else (32, 3, 224, 224)
    else:
        inference, training = [torch.float32], [torch.float32, torch.bfloat16]
        unet, latents = (64, (1, 4, 32, 32)) if quick else (128, (1, 4, 64, 64))
        depths, images = (1, 1, 1, 1), (2, 3, 64, 64) if quick else (8, 3, 128, 128)
    return [
        *(_Case("UNet blocks", lambda: _UNet(unet), latents, d, False) for d in inference),
        *(_Case("ResNet-GN", lambda: _ResNet(depths), images, d, True) for d in training),
    ]


@dataclass(frozen=True)
class Row:
    """What one network did. Errors are relative l2 distances to a more exact computation.

    Layer errors are those of each GroupNorm of the network on the input that it gets there, to
    float64: of the output, and in training of the gradients of input, weight and bias for a random
    incoming one. Network errors are to float64 too, in half precision to float32.
    """

    name: str
    time_off: float  # median, in seconds
    time_on: float
    layers: int
    layer_error_off: float  # of the layer and tensor with the worst error_on / bound
    layer_error_on: float
    layer_bound: float
    error_off: float  # of the whole network: its output, or its loss and all gradients
    error_on: float
    calls: int  # calls that the override's kernels took in one run

    @property
    def bound(self) -> float:
        """What error_on may be: rounding in another order makes a ReLU flip here and there."""
        return 4 * self.error_off + 2e-3

    @property
    def parity(self) -> bool:
        """Whether both errors are within their bounds (a NaN is not)."""
        return self.layer_error_on <= self.layer_bound and self.error_on <= self.bound


def randomise_affine(model: nn.Module) -> None:
    """Fresh weights of norms are ones and zeros, which would hide a wrong affine part."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)


def _build(case: _Case, device: str) -> tuple[nn.Module, Tensor]:
    """The network and its input, the same on every call, in channels_last."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = case.network()
        randomise_affine(network)
    network = network.to(device=device, dtype=case.dtype)
    to: Any = network.to  # before torch 2.14 its types know no memory format
    network = to(memory_format=torch.channels_last)
    x = torch.randn(case.input_shape, generator=generator)
    x = x.to(device=device, dtype=case.dtype, memory_format=torch.channels_last)
    return network, x


def _stepper(case: _Case, network: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """One inference or one forward and backward, as a function that returns its results flat.

    Training returns the loss and all gradients, inference the output.
    """
    labels = torch.arange(x.shape[0], device=x.device) % 100

    def train() -> Tensor:
        network.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(x), labels)
        loss.backward()
        gradients = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
        return torch.cat([loss.detach().view(1), *gradients])

    def infer() -> Tensor:
        with torch.inference_mode():
            return network(x).flatten()

    return train if case.training else infer


@contextlib.contextmanager
def no_tf32() -> Iterator[None]:
    """No TF32 inside."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = matmul.allow_tf32
    # flags() and no assignment: torch.testing forbids the latter to who imports it.
    with cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=False,
    ):
        matmul.allow_tf32 = False
        try:
            yield
        finally:
            matmul.allow_tf32 = before


def calls_taken() -> int:
    """By the override's kernels, so far."""
    return sum(gn_override.report().calls.values())


def _layer_results(norm: nn.GroupNorm, x: Tensor, dy: Tensor, training: bool) -> list[Tensor]:
    """Output, and in training the gradients of input, weight and bias."""
    weight, bias = norm.weight.detach().to(x.dtype), norm.bias.detach().to(x.dtype)
    if not training:
        return [F.group_norm(x, norm.num_groups, weight, bias, norm.eps)]
    inputs = [tensor.requires_grad_() for tensor in (x.detach(), weight, bias)]
    with torch.enable_grad():
        y = F.group_norm(inputs[0], norm.num_groups, inputs[1], inputs[2], norm.eps)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(x.dtype))]


@dataclass
class _LayerCheck:
    """A forward hook for every GroupNorm that compares off and on with float64."""

    training: bool
    layers: int = 0
    worst: tuple[float, float, float] = (0.0, 0.0, 1.0)  # error off, error on, bound

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        assert isinstance(norm, nn.GroupNorm)
        x = inputs[0].detach()
        dy = torch.randn_like(x)  # in x's layout
        with gn_override.disabled():
            exact = _layer_results(norm, x.double(), dy, self.training)
            off = _layer_results(norm, x, dy, self.training)
        with gn_override.enabled():
            on = _layer_results(norm, x, dy, self.training)
        self.layers += 1
        for a, b, reference in zip(off, on, exact, strict=True):
            error_off = _bench.relative_error(a, reference)
            error_on = _bench.relative_error(b, reference)
            bound = 2 * error_off + torch.finfo(x.dtype).eps
            # "not <" so that a NaN counts as worst.
            if not error_on / bound < self.worst[1] / self.worst[2]:
                self.worst = (error_off, error_on, bound)


def _run(case: _Case, device: str, rounds: int, seconds: float, say: Callable[[str], None]) -> Row:
    """Check one network, layer by layer and as a whole, then time it off and on in turns."""

    def progress(text: str) -> None:
        say(f"{case.name}: {text}")

    network, x = _build(case, device)
    step = _stepper(case, network, x)

    progress("checking every layer")
    check = _LayerCheck(case.training)
    norms = [module for module in network.modules() if isinstance(module, nn.GroupNorm)]
    hooks = [norm.register_forward_hook(check) for norm in norms]
    with gn_override.disabled():
        step()
    for hook in hooks:
        hook.remove()

    progress("checking the network")
    # Half precision: float32 is exact enough, and float64 is slow on most GPUs.
    exact = torch.float64 if case.dtype == torch.float32 else torch.float32
    with gn_override.disabled():
        with no_tf32():
            reference = _stepper(case, copy.deepcopy(network).to(exact), x.to(exact))()
        error_off = _bench.relative_error(step(), reference)
    calls = calls_taken()
    with gn_override.enabled():
        error_on = _bench.relative_error(step(), reference)
    calls = calls_taken() - calls
    del reference

    # In turns, so that a machine that slows down or speeds up does so for both.
    times: dict[bool, list[float]] = {False: [], True: []}
    deadline = time.perf_counter() + seconds
    for index in range(rounds + 1):
        progress(f"timing {index}/{rounds}")
        for enabled in (False, True):
            with gn_override._switched(enabled):
                elapsed = seconds_of(step, device)
            if index:  # the first round warms up
                times[enabled].append(elapsed)
        if index and time.perf_counter() > deadline:
            break

    return Row(
        name=case.name,
        time_off=statistics.median(times[False]),
        time_on=statistics.median(times[True]),
        layers=check.layers,
        layer_error_off=check.worst[0],
        layer_error_on=check.worst[1],
        layer_bound=check.worst[2],
        error_off=error_off,
        error_on=error_on,
        calls=calls,
    )


def _table(rows: list[Row]) -> str:
    lines = [
        f"{'':<32}{'time':^29}{'worst layer error':>20}{'network error':>20}",
        f"{'network (channels_last)':<32}{'off':>10}{'on':>10}{'speed-up':>9}"
        f"{'off':>10}{'on':>10}{'off':>10}{'on':>10}  parity",
    ]
    for row in rows:
        lines.append(
            f"{row.name:<32}{1e3 * row.time_off:>7.1f} ms{1e3 * row.time_on:>7.1f} ms"
            f"{row.time_off / row.time_on:>8.2f}x{row.layer_error_off:>10.1e}"
            f"{row.layer_error_on:>10.1e}{row.error_off:>10.1e}{row.error_on:>10.1e}"
            f"  {'ok' if row.parity else 'FAILED'}"
        )
    return "\n".join(lines)


_LEGEND = """\
off: PyTorch's own kernels, on: gn_override. Times are medians, taken in turns. Errors are relative
distances (l2) to a more exact computation. Parity: every GroupNorm, on the input it gets in the
network (training: gradients too), errs at most 2x stock + one unit in the last place; the network
as a whole (training: loss and all gradients) at most 4x stock + 0.002, since rounding decides which
way a ReLU near zero falls."""


def main(*, device: str | None = None, quick: bool = False, as_json: bool = False) -> int:
    """Run the demo, print its table, and return 0 if parity holds in every row, 1 otherwise.

    Args:
        device: "cpu" or "cuda"; the GPU if there is one by default.
        quick: smaller networks and fewer rounds.
        as_json: print the rows as JSON instead of the table.
    """
    device = _bench.choose_device("demo", device)
    if device is None:
        return 1

    terminal = sys.stderr.isatty()
    shown = ""

    def progress(text: str) -> None:
        nonlocal shown
        if terminal:
            print(f"\r{text:<{len(shown)}}", end="", file=sys.stderr, flush=True)
            shown = text
        elif "timing" not in text:
            print(text, file=sys.stderr, flush=True)

    name = _bench.device_name(device)
    if not as_json:
        print(f"{name}, torch {torch.__version__}, gn_override {gn_override.__version__}")

    _bench.say_if_busy()
    rounds, seconds = (3, 2.0) if quick else (15, 10.0)
    rows = [_run(case, device, rounds, seconds, progress) for case in _cases(device, quick)]
    if terminal:
        print(f"\r{'':<{len(shown)}}\r", end="", file=sys.stderr, flush=True)

    if as_json:
        print(to_json(rows))
    else:
        print(_table(rows))
        print(_LEGEND)
    failed = False
    for row in rows:
        if not row.parity:
            failed = True
            print(f"PARITY FAILED: {row.name}", file=sys.stderr)
        if not row.calls:
            failed = True
            print(f"NOT TAKEN: no call of {row.name} ran on the override", file=sys.stderr)
    return 1 if failed else 0
