"""Load and faults: threads that flip the switch, workers of a DataLoader, memory that runs out,
long runs. What streams, graphs and other devices do to a single call is in test_cuda.py.

The soak goes on for GN_OVERRIDE_TEST_SOAK_SECONDS (3) and until it has made
GN_OVERRIDE_TEST_SOAK_CALLS norm calls (100); it fails if it has not after
GN_OVERRIDE_TEST_SOAK_LIMIT seconds (60).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import (
    ATEN,
    BACKWARD,
    FORWARD,
    RESULTS,
    TORCH,
    Inputs,
    Results,
    assert_parity,
    calls,
    composite,
    is_channels_last,
    lay_out,
    make_inputs,
    native,
    override_off,
)
from shapes import EDGE_CASES, Case
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gn_override

aten = torch.ops.aten
SOAK_SECONDS = float(os.environ.get("GN_OVERRIDE_TEST_SOAK_SECONDS", "3"))
SOAK_CALLS = int(os.environ.get("GN_OVERRIDE_TEST_SOAK_CALLS", "100"))
SOAK_LIMIT = float(os.environ.get("GN_OVERRIDE_TEST_SOAK_LIMIT", "60"))
COMPOSITE = ("Y", "dX", "dgamma", "dbeta")


def edge(name: str) -> Case:
    return next(case for case in EDGE_CASES if case.name == name)


def equal(a: Results, b: Results, names: Sequence[str] = COMPOSITE) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


# --- threads ---------------------------------------------------------------------------------


def test_training_while_the_switch_is_flipped(device):
    """Forward and backward of many threads, on streams of their own: each result is one that the
    call can give, bit for bit. Forward and backward may be of different sides, and a flip within
    one of them may leave stock with an NCHW copy (2.11 to 2.13).
    """
    inputs = [make_inputs(edge(name), device, torch.float32) for name in ("c60", "d3", "n_odd")]

    def sides(i: Inputs) -> list[Results]:
        nchw = Inputs(i.X.contiguous(), i.gamma, i.beta, i.dY.contiguous(), i.groups)
        kinds = [(i, True), (nchw, False)]
        if device == "cpu" or TORCH >= (2, 14):  # before, stock's CUDA kernels never saw the other
            kinds.append((i, False))
        found = []
        for forward, backward in itertools.product(kinds, repeat=2):
            results = []
            for (operands, on), op in ((forward, FORWARD), (backward, BACKWARD)):
                o = operands
                with gn_override.enabled() if on else override_off():
                    if op == FORWARD:
                        results += aten.native_group_norm(o.X, o.gamma, o.beta, *o.sizes, o.eps)
                    else:
                        results += aten.native_group_norm_backward(
                            o.dY, o.X, *results[1:], o.gamma, *o.sizes, [True] * 3
                        )
            found.append(Results(*results))
        return found

    def stream() -> contextlib.AbstractContextManager[object]:
        if device == "cuda":
            return torch.cuda.stream(torch.cuda.Stream())
        return contextlib.nullcontext()

    possible = [sides(i) for i in inputs]
    stop = threading.Event()
    failures: list[str] = []
    done = [0] * 6

    def work(index: int) -> None:
        try:
            with stream():
                while not stop.is_set():
                    ours = composite(inputs[index % 3])
                    if not any(equal(ours, side) for side in possible[index % 3]):
                        failures.append(f"a result of input {index % 3} that neither side gives")
                        return
                    done[index] += 1
        except Exception as error:
            failures.append(repr(error))

    if device == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(done))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    flips = 0
    while (min(done) < 5 or flips < 200) and not failures and time.monotonic() < end:
        gn_override.disable()
        gn_override.enable()
        flips += 1
        time.sleep(1e-4)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert min(done) >= 5 and flips >= 200


# --- processes -------------------------------------------------------------------------------


class Normed(Dataset):
    """Items that are normalised in the worker."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import gn_override  # noqa: F401  (a worker that is spawned starts without)

        X = lay_out(self.images[index : index + 1], "channels_last")
        torch.ops.gn_override.reset_counters()
        Y = F.group_norm(X, 8)[0]
        return Y.contiguous(), calls(FORWARD, "cpu")[0]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader(how):
    """After the parent has used its thread pool, too."""
    images = torch.randn(6, 32, 9, 7)
    want = F.group_norm(lay_out(images, "channels_last"), 8)
    loader = DataLoader(
        Normed(images), batch_size=2, num_workers=2, multiprocessing_context=how, timeout=120
    )
    batches = list(loader)
    torch.testing.assert_close(torch.cat([Y for Y, _ in batches]), want)
    assert torch.cat([ours for _, ours in batches]).eq(1).all()


# --- memory ----------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# Bytes by which memory() may grow. What tensors hold is counted exactly. Autograd's thread may free
# a tensor late, which takes a segment (20 MiB) more of the caching allocator; a process has pages
# that its allocator keeps.
SLACK = {"allocated": 0, "reserved": 20 << 20, "device": 20 << 20, "resident": 8 << 20}


def memory(device: str) -> dict[str, int]:
    """What is in use after all work is done, in bytes."""
    gc.collect()
    if device == "cpu":
        return {"resident": resident_bytes()}
    torch.cuda.synchronize()
    used = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else other processes use the device too
        free, total = torch.cuda.mem_get_info()
        used["device"] = total - free
    return used


def test_soak(device, record_property):
    """Training steps over shapes and dtypes in turn, and replays of a graph of norm calls: right at
    the end, memory flat. A CPU, which has no graphs, makes the graph's calls instead.
    """
    names = ("c60", "d10", "volume", "n_odd", "c1", "hw1")
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    inputs = [make_inputs(edge(name), device, dtype) for name in names for dtype in dtypes]
    ours = [i for i in inputs if is_channels_last(i.X)]
    # Of a round: so many calls, about 5 us each, that the GPU is busy while the host makes steps.
    repeats, rounds = (40, 100) if device == "cuda" else (1, 1)
    results: list[Results] = []

    def make_calls() -> None:
        for _ in range(repeats):
            results[:] = [native(i) for i in ours]

    def counted() -> int:
        """Calls that our kernels took, as the override counts them; it sees no replay."""
        return sum(calls(op, device)[0] for op in ATEN)

    steps = [composite(i) for i in inputs]
    make_calls()
    replay, in_graph = make_calls, 0
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        before = counted()
        with torch.cuda.graph(graph):
            make_calls()
        in_graph = counted() - before
        assert in_graph == repeats * len(ours) * len(ATEN)
        replay = graph.replay
    replay()
    replayed = [Results(*(getattr(r, name).clone() for name in RESULTS)) for r in results]

    def go_on(seconds: float, number: int) -> tuple[int, list[dict[str, int]]]:
        """Norm calls made, and memory() all along."""
        begin, before, replays = time.monotonic(), counted(), 0
        made, samples = 0, []
        while (past := time.monotonic() - begin) < seconds or (made < number and past < SOAK_LIMIT):
            for _ in range(rounds):
                replay()
                for i in inputs:
                    composite(i)
            replays += rounds
            made = counted() - before + replays * in_graph
            samples.append(memory(device))
        return made, samples

    go_on(SOAK_SECONDS / 3, 1)
    made, samples = go_on(SOAK_SECONDS, SOAK_CALLS)
    record_property("norm_calls", made)
    for what, first in samples[0].items():
        grown = max(sample[what] for sample in samples) - first
        assert grown <= SLACK[what], f"{what}: {grown} bytes more"
    for result in results:
        for name in RESULTS:
            getattr(result, name).fill_(math.nan)
    replay()
    assert all(equal(*pair, RESULTS) for pair in zip(results, replayed, strict=True))
    assert all(equal(composite(i), first) for i, first in zip(inputs, steps, strict=True))
    assert made >= SOAK_CALLS, f"{made:,} of {SOAK_CALLS:,} norm calls in {SOAK_LIMIT:.0f} s"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The limit of the caching allocator, lifted afterwards."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def allow(more_bytes: int) -> None:
    """Let the caching allocator take so much more than it holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total)


@pytest.mark.cuda
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_out_of_memory(little_memory, direction, share):
    """No room, or room for half of the result: torch's error, nothing leaks, the next is right."""
    inputs = make_inputs(Case("oom", (4, 64, 512, 512), 32), "cuda", torch.float32)
    want = composite(inputs)
    X, gamma, beta = (t.clone().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta))
    Y = F.group_norm(X, inputs.groups, gamma, beta) if direction == "backward" else None
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        allow(int(share * inputs.X.nbytes))
        with pytest.raises(torch.OutOfMemoryError):
            if Y is None:
                F.group_norm(X, inputs.groups, gamma, beta)
            else:
                torch.autograd.grad(Y, (X, gamma, beta), inputs.dY, retain_graph=True)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == held
    torch.cuda.set_per_process_memory_fraction(1.0)
    if Y is not None:
        Y.backward(inputs.dY)
        assert equal(Results(Y.detach(), None, None, X.grad, gamma.grad, beta.grad), want)
    assert equal(composite(inputs), want)


@pytest.mark.cuda
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_out_of_memory_in_the_middle(little_memory, direction):
    """Room for the results alone, not for the workspace or for a copy of a strided operand."""
    inputs = make_inputs(Case("oom", (4, 64, 512, 512), 32), "cuda", torch.float32)
    inputs.dY = lay_out(inputs.dY, "nchw")
    X = lay_out(inputs.X, "sliced") if direction == "forward" else inputs.X
    sizes = inputs.sizes
    want = native(inputs)
    mean, rstd = want.mean, want.rstd
    held = torch.cuda.memory_allocated()
    allow(inputs.X.nbytes + (4 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        if direction == "forward":
            aten.native_group_norm(X, None, None, *sizes, 1e-5)
        else:
            aten.native_group_norm_backward(
                inputs.dY, X, mean, rstd, inputs.gamma, *sizes, [True] * 3
            )
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    torch.cuda.set_per_process_memory_fraction(1.0)
    again = native(inputs)
    assert all(torch.equal(getattr(again, name), getattr(want, name)) for name in RESULTS)


# --- graphs ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["tiles_map", "tiles_deep", "n512"])
def test_ten_thousand_replays(name):
    """A graph of forward and backward: the last replay has the first one's bits, memory is flat."""
    inputs = make_inputs(edge(name), "cuda", torch.bfloat16)
    want = native(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = native(inputs)
    graph.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10_000):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    for result in RESULTS:
        assert torch.equal(getattr(captured, result), getattr(want, result)), result


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.cuda
def test_more_than_2_32_elements():
    """Offsets past 32 unsigned bits, forward and backward; slices against fp64."""
    N, C, H, W = 3, 128, 4096, 2736
    need = 10 * N * C * H * W
    free, _ = torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"needs {need >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    X, dY = (
        torch.randn(N, H, W, C, dtype=torch.bfloat16, device="cuda").movedim(-1, 1)
        for _ in range(2)
    )
    assert X.numel() > 1 << 32
    X[:, :, -64:] += 3
    whole = Inputs(X, None, None, dY, 32)
    ours = native(whole)
    for n, g in ((0, 0), (N - 1, 31)):
        channels = slice(4 * g, 4 * g + 4)
        part = Inputs(
            X[n : n + 1, channels].contiguous(), None, None, dY[n : n + 1, channels].contiguous(), 1
        )
        mine = Results(
            ours.Y[n : n + 1, channels],
            ours.mean[n : n + 1, g : g + 1],
            ours.rstd[n : n + 1, g : g + 1],
            ours.dX[n : n + 1, channels],
        )
        assert_parity(mine, part, (True, False, False), only=("Y", "mean", "rstd", "dX"))


def test_errors_leave_the_switch_and_the_next_call_alone(device):
    """A call that raises between two that do not: same bits before and after."""
    inputs = make_inputs(edge("d10"), device, torch.float32)
    want = composite(inputs)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            F.group_norm(inputs.X, inputs.groups, inputs.gamma[:-1], inputs.beta)
        assert gn_override.is_enabled()
        assert equal(composite(inputs), want)
    with override_off(), pytest.raises(RuntimeError):
        F.group_norm(inputs.X, 7, inputs.gamma, inputs.beta)
    assert gn_override.is_enabled()


def test_a_module_is_shared_by_threads(device):
    """One nn.GroupNorm in many threads, as nn.DataParallel has it: gradients add up."""
    norm = nn.GroupNorm(4, 16).to(device)
    X = lay_out(torch.randn(4, 16, 6, 5, device=device), "channels_last")
    norm(X).sum().backward()
    alone = norm.weight.grad.clone()
    norm.zero_grad()
    threads = [threading.Thread(target=lambda: norm(X).sum().backward()) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(norm.weight.grad, 8 * alone)
