"""Time every plan of the CUDA schemes: the evidence behind native/plan/policy_cuda.cpp.

    python tools/tune.py --output tune-h200                # the kernel table's shapes
    python tools/tune.py --only rn2,sd15                   # some of them
    python tools/tune.py --only "" --random 70 --seed 1    # shapes as models have them
    python tools/tune.py --only "" --shapes 8x129x56x56:43:float32,1x320x64x64:32:bfloat16
    python tools/tune.py --activation silu                 # fused with one

Builds tools/tune.cu with nvcc (half a minute on 16 cores) and times, for each shape and
direction, all tile widths, cluster sizes, threads and samples of a wave that fit, and two passes:
hundreds of plans in a second or two, a few times each. The fastest of these are timed again as the
benchmarks time, on a GPU that is kept busy: one that was idle is faster for a moment, by as much as
good plans differ. Prints for each the policy's own choice (by its estimates, so without
measured_cuda.h), the best and the runners-up, as x copy, and at last how much longer the policy's
choices take than the best. Where that is more than a few percent for most shapes of another GPU,
fit the estimates in estimates_cuda.cpp to it. For a shape of its own, native/plan/measured_cuda.h
takes the row that is printed behind its plans, if it saves 4% or a second run prints it too.

Where such a plan keeps all that it reads, the same blocks are timed once more as they bring their
inputs to shared memory, meet, and write as much, without computing anything. The least of these
times is printed beside the copy's.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results
import torch

sys.path.insert(0, str(results.ROOT / "tests"))
sys.path.append(str(results.ROOT))
from reference import ACTIVATIONS
from shapes import KERNEL_CASES, Case

from codegen.verify import find_nvcc

DTYPES = ("bfloat16", "float32")
# Largest difference between two schemes, as a share of the largest output: they round alike.
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}

# Plans that are so many times as fast as the policy's are worth a row of measured_cuda.h.
WORTH = 1.02

Row = dict[str, Any]


def random_cases(count: int, seed: int) -> list[Case]:
    """Shapes as models have them, of 0.2 to 300 MB; a quarter of them in float32."""
    source = random.Random(seed)
    widths = [32 * factor for factor in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 30, 32, 40, 60, 64)]
    sides = (4, 7, 8, 14, 16, 28, 32, 48, 56, 64, 96, 112, 128, 192, 256, 512, 768)
    cases: list[Case] = []
    while len(cases) < count:
        N = 1 << source.randrange(10)
        side = source.choice(sides)
        dtype = source.choice(("bfloat16", "bfloat16", "bfloat16", "float32"))
        case = Case(f"x{len(cases)}", (N, source.choice(widths), side, side), 32, dtype)
        if 2e5 < case.numel * getattr(torch, dtype).itemsize < 3e8:
            cases.append(case)
    return cases


def parse_shape(text: str) -> Case:
    """NxCx...:G:dtype, say 2x320x64x64:32:bfloat16."""
    try:
        shape, groups, dtype = text.split(":")
        case = Case(text, tuple(map(int, shape.split("x"))), int(groups), dtype)
    except ValueError as error:
        message = f"{text!r} is not NxCx...:G:dtype, say 2x320x64x64:32:bfloat16"
        raise argparse.ArgumentTypeError(message) from error
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: dtypes are {', '.join(DTYPES)}")
    return case


def parse_shapes(text: str) -> list[Case]:
    return [parse_shape(word) for word in text.split(",") if word]


def nvcc() -> str:
    found = find_nvcc()
    if found is None:
        raise SystemExit("tools/tune.py needs nvcc: set CUDA_HOME")
    return found


def build(folder: Path) -> Path:
    """The program, for the GPU of this machine."""
    native = results.ROOT / "native"
    sources = [
        results.ROOT / "tools" / "tune.cu",
        *native.glob("launch/*.cu"),
        *native.glob("plan/*.cpp"),
    ]
    major, minor = torch.cuda.get_device_capability()
    flags = ["-O3", "-std=c++20", f"-arch=sm_{major}{minor}", f"-I{results.ROOT}"]
    compiler = nvcc()

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([compiler, *flags, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "tune"
    subprocess.run([compiler, *flags[2:3], *objects, "-o", str(program)], check=True)
    return program


def read_rows(cases: Iterable[Case], lines: Iterable[str]) -> list[Row]:
    """What the program printed (see tools/tune.cu), one row for each case and direction."""
    by_name = {case.name + case.dtype: case for case in cases}
    rows: dict[tuple[str, str], Row] = {}
    for line in lines:
        name, direction, copy, time, moved, is_policy, error, plan = line.rstrip("\n").split(" ", 7)
        case = by_name[name]
        row = rows.setdefault(
            (name, direction),
            {
                "name": case.name,
                "shape": list(case.shape),
                "groups": case.groups,
                "dtype": case.dtype,
                "direction": direction,
                "copy": float(copy),
                "count": 0,
                "policy": "",
                "moved": {},
                "plans": {},
                "wrong": [],
            },
        )
        row["count"] += 1
        if float(time) > 0:
            row["plans"][plan] = float(time)
        if float(moved) > 0:
            row["moved"][plan] = float(moved)
        if is_policy == "1":
            row["policy"] = plan
        if not float(error) <= TOLERANCE[case.dtype]:
            row["wrong"].append(f"{plan}: {error} from two passes")
    return list(rows.values())


def regret(row: Row) -> float:
    """How many times the best plan's time the policy's takes."""
    return row["plans"][row["policy"]] / min(row["plans"].values())


def measured_plan(row: Row, plan: str, activation: str) -> str:
    """A plan as a row of native/plan/measured_cuda.h, which pins it."""
    scheme, *fields = plan.split()
    numbers = dict(field.split("=") for field in fields)
    if scheme in ("resident", "cooperative"):
        splits = "splits" if scheme == "resident" else "samples_per_wave"
        pins = (numbers["columns"], numbers[splits], numbers["threads"])
    else:
        pins = ("0", "0", numbers["threads"] if scheme == "registers" else "0")
    N, C, *pixels = row["shape"]
    direction = "kForward" if row["direction"] == "fwd" else "kBackward"
    names = [f"k{''.join(map(str.capitalize, name.split('_')))}" for name in (activation, scheme)]
    sizes = ", ".join(map(str, (N, C, math.prod(pixels), row["groups"])))
    pinned = ", ".join((names[1], *pins))
    share = row["plans"][plan] / row["plans"][row["policy"]]
    return f"{{{direction}, {names[0]}, {sizes}, {{{pinned}}}, {share:.2f}}},"


def describe(row: Row, most: int, activation: str = "identity") -> str:
    """The best plans of a row, and the policy's; and what the table lacks, if it lacks it."""
    ranked = sorted(row["plans"].items(), key=lambda item: item[1])
    lines = [f"{row['name']} {row['dtype']} {row['direction']}: copy {row['copy']} us"]
    if row["moved"]:
        plan, time = min(row["moved"].items(), key=lambda item: item[1])
        lines[0] += f", moved without computing {time} us ({plan})"
    for rank, (plan, time) in enumerate(ranked, 1):
        if rank <= most or plan == row["policy"]:
            mark = "policy" if plan == row["policy"] else ""
            lines.append(
                f"  {rank:>3} {time:>9.2f} us {time / row['copy']:>6.2f} x  {mark:<7}{plan}"
            )
    if row["dtype"] == "bfloat16" and regret(row) > WORTH and not row["wrong"]:
        lines.append(f"  measured_cuda.h: {measured_plan(row, ranked[0][0], activation)}")
    return "\n".join(lines + [f"  WRONG {text}" for text in row["wrong"]])


def shortened(row: Row, most: int) -> Row:
    """The row with its best plans alone, the policy's, and the least that moves as much."""
    ranked = sorted(row["plans"], key=row["plans"].__getitem__)
    kept = {*ranked[:most], row["policy"]}
    least = sorted(row["moved"], key=row["moved"].__getitem__)[:1]
    return row | {
        "plans": {plan: row["plans"][plan] for plan in ranked if plan in kept},
        "moved": {plan: row["moved"][plan] for plan in least},
    }


def summary(rows: Sequence[Row]) -> str:
    """How good the policy's choices are."""
    regrets = [regret(row) for row in rows]
    worst = max(rows, key=regret)
    return (
        f"{sum(row['count'] for row in rows)} plans: the policy's takes "
        f"{statistics.mean(regrets):.3f} times the best plan's time on average, "
        f"{max(regrets):.2f} at most ({worst['name']} {worst['dtype']} {worst['direction']})"
    )


def main() -> None:
    parser = results.Parser(__doc__)
    parser.add_argument("--only", default=None, help="comma-separated names of cases; '' for none")
    parser.add_argument(
        "--shapes", type=parse_shapes, default=[], help="comma-separated NxCx...:G:dtype, too"
    )
    parser.add_argument("--random", type=int, default=0, help="so many random shapes too")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, default="identity", help="fused with the norm"
    )
    parser.add_argument(
        "--repetitions",
        type=results.count,
        default=9,
        help="of all plans, before the finalists' own",
    )
    parser.add_argument(
        "--finalists", type=results.count, default=12, help="plans that are timed again"
    )
    parser.add_argument("--best", type=int, default=3, help="plans of a row to print and write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "tools/tune.py needs a CUDA GPU\n")
    known = [case.name for case in KERNEL_CASES]
    names = (
        known if arguments.only is None else [name for name in arguments.only.split(",") if name]
    )
    if unknown := set(names) - set(known):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    cases = [case for case in KERNEL_CASES if case.name in names]
    cases += arguments.shapes
    cases += random_cases(arguments.random, arguments.seed)
    if not cases:
        parser.error("no such case")

    questions = "".join(
        f"{case.name}{case.dtype} {case.N} {case.C} {case.HxW} {case.G} {case.dtype} "
        f"{arguments.activation}\n"
        for case in cases
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [build(Path(folder)), str(arguments.repetitions), str(arguments.finalists)],
            input=questions,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    rows = read_rows(cases, done.stdout.splitlines())
    for row in rows:
        print(describe(row, arguments.best, arguments.activation))
    print(summary(rows))
    if arguments.output:
        head = results.machine("cuda") | {"unit": "microseconds, median, cold L2, CUDA graph"}
        head["activation"] = arguments.activation
        written = [shortened(row, arguments.best) for row in rows]
        results.write(arguments.output, head | {"rows": written}, arguments.folder)
    if any(row["wrong"] for row in rows):
        parser.exit(1, "some plans are wrong\n")


if __name__ == "__main__":
    main()
