"""Read the GPU's counters of the kernel table's rows: what keeps each of them from being faster.

    python tools/counters.py --output counters-h200           # every row
    python tools/counters.py --only sd15,vae --dtype bfloat16
    python tools/counters.py --activation silu                 # the norm fused with it

Runs itself under Nsight Compute (ncu, which is part of the CUDA toolkit): for each row an
elementwise kernel that moves what a copy moves, our forward, and our forward and backward, each
with a cold cache. Of a step's kernels together:

    us         their time by the counters, without what lies between them
    read, written   MB of DRAM; what is written and stays in the L2 cache is not among it
    least      MB that must be read: X; or X, dY and X
    dram       time-weighted share of the DRAM's peak rate, %
    issue      of the slots in which multiprocessors can issue an instruction, %
    special    of the special-function unit's rate (exponentials, reciprocals, conversions), %
    stalls     what warps wait for, as shares of all waiting, the three largest

A step that is near the elementwise kernel's share of the DRAM's rate can only be faster by moving
fewer bytes; one that reads no more than it must and is far from that rate waits for something else.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench
import render_readme
import results
import timing
import torch

sys.path.insert(0, str(results.ROOT / "tests"))
import reference
from shapes import Case

import gn_override

# What a step reads at least, in tensors of X's size.
STEPS = {"elementwise": 1, "fwd": 1, "fwd_bwd": 3}
# In the name of the kernel that stands before each step, and in no other's.
MARKER = "erfinv"

TIME = "gpu__time_duration.sum"
READ = "dram__bytes_read.sum"
WRITTEN = "dram__bytes_write.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
SPECIAL = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"
# Warps that wait for it, by the name that Nsight Compute gives the reason.
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "wait",
)
METRICS = (TIME, READ, WRITTEN, DRAM, ISSUE, SPECIAL, *(STALL.format(name) for name in STALLS))

Kernel = dict[str, str]


def launch(case: Case, activation: str) -> None:
    """The steps of a case, each after a marker: what runs under Nsight Compute."""
    inputs = reference.make_inputs(case, "cuda", getattr(torch, case.dtype))
    marker = torch.zeros(1, device="cuda")
    elementwise = partial(torch.neg, inputs.X, out=torch.empty_like(inputs.X))
    norm = partial(gn_override.functional.group_norm, activation=activation)
    steps = {"elementwise": elementwise, **timing.steps(norm, inputs, "channels_last")}
    with gn_override.enabled():
        for name in STEPS:
            steps[name]()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            marker.erfinv_()
            steps[name]()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def kernels(lines: Iterable[str]) -> Iterator[Kernel]:
    """Those of a log of Nsight Compute, in the order in which they ran: column -> value."""
    remaining = iter(lines)
    for line in remaining:
        if line.startswith('"ID"'):
            for kernel in csv.DictReader([line, *remaining]):
                if kernel["ID"]:  # the row of units has none
                    yield kernel
            return
    raise ValueError("Nsight Compute has written no table")


def summary(step: Sequence[Kernel]) -> dict[str, Any]:
    """Of a step's kernels together."""

    def values(metric: str) -> list[float]:
        return [float(kernel[metric].replace(",", "")) for kernel in step]

    times = values(TIME)
    total = sum(times)

    def mean(metric: str) -> float:
        return sum(v * t for v, t in zip(values(metric), times, strict=True)) / total

    waits = {name: mean(STALL.format(name)) for name in STALLS}
    largest = sorted(waits, key=lambda name: -waits[name])[:3]
    return {
        "kernels": len(step),
        "us": round(total / 1e3, 2),
        "read": round(sum(values(READ)) / 1e6, 2),
        "written": round(sum(values(WRITTEN)) / 1e6, 2),
        "dram": round(mean(DRAM), 1),
        "issue": round(mean(ISSUE), 1),
        "special": round(mean(SPECIAL), 1),
        "stalls": {name: round(100 * waits[name] / sum(waits.values())) for name in largest},
    }


def rows(cases: Sequence[Case], lines: Iterable[str]) -> list[dict[str, Any]]:
    """One for each case and step, from the log of all launch()."""
    steps: list[list[Kernel]] = []
    for kernel in kernels(lines):
        if MARKER in kernel["Kernel Name"]:
            steps.append([])
        else:
            steps[-1].append(kernel)
    wanted = [(case, name) for case in cases for name in STEPS]
    if len(steps) != len(wanted) or not all(steps):
        raise ValueError(f"{len(steps)} steps with kernels, not {len(wanted)}")
    found = []
    for (case, name), step in zip(wanted, steps, strict=True):
        megabytes = case.numel * getattr(torch, case.dtype).itemsize / 1e6
        found.append(
            {
                "name": case.name,
                "shape": list(case.shape),
                "dtype": case.dtype,
                "step": name,
                "least": round(STEPS[name] * megabytes, 2),
                **summary(step),
            }
        )
    return found


def main(argv: Sequence[str]) -> int:
    parser = results.Parser(__doc__)
    bench.add_selection(parser)
    parser.add_argument(
        "--activation",
        choices=reference.ACTIVATIONS,
        default="identity",
        help="fused with the norm",
    )
    parser.add_argument("--log", type=Path, help="keep what Nsight Compute writes in this file")
    parser.add_argument("--launch", action="store_true", help="run the steps and nothing else")
    arguments = parser.parse_args(argv)
    cases = bench.chosen(parser, arguments)
    if not torch.cuda.is_available():
        parser.error("counters need a CUDA GPU")
    if arguments.launch:
        for case in cases:
            launch(case, arguments.activation)
            torch.cuda.empty_cache()
        return 0
    if not shutil.which("ncu"):
        parser.error("counters need Nsight Compute: ncu is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = arguments.log or Path(folder, "log.csv")
        profile = ["ncu", "--profile-from-start", "off", "--clock-control", "none"]
        profile += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        again = [sys.executable, str(Path(__file__).resolve()), *argv, "--launch"]
        subprocess.run(
            [*profile, "--metrics", ",".join(METRICS), *again], check=True, stdout=sys.stderr
        )
        content = results.machine("cuda") | {"rows": rows(cases, log.read_text().splitlines(True))}
    if arguments.output:
        results.write(arguments.output, content, arguments.folder)
    print(render_readme.counters(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
