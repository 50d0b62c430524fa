"""Time the CPU kernels against a copy and against stock, side by side: the CPU table.

    python tools/bench_cpu.py                          # every row of tests/shapes.py's CPU_CASES
    python tools/bench_cpu.py --cases model --only sd15_unet
    python tools/bench_cpu.py --moved                  # what the forward's traffic takes too

Each round gives everything a turn of some calls: y.copy_(x) of the channels-last tensor, the same
to a tensor that is allocated for it, stock on NCHW tensors, stock on channels-last ones and ours on
the same; forward (under no_grad) and forward plus autograd's backward to X, gamma and beta, results
allocated by the call. The first call of a turn, which finds the caches full of the turn before, is
not counted. Figures are medians in milliseconds over the calls; the results file has the least
times too, which other load on the machine disturbs less. Before it is timed, each case is checked
against fp64 with the test suite's bound.

With --moved, moved_cpu.cpp has a turn too, which is built with the compiler of the machine: ours
without the arithmetic, two reads of X and a write of Y in the same order. "moved" is its time.

Each case runs in a process of its own, in which results of up to 32 MB mostly get the memory of the
call before, as glibc comes to do in a long run: how far it has come would otherwise depend on what
ran before. From 32 MB on stock's get new pages from the system, which can cost more than what is
computed, and ours the memory of the call before (native/binding/output_allocator.h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import results
import timing
import torch
import torch.nn.functional as F

sys.path.insert(0, str(results.ROOT / "tests"))
import reference
import shapes

import gn_override
from gn_override import _bench

MOVED = results.ROOT / "tools" / "moved_cpu.cpp"

# glibc's mallopt(): its parameters and the largest values that it comes to by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 << 20


def settle_malloc() -> None:
    """Have glibc take memory from the system as after a long run; elsewhere nothing."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD)


def build_moved(folder: str) -> str:
    """Builds moved_cpu.cpp in the folder: the library, which has gn_override_tools::moved."""
    from torch.utils import cpp_extension

    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # where pip puts ninja
    native = results.ROOT / "native"
    sources = [MOVED, native / "cpu" / "cpu.cpp", *sorted((native / "plan").glob("*.cpp"))]
    name = "gn_override_moved"
    cpp_extension.load(
        name=name,
        sources=[str(source) for source in sources],
        build_directory=folder,
        extra_include_paths=[str(results.ROOT)],
        extra_cflags=["-std=c++20", "-O3", "-march=native", "-fopenmp", "-fvisibility=hidden"],
        extra_ldflags=["-fopenmp"],
        is_python_module=False,
    )
    return f"{folder}/{name}.so"


def steps_of(inputs: reference.Inputs) -> dict[str, timing.Step]:
    """What a round times, by name: "copy", "copy_new", then "fwd NAME" and "fwd_bwd NAME"."""
    like_X = torch.empty_like(inputs.X)
    steps: dict[str, timing.Step] = {
        "copy": lambda: like_X.copy_(inputs.X),
        "copy_new": lambda: torch.empty_like(inputs.X).copy_(inputs.X),
    }
    for name, layout in _bench.LAYOUTS.items():
        both = timing.steps(F.group_norm, inputs, layout)
        steps |= {f"{what} {name}": step for what, step in both.items()}
    return steps


def measure(
    case: shapes.Case, seconds: float, threads: int, check: bool, moved: str | None
) -> dict[str, Any]:
    """One row: medians and least times of copies, of stock in both layouts and of ours.

    moved: the library of build_moved(), if its function shall be timed too.
    """
    torch.set_num_threads(threads)
    settle_malloc()
    dtype = getattr(torch, case.dtype)
    inputs = reference.make_inputs(case, "cpu", dtype)
    row: dict[str, Any] = {
        "name": case.name,
        "shape": list(case.shape),
        "groups": case.groups,
        "dtype": case.dtype,
        "MB": round(case.numel * dtype.itemsize / 1e6, 1),
    }
    if check:
        with gn_override.enabled(), reference.expect_calls("cpu", True, True):
            ours = reference.native(inputs)
        try:
            reference.assert_parity(ours, inputs)
        except AssertionError as error:
            row["wrong"] = str(error)
        else:
            row["checked"] = True
        del ours
    steps = steps_of(inputs)
    if moved:
        torch.ops.load_library(moved)
        move = torch.ops.gn_override_tools.moved
        Y = torch.empty_like(inputs.X)
        move(inputs.X, Y, inputs.groups)
        assert torch.equal(Y, inputs.X)
        steps["moved"] = lambda: move(inputs.X, Y, inputs.groups)
    times = _bench.time_rounds(steps, seconds)
    row["calls"] = min(len(values) for values in times.values())
    for kind, figure in (("median", statistics.median), ("least", min)):
        figures: dict[str, Any] = {"copy": 0.0, "copy_new": 0.0, "fwd": {}, "fwd_bwd": {}}
        for name, values in times.items():
            what, _, who = name.partition(" ")
            value = round(figure(values), 4)
            if who:
                figures[what][who] = value
            else:
                figures[what] = value
        row[kind] = figures
    return row


def summary(rows: list[dict[str, Any]], kind: str = "median") -> dict[str, float]:
    """Over the rows: how many times faster than stock, geometric mean and the worst row."""
    result = {}
    for what in ("fwd", "fwd_bwd"):
        last = [_bench.speed_up(row[kind], what, ("stock_channels_last",)) for row in rows]
        best = [_bench.speed_up(row[kind], what) for row in rows]
        result[f"{what} over stock channels-last, mean"] = round(statistics.geometric_mean(last), 2)
        result[f"{what} over stock's faster layout, mean"] = round(
            statistics.geometric_mean(best), 2
        )
        result[f"{what} over stock's faster layout, worst"] = round(min(best), 2)
    if all("moved" in row[kind] for row in rows):
        moved = [row[kind]["fwd"]["stock_channels_last"] / row[kind]["moved"] for row in rows]
        result["moved over stock channels-last, mean"] = round(statistics.geometric_mean(moved), 2)
    return result


def table(rows: list[dict[str, Any]], kind: str = "median") -> str:
    """The rows as text: milliseconds, and how many times faster than stock's faster layout."""
    head = f"{'case':<16}{'shape':<20}{'dtype':<10}{'copy':>8}{'to new':>8}"
    head += f"{'moved':>8}" if "moved" in rows[0][kind] else ""
    for what in ("fwd", "fwd_bwd"):
        head += f" | {what + ': NCHW':>13}{'NHWC':>9}{'ours':>9}{'faster':>8}"
        head += f"{'x copy':>8}" if what == "fwd" else ""
    lines = [head]
    for row in rows:
        figures = row[kind]
        shape = "x".join(map(str, row["shape"]))
        line = f"{row['name']:<16}{shape:<20}{row['dtype']:<10}"
        line += f"{figures['copy']:>8.3f}{figures['copy_new']:>8.3f}"
        line += f"{figures['moved']:>8.3f}" if "moved" in figures else ""
        for what in ("fwd", "fwd_bwd"):
            times = figures[what]
            ours = times["gn_override"]
            line += f" | {times['stock_nchw']:>13.3f}{times['stock_channels_last']:>9.3f}"
            line += f"{ours:>9.3f}{_bench.speed_up(figures, what):>8.2f}"
            line += f"{ours / figures['copy']:>8.2f}" if what == "fwd" else ""
        lines.append(line + (f"  WRONG: {row['wrong']}" if "wrong" in row else ""))
    return "\n".join(lines)


def main() -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("--cases", choices=("cpu", "model"), default="cpu")
    parser.add_argument("--only", help="names of cases, or their beginnings, comma separated")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="instead of each case's own",
    )
    parser.add_argument(
        "--seconds", type=float, default=3, help="of each row (default %(default)s)"
    )
    parser.add_argument("--threads", type=results.count, default=2, help="default %(default)s")
    parser.add_argument(
        "--moved", action="store_true", help="also time the forward's traffic without arithmetic"
    )
    parser.add_argument("--no-check", action="store_true", help="skip the check against fp64")
    arguments = parser.parse_args()
    cases = shapes.CPU_CASES if arguments.cases == "cpu" else shapes.MODEL_CASES
    prefixes = tuple(arguments.only.split(",")) if arguments.only else ("",)
    chosen = [case for case in cases if case.name.startswith(prefixes)]
    if not chosen:
        parser.error(f"no case is called {arguments.only!r}")
    if arguments.dtype:
        chosen = [dataclasses.replace(case, dtype=arguments.dtype) for case in chosen]
    row_of = functools.partial(
        measure,
        seconds=arguments.seconds,
        threads=arguments.threads,
        check=not arguments.no_check,
    )
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as alone,
    ):
        moved = build_moved(folder) if arguments.moved else None
        for row in alone.imap(functools.partial(row_of, moved=moved), chosen):
            rows.append(row)
            text = table(rows[-1:])
            print(text if len(rows) == 1 else text.partition("\n")[2], flush=True)
    means = summary(rows)
    print("\n".join(f"{name}: {value:.2f}" for name, value in means.items()))
    if arguments.output:
        head = results.machine("cpu") | {
            "unit": "milliseconds",
            "instruction_set": json.loads(torch.ops.gn_override.build_info())[
                "cpu_instruction_set"
            ],
            "load_average": round(os.getloadavg()[0], 2),
            "summary": means,
            "summary of least times": summary(rows, "least"),
        }
        print(results.write(arguments.output, head | {"rows": rows}, arguments.folder))
    return any("wrong" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
