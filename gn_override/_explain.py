"""explain(): which kernel runs one group normalisation call, in which geometry, and why."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import normalization

from gn_override import _activations, _autocast, _library
from gn_override._clock import seconds_of
from gn_override.nn import GroupNorm

# How often X, and backward dY, is read again after the first time, by rule of native/plan.
_READ_AGAIN = {
    "registers": 0,
    "resident": 0,
    "cooperative": 1,  # what it cannot keep on chip
    "two_pass": 1,  # after the statistics
    "channels_last": 1,  # likewise, but not what is still in cache
}
_AT_MOST = {"channels_last", "cooperative"}

# Copy speed in bytes a second of the GPU that the planner takes where there is none: an H200.
_MODEL_GPU_COPY = 4.2e12

# Of X. What the planner multiplies it by, as for traffic and workspace, leaves it within int64.
_MOST_BYTES = 2**58

_PREFIXES = {
    "P": 1e15,
    "T": 1e12,
    "G": 1e9,
    "M": 1e6,
    "k": 1e3,
    "": 1.0,
    "m": 1e-3,
    "u": 1e-6,
    "n": 1e-9,
}

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SHORT_NAMES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Declined:
    """A rule of the policy table that came before the one taken, and what it missed."""

    rule: str
    failed: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Where one group normalisation call goes. ``str()`` of it is meant for people."""

    problem: str  # device, direction, dtype, N, C, HxW, G and layout as the planner sees them
    device: str  # the device's name
    rule: str  # the row of the policy table that matched; "aten" is the last
    plan: str  # the scheme and its geometry
    reason: str  # why calls like this one go there
    declined: tuple[Declined, ...]  # rows tried before, with every condition that failed
    declined_by_binding: str | None  # why the call never reaches the table, if it does not
    enabled: bool  # the switch, now
    tensor_bytes: int  # size of X
    minimum_bytes: int  # least memory traffic of any kernel for this call
    copied: bool  # the input is not dense: a dense copy is made first
    moved_bytes: int | None  # traffic of the scheme and of that copy; None when aten runs the call
    moved_at_most: bool  # moved_bytes is a bound: caches can make it less
    workspace_bytes: int  # scratch memory of the call
    copy_speed: float | None  # bytes a second of a large copy on the device, if it is known

    @property
    def served(self) -> bool:
        """Whether one of this package's kernels runs the call when the switch is on."""
        return self.declined_by_binding is None and self.rule != "aten"

    def __str__(self) -> str:
        kernel = f"{self.rule} (gn_override)" if self.served else "PyTorch's own (aten)"
        if self.served and not self.enabled:
            kernel += "; the override is off now, so PyTorch's own runs it"
        lines = [
            f"call      {self.problem}",
            f"device    {self.device}",
            f"kernel    {kernel}",
        ]
        if self.served:
            copied = ", after a copy of the input, which is not dense" if self.copied else ""
            lines.append(f"plan      {self.plan}{copied}")
        lines.append(f"why       {self.reason}")
        lines.append(f"traffic   {self._traffic()}")
        for declined in self.declined:
            lines.append(f"not {declined.rule}: needs " + "; ".join(declined.failed))
        return "\n".join(lines)

    def _traffic(self) -> str:
        copy = 2 * self.tensor_bytes
        if not copy:
            return "none: the tensor is empty"
        least = self.minimum_bytes / copy
        text = f"at least {_quantity(self.minimum_bytes, 'B')}, {least:.3g}x the bytes of a copy"
        if self.copy_speed:
            copied_in = _quantity(self.minimum_bytes / self.copy_speed, "s")
            text += f" ({copied_in} at {_quantity(self.copy_speed, 'B/s', digits=2)})"
        if self.moved_bytes is not None:
            bound = "at most " if self.moved_at_most else ""
            text += f"; this kernel moves {bound}{self.moved_bytes / copy:.3g}x"
        return text


@_library.untraced()
def explain(
    input_or_module: Tensor | nn.GroupNorm,
    num_groups: int | None = None,
    *,
    input: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "identity",
    backward: bool = False,
    measure_copy: bool = False,
) -> Explanation:
    """Which kernel runs ``group_norm(input, num_groups, weight, bias)``, with which plan, and why.

    Nothing is computed; the answer is the same whether the override is switched on or off.
    Inside ``torch.autocast("cuda")`` it is the answer for what autocast asks of a CUDA input.

    Args:
        input_or_module: the input, [N, C, ...] on a CPU or CUDA device, or an ``nn.GroupNorm``.
        num_groups: G; required with a tensor, taken from the module otherwise.
        input: with a module, its input [N, C, ...].
        weight: with a tensor, gamma [C] or None.
        bias: with a tensor, beta [C] or None.
        activation: "relu", "silu", "gelu" or "gelu_tanh" explains the operator that is fused with
            it, group_norm_act; "identity" the plain norm, or the module with its own activation.
        backward: explain the backward of the call (to input, weight and bias; the incoming
            gradient is taken to have the input's layout) instead of the forward.
        measure_copy: time a copy of 64 MiB on the device (a few milliseconds, 128 MiB of memory,
            once a process) so that the answer can say how long the traffic takes at least.

    Raises:
        TypeError: arguments that fit neither form.
        ValueError: a device that is neither CPU nor CUDA; an input of fewer than two dimensions; an
            unknown activation, or another than the module's own.
    """
    _activations.check(activation)
    if isinstance(input_or_module, normalization.GroupNorm):
        others = (num_groups, weight, bias)
        if not isinstance(input, Tensor) or any(other is not None for other in others):
            raise TypeError("with a module, the call is explain(module, input=tensor)")
        x = input
        num_groups = input_or_module.num_groups
        weight, bias = input_or_module.weight, input_or_module.bias
        own = input_or_module.activation if isinstance(input_or_module, GroupNorm) else "identity"
        if own != "identity":
            if activation not in ("identity", own):
                raise ValueError(f"the module's own activation is {own}, not {activation}")
            activation = own
    elif isinstance(input_or_module, Tensor):
        if num_groups is None or input is not None:
            raise TypeError("with a tensor, the call is explain(tensor, num_groups, ...)")
        x = input_or_module
    else:
        raise TypeError(
            "explain() takes a tensor or an nn.GroupNorm, not " + type(input_or_module).__name__
        )
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"explain() knows CPU and CUDA tensors, not {x.device}")
    out_dtype = None
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        half = x.dtype.itemsize == 2
        if not half or _autocast.mode() == "float32":
            weight, bias = (
                t.float() if t is not None and t.dtype.itemsize == 2 else t for t in (weight, bias)
            )
            if half:
                out_dtype = torch.float32

    answer = json.loads(
        torch.ops.gn_override.explain(x, weight, bias, num_groups, backward, activation, out_dtype)
    )
    # A declined call has not become a Problem, so the binding has no text for it.
    answer.setdefault("problem", _call_text(x, num_groups, backward))
    return _explanation(
        answer,
        device=x.device,
        backward=backward,
        tensor_bytes=x.numel() * x.element_size(),
        copied=not _is_dense(x),
        measure_copy=measure_copy,
    )


def explain_shape(
    shape: Sequence[int],
    num_groups: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    channels_last: bool = True,
    activation: str = "identity",
    backward: bool = False,
    measure_copy: bool = False,
) -> Explanation:
    """explain() for a dense, 16-byte aligned input that need not exist.

    Args:
        shape: [N, C, ...].
        num_groups: G, a divisor of C.
        device: "cpu" or "cuda"; "cuda" on a machine without a GPU means an H200.
        dtype: of the input; float32, float64, float16 or bfloat16.
        param_dtype: of weight and bias; the input's (default), or float32 with half precision.
        channels_last: [N, ..., C] order in memory, or [N, C, ...].
        activation: as for explain().
        backward: explain the backward instead of the forward.
        measure_copy: as for explain().

    Raises:
        ValueError: a shape, number of groups, dtype, device or activation outside the above, or
            an input of more than 2**58 bytes.
    """
    param_dtype = param_dtype or dtype
    if device not in ("cpu", "cuda"):
        raise ValueError(f'the device is "cpu" or "cuda", not "{device}"')
    if len(shape) < 2 or any(size < 1 for size in shape):
        raise ValueError(f"the shape is [N, C, ...] of positive sizes, not {list(shape)}")
    N, C, HxW = shape[0], shape[1], math.prod(shape[2:])
    if num_groups < 1 or C % num_groups:
        raise ValueError(f"the number of groups must divide C = {C}: {num_groups} does not")
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"the dtype is one of {', '.join(_DTYPES)}, not {dtype}")
    mixed = dtype.itemsize == 2 and param_dtype == torch.float32
    if param_dtype != dtype and not mixed:
        raise ValueError(
            "weight and bias have the input's dtype, or float32 with a half-precision input"
        )
    tensor_bytes = N * C * HxW * dtype.itemsize
    if tensor_bytes > _MOST_BYTES:
        raise ValueError(f"the input is too large: {list(shape)} has more than 2**58 bytes")
    if HxW == 1 or C == 1:  # is in either layout, whatever was asked for
        channels_last = len(shape) <= 5

    answer = json.loads(
        torch.ops.gn_override.explain_shape(
            device,
            backward,
            N,
            C,
            HxW,
            num_groups,
            _DTYPE_NAMES[dtype],
            _DTYPE_NAMES[param_dtype],
            channels_last,
            16,
            activation,
        )
    )
    if channels_last and len(shape) > 5:  # which the planner does not see
        answer["declined_by_binding"] = "channels-last inputs have 3 to 5 dimensions"
    return _explanation(
        answer,
        device=torch.device(device),
        backward=backward,
        tensor_bytes=tensor_bytes,
        copied=False,
        measure_copy=measure_copy,
    )


def _explanation(
    answer: dict[str, Any],
    *,
    device: torch.device,
    backward: bool,
    tensor_bytes: int,
    copied: bool,
    measure_copy: bool,
) -> Explanation:
    """The planner's JSON as an Explanation."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if on_gpu and "cuda" not in _library.build_info()["backends"]:
        answer["declined_by_binding"] = "gn_override was built without its CUDA backend"
    declined_by_binding = answer.get("declined_by_binding")
    if declined_by_binding:  # whatever the planner would have done
        answer |= {"rule": "aten", "declined": (), "workspace_bytes": 0}
    copy_speed = None
    if device.type == "cpu":
        name = cpu_name()
    elif on_gpu:
        name = torch.cuda.get_device_name(device)
    else:
        name, copy_speed = answer["device"], _MODEL_GPU_COPY
    if measure_copy and copy_speed is None:
        copy_speed = _copy_speed(device)

    rule = answer["rule"]
    served = rule != "aten"
    # X, Y; or dY, X, dX. In backward what is written is of X's size.
    minimum = answer.get("minimum_bytes", (3 if backward else 2) * tensor_bytes)
    moved = None
    if rule in _READ_AGAIN:
        read = minimum - tensor_bytes if backward else tensor_bytes
        moved = minimum + _READ_AGAIN[rule] * read + 2 * copied * tensor_bytes
    return Explanation(
        problem=answer["problem"],
        device=name,
        rule=rule,
        plan=answer["plan"] if served else "",
        reason=declined_by_binding or answer["reason"],
        declined=tuple(
            Declined(row["rule"], tuple(row["failed"])) for row in answer.get("declined", ())
        ),
        declined_by_binding=declined_by_binding,
        enabled=torch.ops.gn_override.is_enabled(),
        tensor_bytes=tensor_bytes,
        minimum_bytes=minimum,
        copied=served and copied,
        moved_bytes=moved,
        moved_at_most=rule in _AT_MOST,
        workspace_bytes=answer.get("workspace_bytes", 0),
        copy_speed=copy_speed,
    )


def cpu_name() -> str:
    """The CPU, as all commands print it."""
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread" + ("s" if threads != 1 else "")


def _call_text(x: Tensor, num_groups: int, backward: bool) -> str:
    """The call in the planner's words, for one that never reaches the planner."""
    sizes = "x".join(map(str, x.shape))
    name = str(x.dtype).removeprefix("torch.")
    direction = "backward" if backward else "forward"
    return f"{x.device.type} {direction} {sizes} G={num_groups} {name} strides {x.stride()}"


def _is_dense(x: Tensor) -> bool:
    """Whether x fills its memory without gaps or overlaps, in any order of dimensions."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or span + 1 == x.numel()


@functools.cache
def _copy_speed(device: torch.device) -> float:
    """Bytes read and written a second by a copy of 64 MiB on the device: the best of ten."""
    source = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(seconds_of(lambda: target.copy_(source), device.type) for _ in range(10))
    return 2 * source.numel() / seconds


def _quantity(value: float, unit: str, digits: int = 3) -> str:
    """So many significant digits, with the prefix that leaves one to three before the point."""
    value = float(f"{value:.{digits}g}")
    prefix = next((key for key, factor in _PREFIXES.items() if value >= factor), "n")
    return f"{value / _PREFIXES[prefix]:.3g} {prefix}{unit}"


def parse_shape(text: str) -> list[int]:
    """ "2x320x64x64" (or with commas) as a list of sizes; ValueError on anything else."""
    parts = text.lower().replace(",", "x").split("x")
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError(f'a shape looks like 2x320x64x64, not "{text}"') from None


def parse_dtype(text: str) -> torch.dtype:
    """ "bf16", "bfloat16", "fp32", ... as a torch.dtype; ValueError on anything else."""
    name = _SHORT_NAMES.get(text, text)
    if name not in _DTYPES:
        known = ", ".join([*_SHORT_NAMES, *_DTYPES])
        raise ValueError(f'the dtype is one of {known}, not "{text}"')
    return _DTYPES[name]
