"""Host time of one eager call of nn.GroupNorm on a tiny tensor, against stock.

    python tools/bench_host.py --output host-h200
    python tools/bench_host.py --device cpu     # tries the script: there a call computes too

Channels-last and NCHW input; forward without and with autograd, and forward plus autograd's
backward to X, gamma and beta. Of each
    stock   in a process that has not imported gn_override
    off     in one that has, switched off
    on      in that one, switched on

A figure is in microseconds a call: calls run back to back in batches, the device is synchronised
before and after a batch and only the calls are timed, and the median is taken over the batches.
All rows take turns, round by round, so that none is the first.
A batch is short enough for its launches to fit the device's queue, so that nothing waits. The two
processes take turns, batch by batch; a ratio to stock is the median over the rounds, so that a
change of the clock between rounds does not count.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import results
import torch
from torch import nn

SHAPE, GROUPS = (2, 32, 4, 4), 8
# Calls; some 12 launches each at most, while the queue holds 1024 and drains meanwhile.
BATCH, WARM_UP = 100, 20
LAYOUTS = {"channels_last": torch.channels_last, "nchw": torch.contiguous_format}
CALLS = ("forward, no grad", "forward, grad", "forward + backward")

VARIANTS = ("stock", "off", "on")

Call = Callable[[], Any]


def calls(layout: str, device: str) -> dict[str, Call]:
    """The calls of CALLS; the caller turns gradients off for the first."""
    norm = nn.GroupNorm(GROUPS, SHAPE[1], device=device)
    plain = torch.randn(SHAPE, device=device).to(memory_format=LAYOUTS[layout])
    X, dY = plain.clone().requires_grad_(), plain.clone()
    operands = X, norm.weight, norm.bias
    return {
        CALLS[0]: lambda: norm(plain),
        CALLS[1]: lambda: norm(X),
        CALLS[2]: lambda: torch.autograd.grad(norm(X), operands, dY),
    }


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_microseconds(call: Call, device: str) -> float:
    """Host time of a call, the mean of one batch."""
    for _ in range(WARM_UP):  # the other process has had the caches
        call()
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(BATCH):
        call()
    taken = time.perf_counter() - begin
    synchronise(device)
    return 1e6 * taken / BATCH


def switches(override: bool) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The variants that a process with or without the override can time."""
    if not override:
        return {"stock": nullcontext}
    import gn_override

    return {"off": gn_override.disabled, "on": gn_override.enabled}


def serve(connection: Connection, override: bool, device: str) -> None:
    """A process: times one batch for every (layout, call, variant) it gets, until None."""
    torch.set_num_threads(1)
    every = {layout: calls(layout, device) for layout in LAYOUTS}
    switch = switches(override)
    while wanted := connection.recv():
        layout, name, variant = wanted
        with switch[variant](), torch.set_grad_enabled(name != CALLS[0]):
            connection.send(host_microseconds(every[layout][name], device))


def figures(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Median of each variant, and of the ratios to stock of each round."""
    medians = {v: round(statistics.median(r[v] for r in rounds), 3) for v in VARIANTS}
    ratio = {
        v: round(statistics.median(r[v] / r["stock"] for r in rounds), 4) for v in VARIANTS[1:]
    }
    return medians | {"ratio": ratio}


def measure(device: str, seconds: float) -> list[dict[str, Any]]:
    """A row for each layout and call: {"layout", "call", variant: us, "ratio": of "off" and "on"}.

    seconds   of measuring a figure
    """
    context = multiprocessing.get_context("spawn")
    servers = {}
    for override in (False, True):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, override, device), daemon=True).start()
        theirs.close()  # so that recv() fails where the process has ended
        servers[override] = ours

    def microseconds(layout: str, name: str, variant: str) -> float:
        server = servers[variant != "stock"]
        server.send((layout, name, variant))
        return float(server.recv())

    rounds: dict[tuple[str, str], list[dict[str, float]]] = {
        (layout, name): [] for layout in LAYOUTS for name in CALLS
    }
    number = 0
    end = time.perf_counter() + seconds * len(VARIANTS) * len(rounds)
    while number < 2 or time.perf_counter() < end:
        for (layout, name), of_row in rounds.items():
            of_row.append({v: microseconds(layout, name, v) for v in VARIANTS})
        number += 1
    for server in servers.values():
        server.send(None)
    return [
        {"layout": layout, "call": name} | figures(of_row[1:])
        for (layout, name), of_row in rounds.items()
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text: microseconds, and ratio to stock."""
    lines = [f"{'layout':<15}{'us of host time a call':<24}{'stock':>9}{'off':>17}{'on':>17}"]
    for row in rows:
        line = f"{row['layout']:<15}{row['call']:<24}{row['stock']:>9.2f}"
        for name in VARIANTS[1:]:
            line += f"{row[name]:>9.2f}{row['ratio'][name]:>7.3f}x"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=2, help="of measuring a figure")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here (--device cpu tries the script)")
    rows = measure(arguments.device, arguments.seconds)
    if arguments.output:
        head = results.machine(arguments.device) | {
            "unit": "microseconds of host time a call, median over batches",
            "shape": SHAPE,
            "groups": GROUPS,
            "batch": BATCH,
        }
        results.write(arguments.output, head | {"rows": rows}, arguments.folder)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
