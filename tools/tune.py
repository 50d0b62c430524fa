"""Sweep the parameters of the CUDA schemes: the evidence behind native/plan/policy_cuda.cpp.

    python tools/tune.py --only rn2,sd15 --direction fwd

For each case every combination of slice width, cluster size and threads that fits is timed
(tools/timing.py's way), and of slice width and samples of a wave in the cooperative scheme, and the
two-pass scheme. Prints, a case and direction, the policy's
own choice, the best, and the runners-up, as x copy, so that a policy row for another GPU can be
read off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import results
import timing
import torch

sys.path.insert(0, str(results.ROOT / "tests"))
import reference
from shapes import KERNEL_CASES, Case

import gn_override  # noqa: F401  (loads the library)

COLUMNS = (0, 4, 5, 8, 10, 16, 20, 32, 64)
CLUSTERS = (1, 2, 4, 8, 16)
THREADS = (256, 512)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128)
PINS = (
    ("", 0, 0, 0),
    ("two_pass", 0, 0, 0),
    *(("resident", *pins) for pins in itertools.product(COLUMNS, CLUSTERS, THREADS)),
    *(("cooperative", *pins, 0) for pins in itertools.product(COLUMNS, SAMPLES)),
)


def plan_of(case: Case, backward: bool) -> tuple[str, str]:
    """(rule, plan) that the policy gives with the present pins."""
    told = json.loads(
        torch.ops.gn_override.explain_shape(
            "cuda", backward, case.N, case.C, case.HxW, case.G, case.dtype, case.dtype, True, 16
        )
    )
    return told["rule"], told["plan"]


def sweep(case: Case, backward: bool, milliseconds: int) -> dict[str, Any]:
    """All plans of a case and direction: {"policy": plan, "copy": us, "plans": {plan: us}}."""
    inputs = reference.make_inputs(case, "cuda", getattr(torch, case.dtype))
    Y, mean, rstd = torch.ops.aten.native_group_norm(
        inputs.X, inputs.gamma, inputs.beta, *inputs.sizes, inputs.eps
    )

    def forward() -> Any:
        return torch.ops.aten.native_group_norm(
            inputs.X, inputs.gamma, inputs.beta, *inputs.sizes, inputs.eps
        )

    def gradients() -> Any:
        return torch.ops.aten.native_group_norm_backward(
            inputs.dY, inputs.X, mean, rstd, inputs.gamma, *inputs.sizes, [True, True, True]
        )

    step = gradients if backward else forward
    pin = torch.ops.gn_override.pin_plans
    pin(*PINS[0])
    found: dict[str, Any] = {
        "name": case.name,
        "dtype": case.dtype,
        "direction": "bwd" if backward else "fwd",
        "policy": plan_of(case, backward)[1],
        "copy": round(timing.microseconds(lambda: Y.copy_(inputs.X), milliseconds), 2),
        "plans": {},
    }
    try:
        for pins in PINS:
            pin(*pins)
            rule, plan = plan_of(case, backward)
            if plan not in found["plans"] and pins[0] in ("", rule):
                found["plans"][plan] = round(timing.microseconds(step, milliseconds), 2)
    finally:
        pin(*PINS[0])
    return found


def describe(found: dict[str, Any], most: int) -> str:
    """The best plans of a sweep, and the policy's."""
    ranked = sorted(found["plans"].items(), key=lambda item: item[1])
    head = f"{found['name']} {found['dtype']} {found['direction']}: copy {found['copy']} us"
    lines = [head]
    for rank, (plan, time) in enumerate(ranked, 1):
        if rank <= most or plan == found["policy"]:
            mark = "policy" if plan == found["policy"] else ""
            lines.append(
                f"  {rank:>3} {time:>9.2f} us {time / found['copy']:>6.2f} x  {mark:<7}{plan}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated names of cases")
    parser.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    parser.add_argument("--milliseconds", type=int, default=10, help="of measuring a plan")
    parser.add_argument("--best", type=int, default=3, help="plans to print a case")
    parser.add_argument("--output", default="", help="name of the results file to write")
    parser.add_argument("--folder", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "tools/tune.py needs a CUDA GPU\n")
    names = arguments.only.split(",") if arguments.only else []
    rows = []
    for case in KERNEL_CASES:
        if names and case.name not in names:
            continue
        for backward in (False, True):
            if arguments.direction in ("both", "bwd" if backward else "fwd"):
                print(f"{case.id} {'bwd' if backward else 'fwd'}", file=sys.stderr, flush=True)
                rows.append(sweep(case, backward, arguments.milliseconds))
                print(describe(rows[-1], arguments.best), flush=True)
    if arguments.output:
        head = results.machine("cuda") | {"unit": "microseconds, median, cold L2, CUDA graph"}
        results.write(arguments.output, head | {"rows": rows}, arguments.folder)


if __name__ == "__main__":
    main()
