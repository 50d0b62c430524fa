"""Time the CUDA kernels against a copy, stock, torch.compile and peers: the kernel table.

    python tools/bench.py                       # every row of tests/shapes.py's KERNEL_CASES
    python tools/bench.py --only vae,rn2 --providers gn_override,stock_channels_last
    python tools/bench.py --activation silu     # ours alone, and with an activation
    python tools/bench.py --from benchmarks/results/kernels-h200.json --plot kernels.svg   # no GPU

Forward, and forward plus the backward to X, gamma and beta, timed as tools/timing.py says: CUDA
graph, cold L2 cache, median microseconds of GPU time. `copy` is y.copy_(x) of the same tensor in
the same run. Rates count the least traffic there is, the same for every provider
(tools/kernel_table.py). Peers (tools/peers.py) take part where they can be imported, and with
--pytorch the kernels of a checkout of PyTorch (tools/pytorch_kernels.py).

Before a case is timed, ours is checked against fp64 with the test suite's bound, the others
roughly against stock. In a row of the results file
    wrong     why ours failed that check
    differs   {provider: {direction: why}} of the others
    failed    {provider: {direction: why}} of the others that raised an error: no time, a dash
Rows where another one is faster are listed at the end.

With --activation a row has the times of our norm alone, of the same and PyTorch's activation behind
it, and of the norm fused with that, taken in turns. The first and the last are checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kernel_table
import peers
import pytorch_kernels
import render_readme
import results
import timing
import torch
import torch.nn.functional as F
from progress import Progress
from torch import Tensor

sys.path.insert(0, str(results.ROOT / "tests"))
import reference
from shapes import KERNEL_CASES, Case

import gn_override
from gn_override import _activations, _bench, _picture

# More elements are checked roughly: the fp64 reference takes some 80 bytes for each.
MOST_EXACT = 1 << 29

# With --activation: turns of each of fused_norms().
TURNS = 5


@dataclass(frozen=True)
class Provider:
    """Who computes, on operands of which layout, and whether the override is on."""

    norm: timing.Norm
    layout: str = "channels_last"
    on: bool = False


def _plain(X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.group_norm(X, G, gamma, beta)


OURS = {"gn_override": Provider(_plain, on=True)}
STOCK = {
    "stock_channels_last": Provider(_plain),
    "stock_nchw": Provider(_plain, layout="nchw"),
}
CHECKOUT = {kernel_table.CHECKOUT: Provider(pytorch_kernels.norm)}
NAMES = (*OURS, *STOCK, *CHECKOUT, "compile", *peers.PEERS)


def providers_here(
    names: Sequence[str], checkout: Path | None = None
) -> tuple[dict[str, Provider], dict[str, str]]:
    """Those of the names that can run here, in the order of NAMES; why an installed peer cannot."""
    found, unusable = peers.find()
    here = OURS | STOCK | {name: Provider(norm) for name, norm in found.items()}
    if checkout is not None and kernel_table.CHECKOUT in names:
        pytorch_kernels.build(checkout)
        here |= CHECKOUT
    if "compile" in names:
        here["compile"] = Provider(torch.compile(_plain, dynamic=False))
    return {name: here[name] for name in NAMES if name in names and name in here}, unusable


def check(case: Case, inputs: reference.Inputs, stock: reference.Results) -> str:
    """What is wrong with ours, or ""."""
    taken = not case.one_layout
    try:
        with gn_override.enabled(), reference.expect_calls(inputs.X.device.type, taken, taken):
            ours = reference.native(inputs)
        if case.numel <= MOST_EXACT:
            reference.assert_parity(ours, inputs, theirs=[stock])
            return ""
    except AssertionError as error:
        return str(error)
    gradients = ours.dX, ours.dgamma, ours.dbeta
    return timing.difference("fwd", (ours.Y,), stock) or timing.difference(
        "fwd_bwd", gradients, stock
    )


def head(case: Case) -> dict[str, Any]:
    """What every row says of its case."""
    return {
        "name": case.name,
        "shape": list(case.shape),
        "groups": case.groups,
        "dtype": case.dtype,
        "MB": round(case.numel * getattr(torch, case.dtype).itemsize / 1e6, 1),
    }


def measure(
    case: Case,
    providers: Mapping[str, Provider],
    milliseconds: int,
    checked: bool = True,
    device: str = "cuda",
) -> dict[str, Any]:
    """One row: microseconds of a copy, and of each provider forward and forward + backward."""
    inputs = reference.make_inputs(case, device, getattr(torch, case.dtype))
    Y = torch.empty_like(inputs.X)
    row = head(case) | {
        "copy": round(timing.microseconds(lambda: Y.copy_(inputs.X), milliseconds), 2),
        "fwd": {},
        "fwd_bwd": {},
    }
    stock = reference.stock(inputs) if checked else None
    if stock is not None:
        wrong = check(case, inputs, stock)
        row |= {"wrong": wrong} if wrong else {"checked": True}
        # What is timed first after a large check takes longer than it does later.
        timing.microseconds(lambda: Y.copy_(inputs.X), milliseconds)
    failed: dict[str, dict[str, str]] = {}
    differs: dict[str, dict[str, str]] = {}
    if "compile" in providers:
        torch._dynamo.reset()  # what it compiled for the row before
    for name, provider in providers.items():
        with gn_override._switched(provider.on):
            for what, step in timing.steps(provider.norm, inputs, provider.layout).items():
                try:
                    if stock is not None and name not in OURS:
                        found = timing.difference(what, step(), stock)
                        if found:
                            differs.setdefault(name, {})[what] = found
                    row[what][name] = round(timing.microseconds(step, milliseconds), 2)
                except Exception as error:  # whatever a package raises
                    if name in OURS:
                        raise
                    failed.setdefault(name, {})[what] = peers.reason(error)
    if failed:
        row["failed"] = failed
    if differs:
        row["differs"] = differs
    return row


def check_fused(
    case: Case, inputs: reference.Inputs, activation: str, steps: Mapping[str, timing.Step]
) -> str:
    """What is wrong with our steps with an activation ("identity": the norm alone), or "".

    Gradients are checked roughly: tests/test_activation.py has the bound.
    """
    none = (False, False, False)
    theirs = reference.stock_act(inputs, activation)
    ops = reference.ATEN if activation == "identity" else reference.FUSED
    device = inputs.X.device.type
    try:
        with reference.expect_calls(device, True, None, ops):
            (Y,) = steps["fwd"]()
        with reference.expect_calls(device, True, True, ops):
            found = steps["fwd_bwd"]()
        if case.numel <= MOST_EXACT:
            exact = reference.exact(inputs, none, activation)
            orders = partial(reference.stock_in_other_orders, inputs, none)
            reference.assert_close(
                Y,
                theirs.Y,
                exact.Y,
                activation,
                exact.scale["Y"],
                lambda: (reference.TORCHS[activation](other.Y) for other in orders()),
            )
    except AssertionError as error:
        return str(error)
    return _bench.difference("fwd", (Y,), (theirs.Y,)) or timing.difference(
        "fwd_bwd", found, theirs
    )


def fused_norms(activation: str) -> dict[str, timing.Norm]:
    """What a fused activation is compared with: our norm alone, PyTorch's activation behind it."""
    norm = gn_override.functional.group_norm
    alone = partial(norm, activation="identity")

    def followed(X: Tensor, G: int, gamma: Tensor, beta: Tensor) -> Tensor:
        return _activations.stock(alone(X, G, gamma, beta), activation)

    return {"alone": alone, "followed": followed, "fused": partial(norm, activation=activation)}


def measure_fused(
    case: Case, activation: str, milliseconds: int, checked: bool = True, device: str = "cuda"
) -> dict[str, Any]:
    """One row: microseconds of each of fused_norms(), forward and forward + backward."""
    inputs = reference.make_inputs(case, device, getattr(torch, case.dtype))
    row = head(case)
    steps = {
        name: timing.steps(norm, inputs, "channels_last")
        for name, norm in fused_norms(activation).items()
    }
    with gn_override.enabled():
        if checked:
            wrong = [
                check_fused(case, inputs, of, steps[name])
                for name, of in (("alone", "identity"), ("fused", activation))
            ]
            row |= {"wrong": "; ".join(filter(None, wrong))} if any(wrong) else {"checked": True}
        for what in _bench.RESULTS:
            samples: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(TURNS):
                for name, of_norm in steps.items():
                    samples[name].append(timing.microseconds(of_norm[what], milliseconds))
            row[what] = {name: round(statistics.median(of), 2) for name, of in samples.items()}
    return row


def run(
    cases: Sequence[Case], measure_case: Callable[[Case], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows; fewer if a provider breaks the GPU's context."""
    rows = []
    with Progress(len(cases)) as progress:
        for case in cases:
            progress.step(case.id)
            row = measure_case(case)
            rows.append(row)
            if timing.gpu_lost():
                print(
                    f"an error at {case.id} broke the GPU's context: {row.get('failed')}; "
                    "--providers leaves one out",
                    file=sys.stderr,
                )
                break
            torch.cuda.empty_cache()
    return rows


def add_selection(parser: argparse.ArgumentParser) -> None:
    """--only and --dtype."""
    dtypes = sorted({case.dtype for case in KERNEL_CASES})
    parser.add_argument("--only", default="", help="comma-separated names of cases")
    parser.add_argument("--dtype", choices=dtypes, help="only cases of this dtype")


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Case]:
    """The cases that --only and --dtype leave."""
    names = [name for name in arguments.only.split(",") if name]
    unknown = set(names) - {case.name for case in KERNEL_CASES}
    cases = [
        case
        for case in KERNEL_CASES
        if (not names or case.name in names) and arguments.dtype in (None, case.dtype)
    ]
    if unknown or not cases:
        named = ", ".join(sorted(unknown)) or f"{arguments.only} in {arguments.dtype}"
        parser.error(f"no such case: {named}")
    return cases


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the cases that --only and --dtype leave, and --providers as a list."""
    parser = results.Parser(__doc__, again=True)
    add_selection(parser)
    parser.add_argument(
        "--providers",
        default=",".join(NAMES),
        help="those that are there, of %(default)s (all by default)",
    )
    parser.add_argument(
        "--activation",
        choices=reference.ACTIVATIONS[1:],
        help="time our norm alone, followed by this and fused with it, and nothing else",
    )
    pytorch_kernels.add_argument(parser)
    parser.add_argument(
        "--milliseconds", type=results.count, default=60, help="of measuring a figure"
    )
    parser.add_argument("--no-check", action="store_true", help="time without checking results")
    for name, what in (("--plot", "speed-ups"), ("--roofline", "rates over traffic")):
        text = f"draw {what}: FILE.svg or FILE.png"
        parser.add_argument(name, type=_picture.path, metavar="FILE", help=text)
    arguments = parser.parse_args(argv)

    arguments.cases = chosen(parser, arguments)
    arguments.providers = arguments.providers.split(",")
    if set(arguments.providers) - set(NAMES) or "gn_override" not in arguments.providers:
        parser.error(f"--providers: gn_override, and any of {', '.join(NAMES[1:])}")
    if arguments.activation and (arguments.plot or arguments.roofline):
        parser.error("--activation: there is no picture of it")
    if arguments.source is None and not (
        torch.cuda.is_available() and importlib.util.find_spec("triton")
    ):
        parser.error("measuring needs a CUDA GPU and triton (--from FILE.json does not)")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if arguments.source:
        content = arguments.content
    else:
        content = results.machine("cuda") | {"unit": "microseconds, median, cold L2, CUDA graph"}
        how = {"milliseconds": arguments.milliseconds, "checked": not arguments.no_check}
        if arguments.activation:
            content["activation"] = arguments.activation
            one = partial(measure_fused, activation=arguments.activation, **how)
        else:
            providers, unusable = providers_here(arguments.providers, arguments.pytorch)
            if kernel_table.CHECKOUT in providers:
                content["pytorch"] = pytorch_kernels.source(arguments.pytorch)
            if unusable:
                content["peers that cannot be imported"] = unusable
                print("peers that cannot be imported:", unusable, file=sys.stderr)
            one = partial(measure, providers=providers, **how)
        content["rows"] = run(arguments.cases, one)
        if not arguments.activation:
            content["rows"] = [row | kernel_table.rates(row) for row in content["rows"]]
        if arguments.output:
            results.write(arguments.output, content, arguments.folder)
    rows = content["rows"]
    if "activation" in content:
        print(render_readme.fused(content))
    else:
        print(kernel_table.table(rows))
        for line in kernel_table.losses(rows):
            print("slower:", line)
    if arguments.plot or arguments.roofline:
        kernel_table.pictures(content, arguments.plot, arguments.roofline)
    return int(any("wrong" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
