"""Time the CUDA kernels against a copy and against stock: the kernel table.

    python tools/bench.py                       # every row of tests/shapes.py's KERNEL_CASES
    python tools/bench.py --only vae,rn2 --providers gn_override,stock_channels_last,compile

Each call (forward, or forward plus the backward to X, gamma, beta) is captured in a CUDA graph
and replayed with a cold L2 cache (triton.testing.do_bench); figures are medians in microseconds
of GPU time. `copy` is y.copy_(x) of the same tensor in the same run. The share of the copy rate
counts the least traffic there is, the same for every provider: X and Y once forward; X and Y,
then X, dY and dX once forward plus backward. Before it is timed, each case is checked against
fp64 with the test suite's bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(results.ROOT / "tests"))
import reference
from shapes import KERNEL_CASES, Case

import gn_override

Step = Callable[[], Any]
NormFunction = Callable[..., Tensor]


def _stock(X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
    with gn_override.disabled():
        return F.group_norm(X, G, gamma, beta)


def _provider(name: str) -> NormFunction:
    """The norm function of a provider."""
    if name == "gn_override":
        return F.group_norm
    if name.startswith("stock_"):
        return _stock
    if name == "compile":
        torch._dynamo.reset()
        return torch.compile(_stock, dynamic=False)
    raise ValueError(f"unknown provider {name!r}; one of {PROVIDERS}")


PROVIDERS = ("gn_override", "stock_channels_last", "stock_nchw", "compile")
DEFAULT_PROVIDERS = ("gn_override", "stock_channels_last", "stock_nchw")


def microseconds(step: Step, milliseconds: int) -> float:
    """Median GPU time of a step, captured in a CUDA graph, with a cold L2 cache."""
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
    return 1e3 * do_bench(graph.replay, warmup=10, rep=milliseconds, return_mode="median")


def _steps(
    norm: NormFunction, X: Tensor, G: int, gamma: Tensor, beta: Tensor, dY: Tensor
) -> tuple[Step, Step]:
    """What is timed: forward, and forward plus backward to X, gamma and beta."""

    def forward() -> Tensor:
        with torch.no_grad():
            return norm(X, G, gamma, beta)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm(X, G, gamma, beta), (X, gamma, beta), dY)

    return forward, forward_backward


def measure(case: Case, providers: list[str], milliseconds: int, check: bool) -> dict[str, Any]:
    """One row: microseconds of a copy, and of each provider forward and forward + backward."""
    dtype = getattr(torch, case.dtype)
    inputs = reference.make_inputs(case, "cuda", dtype)
    gamma, beta = inputs.gamma, inputs.beta
    assert gamma is not None and beta is not None
    Y = torch.empty_like(inputs.X)
    row: dict[str, Any] = {
        "name": case.name,
        "shape": list(case.shape),
        "groups": case.groups,
        "dtype": case.dtype,
        "MB": round(case.numel * dtype.itemsize / 1e6, 1),
        "copy": round(microseconds(lambda: Y.copy_(inputs.X), milliseconds), 2),
        "fwd": {},
        "fwd_bwd": {},
    }
    if check:
        with reference.expect_calls("cuda", True, True):
            ours = reference.native(inputs)
        try:
            reference.assert_parity(ours, inputs)
        except AssertionError as error:
            row["wrong"] = str(error)
        else:
            row["checked"] = True
        del ours
    for name in providers:
        norm = _provider(name)
        layout = "nchw" if name == "stock_nchw" else "channels_last"
        X = reference.lay_out(inputs.X, layout).requires_grad_()
        dY = reference.lay_out(inputs.dY, layout)
        weight, bias = gamma.clone().requires_grad_(), beta.clone().requires_grad_()

        forward, forward_backward = _steps(norm, X, case.groups, weight, bias, dY)
        row["fwd"][name] = round(microseconds(forward, milliseconds), 2)
        row["fwd_bwd"][name] = round(microseconds(forward_backward, milliseconds), 2)
        torch.cuda.empty_cache()
    return row


def table(rows: list[dict[str, Any]], providers: list[str]) -> str:
    """The rows as text: microseconds; of ours also the ratio to the copy."""
    titles = [f"{'case':<10}{'dtype':<10}{'copy':>8}"]
    for what in ("fwd", "fwd_bwd"):
        titles.append(f"{what:>9}{'x copy':>8}")
        titles += [f"{p.removeprefix('stock_')[:9]:>10}" for p in providers[1:]]
    lines = ["".join(titles)]
    for row in rows:
        line = f"{row['name']:<10}{row['dtype']:<10}{row['copy']:>8.1f}"
        for what in ("fwd", "fwd_bwd"):
            ours = row[what][providers[0]]
            line += f"{ours:>9.1f}{ours / row['copy']:>8.2f}"
            line += "".join(f"{row[what].get(p, float('nan')):>10.1f}" for p in providers[1:])
        lines.append(line + (f"  WRONG: {row['wrong']}" if "wrong" in row else ""))
    return "\n".join(lines)


def slower_than_stock(rows: list[dict[str, Any]]) -> list[str]:
    """Rows where a stock layout beats us, by name."""
    return [
        f"{row['name']} {row['dtype']} {what}: {row[what]['gn_override']} us, {name} {time} us"
        for row in rows
        for what in ("fwd", "fwd_bwd")
        for name, time in row[what].items()
        if name.startswith("stock_") and time < row[what]["gn_override"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated names of cases")
    parser.add_argument("--dtype", default="", help="only cases of this dtype")
    parser.add_argument(
        "--providers", default=",".join(DEFAULT_PROVIDERS), help="of " + ", ".join(PROVIDERS)
    )
    parser.add_argument("--milliseconds", type=int, default=60, help="of measuring a figure")
    parser.add_argument("--no-check", action="store_true", help="time without the fp64 check")
    parser.add_argument("--output", default="", help="name of the results file to write")
    parser.add_argument("--folder", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        parser.exit(1, "tools/bench.py needs a CUDA GPU and triton\n")

    names = [name for name in arguments.only.split(",") if name]
    unknown = set(names) - {case.name for case in KERNEL_CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    cases = [
        case
        for case in KERNEL_CASES
        if (not names or case.name in names) and arguments.dtype in ("", case.dtype)
    ]
    providers = arguments.providers.split(",")
    rows = []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.id}", file=sys.stderr, flush=True)
        rows.append(measure(case, providers, arguments.milliseconds, not arguments.no_check))
    if arguments.output:
        head = results.machine("cuda") | {"unit": "microseconds, median, cold L2, CUDA graph"}
        results.write(arguments.output, head | {"rows": rows}, arguments.folder)
    print(table(rows, providers))
    for line in slower_than_stock(rows):
        print("slower than stock:", line)


if __name__ == "__main__":
    main()
