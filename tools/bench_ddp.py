"""A training step beside collectives: DistributedDataParallel against the same step alone.

    pip install timm
    python tools/bench_ddp.py --output ddp-h200   # with several GPUs; a minute or two
    python tools/bench_ddp.py --device cpu --batch 2 --steps 2   # tries the script

A backward pass under DistributedDataParallel runs beside the all-reduce of gradients that are done,
and in a group of several processes no plan takes the whole GPU (gn_override/_whole_chip.py): this
shows what a training step costs there.

A process for each GPU, two on the CPU, trains on a batch of its own, in bfloat16 and channels_last:
timm's resnet50_gn with the override off and on, and resnet50, whose BatchNorm the override does not
touch. Before that, gradients are compared with the mean of what the processes find by themselves:
all together, in relative l2 norm, they may differ by 2%, some units in the last place of bfloat16.

Figures are milliseconds of the slowest process: of a step, the median over the rounds, in which
"alone" and "together" take turns; of the host, to issue a step together with others, which a step
waits for where it is longer than the GPU takes; and of the kernels of all-reduce in a step, which
is more than the transfer where processes wait for each other.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from bench_host import synchronise
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gn_override
from gn_override._bench import relative_error

# What is trained, and whether the override is on.
VARIANTS = {
    "resnet50_gn, off": ("resnet50_gn", False),
    "resnet50_gn, on": ("resnet50_gn", True),
    "resnet50 (BatchNorm)": ("resnet50", False),
}
WAYS = ("alone", "together")
WARM_UP, ROUNDS = 5, 5
IMAGE = {"cuda": 224, "cpu": 32}
MOST_DIFFERENCE = 0.02

Step = Callable[[], Tensor]


def network(name: str, device: torch.device) -> nn.Module:
    import timm

    torch.manual_seed(0)
    net = timm.create_model(name, pretrained=False)
    return net.to(device, dtype=torch.bfloat16, memory_format=torch.channels_last)


def batch_of(rank: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    side = IMAGE[device.type]
    images = torch.randn(size, 3, side, side, generator=generator).to(device, torch.bfloat16)
    classes = torch.randint(1000, (size,), generator=generator).to(device)
    return images.to(memory_format=torch.channels_last), classes


def loss_of(net: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(net(images).float(), classes)


def training(net: nn.Module, images: Tensor, classes: Tensor) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(net, images, classes)
        loss.backward()
        optimizer.step()
        return loss

    return step


def gradients(net: nn.Module, images: Tensor, classes: Tensor) -> list[Tensor]:
    loss_of(net, images, classes).backward()
    return [p.grad.float() for p in net.parameters() if p.grad is not None]


def error_of_all(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all gradients together: some are 0, since timm starts each block's last gamma at 0."""
    one, two = (torch.cat([g.flatten() for g in gradients]) for gradients in (found, expected))
    return relative_error(one, two)


def milliseconds(step: Step, steps: int, device: torch.device) -> tuple[float, float]:
    """Of a step, and of the host to issue it, while all processes do the same."""
    dist.barrier()
    synchronise(device.type)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter()
    synchronise(device.type)
    done = time.perf_counter()
    return 1e3 * (done - begin) / steps, 1e3 * (issued - begin) / steps


def all_reduce_milliseconds(step: Step, device: torch.device) -> float | None:
    """Of its kernels in a step; None where there are none to see."""
    if device.type == "cpu":
        return None
    steps = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        synchronise(device.type)
    taken = sum(e.time_range.elapsed_us() for e in profile.events() if "nccl" in e.name.lower())
    return float(taken) / 1e3 / steps


def measure(rank: int, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one process finds of a variant. Raises RuntimeError if gradients are wrong."""
    name, on = VARIANTS[variant]
    (gn_override.enable if on else gn_override.disable)()
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    ids = [rank] if options.device == "cuda" else None
    batch = batch_of(rank, options.batch, device)

    single = network(name, device)
    parallel = DistributedDataParallel(network(name, device), device_ids=ids)
    expected = gradients(single, *batch)
    for gradient in expected:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    found = gradients(parallel, *batch)
    error = error_of_all(found, expected)
    if not error <= MOST_DIFFERENCE:
        raise RuntimeError(f"{variant}: gradients differ by {error:.1e}")

    steps = {"alone": training(single, *batch), "together": training(parallel, *batch)}
    for step in steps.values():
        milliseconds(step, WARM_UP, device)
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, step in steps.items():
            rounds[way].append(milliseconds(step, options.steps, device))
    figures: dict[str, Any] = {
        way: statistics.median(step for step, _ in rounds[way]) for way in WAYS
    }
    figures["host"] = statistics.median(host for _, host in rounds["together"])
    return figures | {"all-reduce": all_reduce_milliseconds(steps["together"], device)}


def work(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    """A process: all variants. The first writes what the slowest took."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, f"file://{rendezvous}", rank=rank, world_size=options.processes
    )
    rows = []
    for variant in VARIANTS:
        mine = measure(rank, variant, options)
        every: list[dict[str, Any]] = [{} for _ in range(options.processes)]
        dist.all_gather_object(every, mine)
        rows.append({"name": variant} | slowest(every))
        if rank == 0:
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if rank == 0:
        torch.save(rows, f"{rendezvous}.rows")
    finish()


def finish() -> None:
    """Ends the process, and not as the interpreter does.

    Gloo's threads outlive the group of DistributedDataParallel and may still have tensors of
    Python; letting go of them then aborts the process at times:
    https://github.com/pytorch/pytorch/issues/65231.
    """
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def slowest(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest of each figure, and how much longer a step takes together with others."""
    largest = {
        key: None if every[0][key] is None else round(max(one[key] for one in every), 2)
        for key in every[0]
    }
    return largest | {"ratio": round(largest["together"] / largest["alone"], 3)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'milliseconds a step':<24}{'alone':>9}{'DDP':>9}{'host':>9}{'all-reduce':>12}"]
    for row in rows:
        line = f"{row['name']:<24}{row['alone']:>9.2f}{row['together']:>9.2f}{row['host']:>9.2f}"
        reduce = row["all-reduce"]
        lines.append(line + (f"{'-':>12}" if reduce is None else f"{reduce:>12.2f}"))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--batch", type=results.count, default=192, help="of a process (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=results.count, default=10, help="of a round (default %(default)s)"
    )
    options = parser.parse_args(argv)
    options.processes = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.processes < 2:
        parser.error("it needs two GPUs (--device cpu tries the script)")
    if importlib.util.find_spec("timm") is None:
        parser.error("it needs timm")
    print(table([]))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/rendezvous", options), nprocs=options.processes)
        rows = torch.load(f"{folder}/rendezvous.rows")
    if options.output:
        head = results.machine(options.device) | {
            "unit": "milliseconds of the slowest process, median over rounds",
            "processes": options.processes,
            "batch": options.batch,
        }
        results.write(options.output, head | {"rows": rows}, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
