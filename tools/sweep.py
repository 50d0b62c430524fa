"""No cliff in between: random shapes, ours against stock in both layouts and against a copy.

    python tools/sweep.py --output sweep-h200        # 400 shapes or 8 minutes, what ends first
    python tools/sweep.py --shapes 40 --seconds 60 --seed 1

Shapes are drawn from a seed, sizes log-uniform: N 1 - 1024, C 1 - 4096, HW 1 - 4 Mi, G a divisor
of C, up to 2 GiB in float32, float16 and bfloat16. Kinds take turns: usual (G = 32), any, odd C,
prime HW, both, G = 1, D = C / G of 1, 2, 3 and 33; every 20th has one pixel or one channel, which
is NCHW too and goes to stock by design, and is reported apart.

Each shape is checked and timed as tools/bench.py does it, with less time for a figure. Printed:
how many are slower than stock's better layout by more than 5%, and with --pytorch than the kernels
of a checkout of PyTorch (tools/pytorch_kernels.py), the worst shapes against these and against the
copy, and the median of forward / copy above 16 MB. The exit status is 1 if a result is wrong or a
call raised an error.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import bench
import kernel_table
import peers
import pytorch_kernels
import results
import timing
import torch
from progress import Progress
from render_readme import LARGE_MB, SLOWER, is_large

sys.path.insert(0, str(results.ROOT / "tests"))
from shapes import Case

from gn_override import _bench

Row = dict[str, Any]

WIDTHS = {"D1": 1, "D2": 2, "D3": 3, "D33": 33}
KINDS = ("usual", "any", "odd_C", "prime_HW", "odd_C_prime_HW", "G1", *WIDTHS)
DTYPES = ("bfloat16", "float32", "float16")
MOST_N, MOST_C, MOST_HW, MOST_BYTES = 1024, 4096, 4 << 20, 2 << 30
ONE_LAYOUT_EVERY = 20


def log_uniform(source: random.Random, low: int, high: int) -> int:
    """A whole number from low to high whose logarithm is uniform."""
    value = round(math.exp(source.uniform(math.log(low), math.log(high))))
    return min(max(value, low), high)


def largest_prime(most: int) -> int:
    """The largest prime up to `most`, which is 2 or more."""
    while any(most % d == 0 for d in range(2, math.isqrt(most) + 1)):
        most -= 1
    return most


def height_and_width(pixels: int) -> tuple[int, int]:
    """Two factors of `pixels`, as near to each other as can be."""
    height = next(d for d in range(math.isqrt(pixels), 0, -1) if pixels % d == 0)
    return height, pixels // height


def _sizes(kind: str, source: random.Random) -> tuple[int, int, int, int]:
    """N, C, HxW and G of one draw."""
    N = log_uniform(source, 1, MOST_N)
    C = log_uniform(source, 3, MOST_C)
    HxW = log_uniform(source, 2, MOST_HW)
    if kind == "one_layout":
        return (N, C, 1, 1) if source.random() < 0.5 else (N, 1, HxW, 1)
    if kind == "usual":
        return N, 32 * log_uniform(source, 1, MOST_C // 32), HxW, 32
    if kind in WIDTHS:
        G = log_uniform(source, 2, MOST_C // WIDTHS[kind])
        return N, G * WIDTHS[kind], HxW, G
    if kind.startswith("odd_C"):
        C -= 1 - C % 2
    if kind.endswith("prime_HW"):
        HxW = largest_prime(HxW)
    divisors = [d for d in range(1, C + 1) if C % d == 0]
    return N, C, HxW, 1 if kind == "G1" else source.choice(divisors)


def draw(count: int, seed: int) -> Iterator[Case]:
    """The shapes of a seed; a case's name is its number and its kind."""
    source = random.Random(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        if number % ONE_LAYOUT_EVERY == ONE_LAYOUT_EVERY - 1:
            kind = "one_layout"
        dtype = DTYPES[number // len(KINDS) % len(DTYPES)]
        while True:
            N, C, HxW, G = _sizes(kind, source)
            case = Case(f"{number}_{kind}", (N, C, *height_and_width(HxW)), G, dtype)
            if case.numel * getattr(torch, dtype).itemsize <= MOST_BYTES:
                break
        yield case


def rule_of(case: Case, backward: bool) -> str:
    """The rule of the policy that takes a case."""
    told = torch.ops.gn_override.explain_shape(
        "cuda", backward, case.N, case.C, case.HxW, case.G, case.dtype, case.dtype, True, 16
    )
    return str(json.loads(told)["rule"])


def measure(
    case: Case,
    milliseconds: int,
    device: str = "cuda",
    providers: Mapping[str, bench.Provider] = bench.OURS | bench.STOCK,
) -> Row:
    """A row of tools/bench.py, with the rules that take the call; or {"error": why}."""
    row: Row = {"one_layout": case.one_layout}
    try:
        row |= bench.measure(case, providers, milliseconds, device=device)
    except RuntimeError as error:
        fields = {"name": case.name, "shape": list(case.shape), "groups": case.groups}
        return row | fields | {"dtype": case.dtype, "error": peers.reason(error)}
    row["rules"] = [rule_of(case, backward) for backward in (False, True)]
    return row


def over_copy(row: Row) -> float:
    """Time of our forward over the copy's."""
    return float(row["fwd"]["gn_override"] / row["copy"])


# Whom ours are held against.
OTHERS = {"stock": _bench.STOCK, "PyTorch's checkout": (kernel_table.CHECKOUT,)}


def ratios(
    rows: Sequence[Row], what: str, names: Sequence[str] = _bench.STOCK
) -> list[tuple[float, Row]]:
    """(time of the fastest of the names over ours, row) where they were measured, worst first."""
    found = [(ratio, row) for row in rows if (ratio := kernel_table.over(row, what, names))]
    return sorted(found, key=lambda pair: pair[0])


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows with times: those that we serve, and those of one layout."""
    timed = [row for row in rows if "error" not in row]
    return [r for r in timed if not r["one_layout"]], [r for r in timed if r["one_layout"]]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of rows, and the median of forward / copy of the large ones (None without any)."""
    served, _ = split(rows)
    large = [over_copy(row) for row in served if is_large(row)]
    slower = {
        f"slower than {other} by more than 5%": {
            what: sum(ratio < 1 / SLOWER for ratio, _ in ratios(served, what, names))
            for what in _bench.DIRECTIONS
        }
        for other, names in OTHERS.items()
        if any(ratios(served, what, names) for what in _bench.DIRECTIONS)
    }
    return {
        "shapes": len(rows),
        "served": len(served),
        "wrong": sum("wrong" in row for row in rows),
        "errors": sum("error" in row for row in rows),
        **slower,
        f"median of forward / copy above {LARGE_MB} MB": (
            round(statistics.median(large), 3) if large else None
        ),
        f"above {LARGE_MB} MB": len(large),
    }


def _line(row: Row, figure: float) -> str:
    shape = "x".join(map(str, row["shape"]))
    times = " ".join(f"{row[what]['gn_override']:.1f}" for what in _bench.DIRECTIONS)
    return (
        f"  {figure:>6.2f}  {shape} G={row['groups']} {row['dtype']}, {row['MB']} MB; "
        f"copy {row['copy']:.1f}, ours {times} us; {', '.join(row['rules'])}; {row['name']}"
    )


def report(rows: Sequence[Row], worst: int) -> str:
    """The sweep as text; `worst` rows of each ranking."""
    served, one_layout = split(rows)
    lines = [f"{name}: {value}" for name, value in summary(rows).items()]
    for other, names in OTHERS.items():
        for what, title in _bench.DIRECTIONS.items():
            found = ratios(served, what, names)[:worst]
            lines += [f"{title}, {other} / ours, the worst:"] if found else []
            lines += [_line(row, ratio) for ratio, row in found]
    lines.append(f"forward / copy above {LARGE_MB} MB, the worst:")
    large = sorted((row for row in served if is_large(row)), key=over_copy, reverse=True)
    lines += [_line(row, over_copy(row)) for row in large[:worst]]
    for what, title in _bench.DIRECTIONS.items():
        same = [ratio for ratio, _ in ratios(one_layout, what)]
        if same:
            lines.append(
                f"one pixel or channel, {title}, {len(same)} shapes on stock's kernels: "
                f"stock / ours {same[0]:.2f} to {same[-1]:.2f}, "
                f"median {statistics.median(same):.2f}"
            )
    for row in rows:
        for key in ("wrong", "error"):
            if key in row:
                lines.append(f"{key.upper()}: {row['name']} {row['shape']} {row[key]}")
    return "\n".join(lines)


def sweep(count: int, seed: int, seconds: float, one: Callable[[Case], Row]) -> list[Row]:
    """Rows of the shapes of a seed, by `one`, until the time is over or the GPU is lost."""
    rows: list[Row] = []
    end = time.monotonic() + seconds
    with Progress(count) as progress:
        for case in draw(count, seed):
            if time.monotonic() > end or timing.gpu_lost():
                break
            progress.step(f"{case.name} {case} {case.dtype}")
            torch.manual_seed(seed)
            rows.append(one(case))
            torch.cuda.empty_cache()
    return rows


def main(argv: Sequence[str]) -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("--shapes", type=results.count, default=400, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=480, help="to stop after")
    pytorch_kernels.add_argument(parser)
    parser.add_argument(
        "--milliseconds", type=results.count, default=8, help="of measuring a figure"
    )
    parser.add_argument("--worst", type=int, default=10, help="rows to print of each ranking")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU and triton")
    head = results.machine("cuda") | {
        "unit": "microseconds, median, cold L2, CUDA graph",
        "seed": arguments.seed,
    }
    names = (*bench.OURS, *bench.STOCK, *bench.CHECKOUT)
    providers, _ = bench.providers_here(names, arguments.pytorch)
    if kernel_table.CHECKOUT in providers:
        head["pytorch"] = pytorch_kernels.source(arguments.pytorch)
    begin = time.monotonic()
    rows = sweep(
        arguments.shapes,
        arguments.seed,
        arguments.seconds,
        lambda case: measure(case, arguments.milliseconds, providers=providers),
    )
    found = summary(rows)
    if arguments.output:
        head |= {"seconds": round(time.monotonic() - begin), "summary": found}
        results.write(arguments.output, head | {"rows": rows}, arguments.folder)
    print(f"{len(rows)} of {arguments.shapes} shapes in {time.monotonic() - begin:.0f} s")
    print(report(rows, arguments.worst))
    return int(bool(found["wrong"] or found["errors"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
