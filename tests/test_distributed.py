"""Training of a network with GroupNorm in several processes equals training in one.

On the CPU by gloo; on two GPUs by NCCL, also under FSDP2 and with DTensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from bench_ddp import finish
from reference import BACKWARD, FORWARD, calls, override_off
from torch import Tensor, nn

import gn_override  # noqa: F401  (loads the extension and switches on)

RANKS = 2
STEPS = 5

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without it")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
on_each_device = pytest.mark.parametrize(
    "where", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, two_gpus])]
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.GroupNorm(8, 24),
        nn.SiLU(),
        nn.Conv2d(24, 5, 1),
    ).to(memory_format=torch.channels_last)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(8, 3, 12, 10, generator=generator)
    target = torch.randn(8, 5, 12, 10, generator=generator)
    return tuple(t.to(memory_format=torch.channels_last) for t in (image, target))


def train(net: nn.Module, image: Tensor, target: Tensor) -> Tensor:
    """Steps of SGD; the losses, float32 as they are computed."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(net(image), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def data_parallel(net: nn.Module, device: torch.device) -> nn.Module:
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(net, device_ids=ids)


def fully_sharded(net: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (RANKS,))  # else of GPUs, where there are any
    net.to(memory_format=torch.contiguous_format)  # FSDP2 takes no other; images keep theirs
    for module in net:
        if list(module.parameters()):
            fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


WRAPPERS: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp2": fully_sharded,
}


def start(rank: int, where: str, rendezvous: str) -> torch.device:
    torch.set_num_threads(1)
    device = torch.device(where, rank) if where == "cuda" else torch.device("cpu")
    if where == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.cuda.set_device(device)
    backend = "nccl" if where == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{rendezvous}", rank=rank, world_size=RANKS)
    assert not torch.ops.gn_override.may_take_whole_chip()
    return device


def train_rank(rank: int, where: str, wrapper: str, folder: str) -> None:
    """One process: its half of the batch. Writes losses and, of all ranks, the parameters."""
    device = start(rank, where, f"{folder}/rendezvous")
    net = WRAPPERS[wrapper](network().to(device), device)
    image, target = (t.chunk(RANKS)[rank].to(device) for t in batch())
    losses = train(net, image, target)
    assert calls(FORWARD, where) == calls(BACKWARD, where) == (2 * STEPS, 0)
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    torch.save((losses, [p.detach().cpu() for p in parameters]), f"{folder}/{rank}")
    finish()


def spawn(worker: Callable[..., None], *arguments: object) -> None:
    # The children find tests/ and the package where this process found them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        ranks = mp.spawn(worker, arguments, nprocs=RANKS, join=False)
    # join() returns when one of them ends, and says whether all have.
    if not any(ranks.join(timeout=300) for _ in range(RANKS)):
        for process in ranks.processes:
            process.kill()
        pytest.fail("a process hangs")


@on_each_device
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_in_two_processes(where, wrapper, tmp_path):
    """Losses and parameters are those of one process with the whole batch, on and off."""
    net = network().to(where)
    whole = train(net, *(t.to(where) for t in batch()))
    off = network().to(where)
    with override_off():
        stock = train(off, *(t.to(where) for t in batch()))
    torch.testing.assert_close(whole, stock, rtol=1e-6, atol=0)
    spawn(train_rank, where, wrapper, str(tmp_path))
    halves = [torch.load(tmp_path / str(rank)) for rank in range(RANKS)]
    for parameters in (halves[0][1], halves[1][1]):
        for mine, theirs in zip(parameters, net.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach().cpu(), rtol=1e-4, atol=1e-5)
    mean = sum(losses for losses, _ in halves) / RANKS
    torch.testing.assert_close(mean, whole, rtol=1e-5, atol=0)
    assert whole[-1] < whole[0]


def test_whole_chip(monkeypatch):
    """Launches that fill a GPU are for processes without peers, whose kernels could wait for it."""
    ask = torch.ops.gn_override.may_take_whole_chip
    monkeypatch.delenv("GN_OVERRIDE_WHOLE_CHIP", raising=False)
    assert ask()
    with monkeypatch.context() as peers:
        peers.setattr(dist, "is_initialized", lambda: True)
        for size in (1, 2):
            peers.setattr(dist, "get_world_size", lambda size=size: size)
            assert ask() == (size == 1)
    assert ask()
    monkeypatch.setenv("GN_OVERRIDE_WHOLE_CHIP", "0")
    assert not ask()


def shard_rank(rank: int, where: str, folder: str) -> None:
    """A batch that is sharded over a mesh, through nn.GroupNorm as DTensors, on and off."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    device = start(rank, where, f"{folder}/rendezvous")
    mesh = init_device_mesh(where, (RANKS,))
    norm = nn.GroupNorm(3, 3).to(device)
    image = batch()[0].to(device)
    want = norm(image).detach()
    norm = distribute_module(norm, mesh)
    # distribute_tensor would make the samples NCHW.
    X = DTensor.from_local(image.chunk(RANKS)[rank], mesh, [Shard(0)])

    def outcome() -> Tensor | str:
        try:
            return norm(X).full_tensor().detach()
        except (NotImplementedError, RuntimeError) as error:
            return type(error).__name__

    torch.ops.gn_override.reset_counters()
    ours, ran = outcome(), calls(FORWARD, where)
    with override_off():
        theirs = outcome()
    if isinstance(theirs, str):
        assert ours == theirs
        (Path(folder) / "refused").write_text(theirs)
    else:
        torch.testing.assert_close(ours, want, rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs)
        assert ran == (1, 0)
    finish()


@on_each_device
def test_batch_sharded_tensor(where, tmp_path):
    spawn(shard_rank, where, str(tmp_path))
    if (tmp_path / "refused").exists():
        pytest.xfail(f"stock cannot do it either: {(tmp_path / 'refused').read_text()}")
