"""python -m gn_override bench: our kernels on this machine, beside a copy and PyTorch's own.

The benchmarks of the source tree (tools/) time with the same functions.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gn_override
from gn_override._clock import seconds_of
from gn_override._explain import cpu_name

Row = dict[str, Any]
Step = Callable[[], Any]
Norm = Callable[[Tensor, int, Tensor, Tensor], Tensor]  # (X, G, gamma, beta) -> Y

OURS = "gn_override"
# Who computes, on operands of which layout.
LAYOUTS = {OURS: "channels_last", "stock_channels_last": "channels_last", "stock_nchw": "nchw"}
STOCK = tuple(name for name in LAYOUTS if name != OURS)
DIRECTIONS = {"fwd": "forward", "fwd_bwd": "forward + backward"}
RESULTS = {"fwd": ("Y",), "fwd_bwd": ("dX", "dgamma", "dbeta")}  # of a step

_LEAST_ROUNDS = 4
_TURN_SECONDS = 0.01
_MOST_CALLS = 20


@dataclass(frozen=True)
class Case:
    """One row: [N, C, H, W], the groups and the dtype, under a name of tests/shapes.py."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: str
    groups: int = 32


# A few of the shapes that docs/benchmarks.md has on an H200 and on a CPU.
CASES = {
    "cuda": (
        Case("sd15", (2, 320, 64, 64), "bfloat16"),
        Case("sdxl", (2, 320, 128, 128), "bfloat16"),
        Case("vae3", (1, 512, 128, 128), "bfloat16"),
        Case("rn2", (64, 256, 56, 56), "bfloat16"),
        Case("rn4", (64, 1024, 14, 14), "bfloat16"),
        Case("pr1", (128, 256, 28, 28), "bfloat16"),
        Case("sd15", (2, 320, 64, 64), "float32"),
        Case("rn2", (64, 256, 56, 56), "float32"),
    ),
    "cpu": (
        Case("cpu1", (2, 320, 64, 64), "float32"),
        Case("cpu3", (16, 256, 28, 28), "float32"),
        Case("cpu4", (8, 64, 112, 112), "float32"),
        Case("cpu1", (2, 320, 64, 64), "bfloat16"),
        Case("cpu3", (16, 256, 28, 28), "bfloat16"),
        Case("cpu4", (8, 64, 112, 112), "bfloat16"),
    ),
}


def steps(
    norm: Norm, X: Tensor, dY: Tensor, gamma: Tensor, beta: Tensor, groups: int
) -> dict[str, Step]:
    """What is timed: forward without autograd; forward plus backward to X, gamma and beta.

    Args:
        norm: who computes.
        X, dY: [N, C, ...], in the layout that is timed.
        gamma, beta: [C].
        groups: G.
    """
    X, gamma, beta = (t.detach().requires_grad_() for t in (X, gamma, beta))

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (norm(X, groups, gamma, beta),)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm(X, groups, gamma, beta), (X, gamma, beta), dY)

    return {"fwd": forward, "fwd_bwd": forward_backward}


def microseconds(step: Step, milliseconds: int) -> float:
    """Median GPU time of a step, captured in a CUDA graph, with a cold L2 cache.

    Args:
        step: returns when its kernels are launched.
        milliseconds: how long to measure, cache flushes included.
    """
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    warmup = min(10, milliseconds)
    median: float = do_bench(graph.replay, warmup=warmup, rep=milliseconds, return_mode="median")
    return 1e3 * median


def time_rounds(steps: Mapping[str, Step], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of the calls of every step on the CPU, by its name; ours end in "gn_override".

    Each round gives every step a turn of some calls, so that a machine that slows down does so for
    all. The first call of a turn, which finds the caches full of the turn before, does not count,
    nor does the first round.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds <= _LEAST_ROUNDS or time.perf_counter() < end:
        for name, step in steps.items():
            with gn_override._switched(name.endswith(OURS)):
                first = seconds_of(step, "cpu")
                calls = min(max(2, round(_TURN_SECONDS / first)), _MOST_CALLS)
                turn = [1e3 * seconds_of(step, "cpu") for _ in range(calls)]
            if rounds > 0:
                times[name] += turn
        rounds += 1
    return times


def relative_error(value: Tensor, reference: Tensor) -> float:
    """l2 distance relative to a more exact result."""
    distance = torch.linalg.vector_norm(value - reference, dtype=torch.float64)
    return float(distance / torch.linalg.vector_norm(reference, dtype=torch.float64))


def difference(what: str, found: Sequence[Tensor], stock: Sequence[Tensor]) -> str:
    """Whether the results of a step are far from stock's: says which is, or "".

    A rough check, by the relative l2 error: at most 8 eps of the dtype, and 0.001 in any case.
    It finds wrong results, not inexact ones.

    Args:
        what: the step, "fwd" or "fwd_bwd".
        found, stock: its RESULTS.
    """
    for name, value, theirs in zip(RESULTS[what], found, stock, strict=True):
        if value.shape != theirs.shape:
            return f"{name}: shape {tuple(value.shape)}, stock {tuple(theirs.shape)}"
        error = relative_error(value, theirs)
        limit = max(8 * torch.finfo(theirs.dtype).eps, 1e-3)
        if not error <= limit:  # so that a NaN is one
            return f"{name}: relative l2 error {error:.2e}, limit {limit:.2e}"
    return ""


def measure(case: Case, device: str, seconds: float) -> Row:
    """One row: microseconds of a copy, and of each of LAYOUTS in both directions.

    "wrong" in it says what is wrong with our results, or that other kernels ran.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    X, dY = random(*case.shape), random(*case.shape)
    gamma, beta = random(case.shape[1]), random(case.shape[1])
    formats = {"channels_last": torch.channels_last, "nchw": torch.contiguous_format}
    of_provider = {
        name: steps(
            F.group_norm,
            X.contiguous(memory_format=formats[layout]),
            dY.contiguous(memory_format=formats[layout]),
            gamma,
            beta,
            case.groups,
        )
        for name, layout in LAYOUTS.items()
    }
    source = X.contiguous(memory_format=torch.channels_last)
    target = torch.empty_like(source)
    row: Row = {
        "name": case.name,
        "shape": list(case.shape),
        "groups": case.groups,
        "dtype": case.dtype,
        **_check(of_provider),
    }
    timed: dict[str, Step] = {"copy": lambda: target.copy_(source)}
    for name, both in of_provider.items():
        timed |= {f"{what} {name}": step for what, step in both.items()}
    if device == "cuda":
        milliseconds = max(1, round(1e3 * seconds / len(timed)))
        times = {}
        for name, step in timed.items():
            with gn_override._switched(name.endswith(OURS)):
                times[name] = microseconds(step, milliseconds)
    else:
        rounds = time_rounds(timed, seconds)
        times = {name: 1e3 * statistics.median(values) for name, values in rounds.items()}
    row["copy"] = round(times["copy"], 2)
    for what in DIRECTIONS:
        row[what] = {name: round(times[f"{what} {name}"], 2) for name in LAYOUTS}
    return row


def _check(of_provider: Mapping[str, Mapping[str, Step]]) -> Row:
    """{"checked": True}, or {"wrong": why} of ours."""
    for what in DIRECTIONS:
        with gn_override.disabled():
            stock = of_provider["stock_channels_last"][what]()
        before = gn_override.report().calls
        with gn_override.enabled():
            ours = of_provider[OURS][what]()
        calls = gn_override.report().calls
        operators = {call.split()[0] for call in calls if calls[call] > before.get(call, 0)}
        if len(operators) < (1 if what == "fwd" else 2):
            return {"wrong": f"{DIRECTIONS[what]}: not every call ran on the override"}
        if found := difference(what, ours, stock):
            return {"wrong": f"{DIRECTIONS[what]}: {found}"}
    return {"checked": True}


def choose_device(command: str, device: str | None) -> str | None:
    """The device to run on, by default the GPU if there is one; None, and a line, if it is not."""
    usable = torch.cuda.is_available() and "cuda" in gn_override.report().backends
    device = device or ("cuda" if usable else "cpu")
    if device == "cuda" and not usable:
        print(f"{command}: there is no GPU here that this build has kernels for", file=sys.stderr)
        return None
    return device


def device_name(device: str) -> str:
    """ "cpu" or "cuda", as the commands print it."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def say_if_busy() -> None:
    """Warn where other programs have the CPU: times then say little."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        print(
            f"this machine is busy (load {load:.1f} on {cores} cores): times will say little",
            file=sys.stderr,
        )


def speed_up(row: Row, what: str, others: Sequence[str] = STOCK) -> float:
    """Time of the fastest of the others, by default of stock's better layout, over ours."""
    times: dict[str, float] = row[what]
    return min(times[name] for name in others if name in times) / times[OURS]


def _label(row: Row) -> str:
    return f"{'x'.join(map(str, row['shape']))} {row['dtype']}"


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one block a direction."""
    lines = []
    for what, title in DIRECTIONS.items():
        lines.append(
            f"{title + ', us':<28}{'copy':>9}{'ours':>10}{'stock NHWC':>12}{'stock NCHW':>12}"
            f"{'speed-up':>10}"
        )
        for row in rows:
            times = row[what]
            lines.append(
                f"{_label(row):<28}{row['copy']:>9.1f}{times[OURS]:>10.1f}"
                f"{times['stock_channels_last']:>12.1f}{times['stock_nchw']:>12.1f}"
                f"{speed_up(row, what):>9.2f}x"
            )
        lines.append("")
    lines.append("us: median microseconds. Speed-up: over stock's better layout. NHWC: channels-")
    lines.append("last. A forward moves at least what a copy of the input moves, and forward and")
    lines.append("backward 2.5 times that.")
    return "\n".join(lines)


def main(*, device: str | None, seconds: float, plot: Path | None, as_json: bool) -> int:
    """Measure and print; 1 if a result is wrong or a call ran elsewhere, 0 otherwise.

    Args:
        device: "cpu" or "cuda"; by default the GPU if there is one.
        seconds: of measuring a row.
        plot: where to draw the speed-ups.
        as_json: print JSON instead of the table.
    """
    device = choose_device("bench", device)
    if device is None:
        return 1
    content = {
        "device": device_name(device),
        "torch": torch.__version__,
        "gn_override": gn_override.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "unit": "microseconds, median",
    }
    say_if_busy()
    head = "{device}, torch {torch}, gn_override {gn_override}, {date}".format(**content)
    rows = []
    for number, case in enumerate(CASES[device], 1):
        print(f"[{number}/{len(CASES[device])}] {case.name} {case.dtype}", file=sys.stderr)
        rows.append(measure(case, device, seconds))
    print(json.dumps(content | {"rows": rows}, indent=1) if as_json else f"{head}\n{table(rows)}")
    if plot:
        from gn_override import _picture

        panels = {
            title: [(_label(row), speed_up(row, what)) for row in rows]
            for what, title in DIRECTIONS.items()
        }
        _picture.bars(panels, head, plot)
    wrong = [f"{_label(row)}: {row['wrong']}" for row in rows if "wrong" in row]
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return int(bool(wrong))
