"""What only a GPU can show: graphs, streams, devices, stale memory, more than 2^31 elements."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import (
    BACKWARD,
    FORWARD,
    RESULTS,
    Inputs,
    Results,
    assert_close,
    assert_layout_follows,
    assert_parity,
    calls,
    exact,
    expect_calls,
    make_inputs,
    native,
    stock,
)
from shapes import EDGE_CASES, LARGE_CASES, Case
from torch import Tensor, nn

import gn_override

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poison")]

# One of each geometry: one split, many splits, many column tiles, scalar vectors, many samples.
CASES = [
    case
    for case in EDGE_CASES
    if case.name in {"tiles", "tiles_map", "tiles_deep", "c9", "n512", "volume", "ncl"}
] + [
    Case("vae", (1, 128, 256, 256), 32),
    Case("wide", (1, 4104, 9, 9), 8),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)


def assert_equal(a: Results, b: Results) -> None:
    for name in RESULTS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def copy_into(target: Inputs, source: Inputs) -> None:
    for name in ("X", "gamma", "beta", "dY"):
        getattr(target, name).copy_(getattr(source, name))


# --- CUDA graphs -----------------------------------------------------------------------------


def capture(inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Results]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        native(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = native(inputs)
    return graph, results


@cases
@dtypes
def test_graph_replay(case, dtype):
    """Replays repeat bit for bit, on new inputs too: nothing is left over from the last one."""
    inputs = make_inputs(case, "cuda", dtype)
    graph, results = capture(inputs)
    for _ in range(3):
        new = make_inputs(case, "cuda", dtype)
        copy_into(inputs, new)
        for _ in range(2):
            # Whatever the graph does not write would show.
            for name in RESULTS:
                getattr(results, name).fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert_equal(results, native(new))
        assert_parity(results, new)


def test_graph_of_a_training_step():
    """nn.GroupNorm under torch.cuda.graph, with autograd inside the capture."""
    norm = nn.GroupNorm(32, 320).cuda()
    X = torch.randn(2, 320, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    X.requires_grad_()
    dY = torch.randn_like(X)

    def step() -> Tensor:
        X.grad = None
        norm.zero_grad(set_to_none=True)
        Y = norm(X)
        Y.backward(dY)
        return Y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.ops.gn_override.reset_counters()
    with torch.cuda.graph(graph):
        Y = step()
    assert calls(FORWARD, "cuda") == calls(BACKWARD, "cuda") == (1, 0)
    for _ in range(2):
        with torch.no_grad():
            X.normal_()
            dY.normal_()
        graph.replay()
        inputs = Inputs(X.detach(), norm.weight.detach(), norm.bias.detach(), dY, 32)
        ours = Results(Y.detach(), None, None, X.grad, norm.weight.grad, norm.bias.grad)
        assert_parity(ours, inputs, only=("Y", "dX", "dgamma", "dbeta"))


def test_two_graphs_share_a_pool():
    """Graphs of one memory pool, replayed alternately: workspaces do not leak into each other."""
    inputs = [make_inputs(case, "cuda", torch.bfloat16) for case in CASES[:2]]
    want = [native(i) for i in inputs]
    first, results_first = capture(inputs[0])
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=first.pool()):
        results_second = native(inputs[1])
    for _ in range(3):
        first.replay()
        torch.cuda.synchronize()
        assert_equal(results_first, want[0])
        second.replay()
        torch.cuda.synchronize()
        assert_equal(results_second, want[1])


# --- streams and devices ---------------------------------------------------------------------


@cases
def test_side_stream(case):
    """Kernels run on the current stream: after what is already queued there."""
    inputs = make_inputs(case, "cuda", torch.float32)
    want = native(inputs)
    late = make_inputs(case, "cuda", torch.float32)
    for name in ("X", "gamma", "beta", "dY"):
        getattr(late, name).zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: the copies below come late
        copy_into(late, inputs)
        ours = native(late)
    # The default stream is free all the while; a kernel there would have read zeros.
    stream.synchronize()
    assert_equal(ours, want)


# Each fills X from a source or from its copy in pinned memory, and returns it.
def write_by_kernel(X: Tensor, source: Tensor, pinned: Tensor) -> Tensor:
    return torch.add(source, 0, out=X)


def write_by_copy(X: Tensor, source: Tensor, pinned: Tensor) -> Tensor:
    return X.copy_(source)


def write_from_host(X: Tensor, source: Tensor, pinned: Tensor) -> Tensor:
    return X.copy_(pinned, non_blocking=True)


def write_on_another_stream(X: Tensor, source: Tensor, pinned: Tensor) -> Tensor:
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000)  # about 1 ms
        X.copy_(source)
    torch.cuda.current_stream().wait_stream(other)
    return X


def write_by_norm(X: Tensor, source: Tensor, pinned: Tensor) -> Tensor:
    return F.group_norm(source, 1)


WRITERS = (
    write_by_kernel,
    write_by_copy,
    write_from_host,
    write_on_another_stream,
    write_by_norm,
)


@cases
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_blocks_that_start_early_wait(case, write, captured):
    """Blocks take their places while what is before them runs, and see all that it writes."""
    before = make_inputs(Case("before", (16, 320, 64, 64), 32), "cuda", torch.bfloat16)
    inputs = make_inputs(case, "cuda", torch.bfloat16)
    source = inputs.X.clone()
    pinned = source.cpu().pin_memory()
    X = write(inputs.X, source, pinned)
    want = native(replace(inputs, X=X))

    def run() -> Results:
        native(before)
        return native(replace(inputs, X=write(inputs.X, source, pinned)))

    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours = run()
    for _ in range(3):
        inputs.X.zero_()
        torch.cuda.synchronize()
        if captured:
            graph.replay()
        else:
            ours = run()
        torch.cuda.synchronize()
        assert_equal(ours, want)


def test_streams_side_by_side():
    """Calls in flight on several streams at once share no workspace."""
    inputs = [make_inputs(case, "cuda", torch.bfloat16) for case in CASES]
    want = [native(i) for i in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        ours = []
        for i, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                ours.append(native(i))
        torch.cuda.synchronize()
        for got, expected in zip(ours, want, strict=True):
            assert_equal(got, expected)


# In a process of its own: what a green context leaves behind is for no other test. A replay that
# waits for multiprocessors which it does not have would never end.
NO_GREEN_CONTEXTS = 77
# Of the whole chip, of large clusters backward, of one block.
GREEN_CALLS = (((2, 320, 128, 128), 32), ((2, 320, 64, 64), 32), ((3, 9, 7, 7), 3))
ON_GREEN_CONTEXT = f"""
import sys

import torch
from reference import assert_parity, calls, composite, make_inputs
from shapes import Case
from torch.cuda.green_contexts import GreenContext

import gn_override

captured = sys.argv[1] == "graph"
try:
    context = GreenContext.create(num_sms=16)
except RuntimeError as error:  # an old toolkit or driver, or no cuda.bindings
    print(error)
    sys.exit({NO_GREEN_CONTEXTS})


def on_green_context(run):
    torch.cuda.synchronize()
    context.set_context()
    try:
        result = run()
        if captured:
            stream = context.Stream()
            with torch.cuda.stream(stream):
                run()
                stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                result = run()
            graph.replay()
        torch.cuda.synchronize()
        return result
    finally:
        context.pop_context()


plans = []
for shape, groups in {GREEN_CALLS}:
    inputs = make_inputs(Case("green", shape, groups), "cuda", torch.bfloat16)
    torch.ops.gn_override.reset_counters()
    ours = on_green_context(lambda: composite(inputs))
    assert_parity(ours, inputs, only=("Y", "dX", "dgamma", "dbeta"))
    assert calls("native_group_norm", "cuda")[0] == (3 if captured else 1)

    i = inputs
    said = on_green_context(
        lambda: gn_override.explain(i.X, i.groups, weight=i.gamma, bias=i.beta)
    )
    assert f"native_group_norm cuda {{said.rule}}" in torch.ops.gn_override.counters()
    added = torch.randn(i.X.shape[:2], device="cuda", dtype=i.X.dtype)
    arguments = (i.X, added, i.groups, i.gamma, i.beta, i.eps, "silu")
    Y = on_green_context(lambda: torch.ops.gn_override.group_norm_act_inference(*arguments))
    torch.testing.assert_close(
        Y, torch.ops.gn_override.group_norm_act_inference(*arguments), rtol=2e-2, atol=2e-2
    )
    plans.append(gn_override.explain(i.X, i.groups, weight=i.gamma, bias=i.beta).plan)
print(*plans, sep="\\n")
"""


@pytest.mark.parametrize("how", ["stream", "graph"])
def test_green_context(how):
    """Its stream has a part of the multiprocessors: plans that count on more give way."""
    run = subprocess.run(
        [sys.executable, "-c", ON_GREEN_CONTEXT, how],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    if run.returncode == NO_GREEN_CONTEXTS:
        pytest.skip(run.stdout.strip())
    assert run.returncode == 0, run.stdout
    # What the first call found out about its part is not said of the whole.
    assert run.stdout.splitlines()[-3:] == [
        gn_override.explain(make_inputs(Case("", *call), "cuda", torch.bfloat16).X, call[1]).plan
        for call in GREEN_CALLS
    ]


# Waits for the flag, for two seconds at most, and says so if that was in vain.
WAITS = r"""
extern "C" __global__ void waits(volatile int* flag) {
  volatile __shared__ char room[40000];
  room[threadIdx.x] = 0;
  const long long start = clock64();
  while (flag[0] == 0 && clock64() - start < 4000000000ll) {
  }
  flag[1] = flag[0] == 0;
}
"""


@pytest.mark.parametrize(
    "shape", [(1, 512, 128, 128), (1, 128, 512, 512), (4, 1920, 64, 64)], ids=str
)
def test_runs_beside_a_kernel_that_waits_for_it(shape, monkeypatch):
    """Which a launch of the whole chip does not: a process with peers has none (see _whole_chip).

    It would wait for the other kernel to end, as that waits for what comes after the norm.
    """
    waits = torch.cuda._compile_kernel(WAITS, "waits")
    flag = torch.zeros(2, dtype=torch.int32, device="cuda")
    other = torch.cuda.Stream()
    inputs = make_inputs(Case("beside", shape, 32), "cuda", torch.bfloat16)
    plans = [gn_override.explain(inputs.X, 32, backward=way).plan for way in (False, True)]
    assert any("cooperative" in plan or "cluster=16" in plan for plan in plans)
    monkeypatch.setenv("GN_OVERRIDE_WHOLE_CHIP", "0")
    native(inputs)  # kernels are loaded, memory is there
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        waits(grid=(1, 1, 1), block=(32, 1, 1), args=[flag])
    ours = native(inputs)
    flag[:1].fill_(1)
    torch.cuda.synchronize()
    assert flag.tolist() == [1, 0], "it waited in vain"
    assert_parity(ours, inputs)
    assert not any("cooperative" in name for name in torch.ops.gn_override.counters())


def test_calls_do_not_synchronise():
    """Nothing in a call waits for the GPU."""
    inputs = make_inputs(CASES[0], "cuda", torch.float32)
    native(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with expect_calls("cuda", forward=True, backward=True):
            native(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@dtypes
def test_device_that_is_not_current(dtype):
    """The operands' device is used, and the current one is left as it was."""
    inputs = make_inputs(CASES[0], "cuda:0", dtype)
    there = Inputs(
        inputs.X.to("cuda:1"),
        inputs.gamma.to("cuda:1"),
        inputs.beta.to("cuda:1"),
        inputs.dY.to("cuda:1"),
        inputs.groups,
    )
    assert torch.cuda.current_device() == 0
    with expect_calls("cuda", forward=True, backward=True):
        ours = native(there)
    assert torch.cuda.current_device() == 0
    assert all(getattr(ours, name).device.index == 1 for name in RESULTS)
    assert_parity(ours, there)


# --- memory ----------------------------------------------------------------------------------


@cases
@dtypes
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F], ids=hex)
def test_whatever_memory_held_before(case, dtype, fill):
    """Results do not depend on what outputs and workspace held: zeros, NaN, huge numbers."""
    inputs = make_inputs(case, "cuda", dtype)
    want = native(inputs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    size = max(64 << 20, 16 * inputs.X.nbytes)
    blocks = [
        torch.full((n,), fill, dtype=torch.uint8, device="cuda")
        for n in [size] + [1 << 20] * 32 + [1 << 10] * 64
    ]
    del blocks
    assert_equal(native(inputs), want)


@cases
def test_nothing_outside_the_outputs_is_written(case):
    """Inputs keep their values, and so does the memory around inputs and outputs."""
    guard = 4096
    inputs = make_inputs(case, "cuda", torch.bfloat16)
    arena = torch.full((inputs.X.numel() + 2 * guard,), 7.0, dtype=torch.bfloat16, device="cuda")
    X = arena[guard:-guard].as_strided(inputs.X.shape, inputs.X.stride(), guard)
    X.copy_(inputs.X)
    before = [t.clone() for t in (inputs.X, inputs.gamma, inputs.beta, inputs.dY)]
    inputs.X = X
    native(inputs)
    after = (X, inputs.gamma, inputs.beta, inputs.dY)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (arena[:guard] == 7).all() and (arena[-guard:] == 7).all()


@cases
def test_memory_above_the_results(case):
    """The peak is the results and a workspace that is small next to X."""
    inputs = make_inputs(case, "cuda", torch.float32)
    native(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours = native(inputs)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(getattr(ours, name).nbytes for name in RESULTS)
    assert peak <= results + max(0.02 * inputs.X.nbytes, 16 << 20)


def test_nothing_more_is_saved_for_backward():
    """Between forward and backward only Y, mean and rstd are new."""
    X = torch.randn(4, 320, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    X.requires_grad_()
    norm = nn.GroupNorm(32, 320).cuda()
    norm(X)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    Y = norm(X)
    held = torch.cuda.memory_allocated() - before
    statistics = 2 * 4 * 32 * 4
    assert held <= Y.nbytes + statistics + 4096  # blocks are rounded up to 512 bytes


def test_the_cache_keeps_nothing():
    """What a call has the L2 cache keep goes like all else: later X is read as from memory."""
    inputs = make_inputs(Case("keeps", (16, 320, 64, 64), 32), "cuda", torch.bfloat16)
    copy = torch.empty_like(inputs.X)
    others = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")  # more than any cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    native(inputs)  # loads the kernels
    times: dict[str, list[float]] = {"before": [], "after": []}
    for when, found in times.items():
        for _ in range(30):
            if when == "after":
                native(inputs)
            others.zero_()
            start.record()
            copy.copy_(inputs.X)
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
    before, after = map(min, times.values())  # other processes only make it longer
    assert after > 0.98 * before


# --- determinism -----------------------------------------------------------------------------


@cases
@dtypes
def test_repeats_bit_for_bit(case, dtype):
    """Twenty times, with other work in between and other blocks in flight."""
    inputs = make_inputs(case, "cuda", dtype)
    want = native(inputs)
    noise = torch.randn(1 << 20, device="cuda")
    for _ in range(20):
        noise.mul_(1.0001)
        assert_equal(native(inputs), want)


def test_deterministic_mode_is_no_error():
    """Ours are deterministic: torch.use_deterministic_algorithms(True) changes nothing."""
    inputs = make_inputs(CASES[0], "cuda", torch.float32)
    want = native(inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert_equal(native(inputs), want)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls(FORWARD, "cuda") == (2, 0)


# --- both devices, large tensors -------------------------------------------------------------


@cases
@dtypes
def test_cpu_and_gpu_agree(case, dtype):
    """#98089: the two backends differ by no more than the bound of each allows."""
    inputs = make_inputs(case, "cpu", dtype)
    there = Inputs(*(t.cuda() for t in (inputs.X, inputs.gamma, inputs.beta, inputs.dY)), case.G)
    on_gpu = native(there)
    on_cpu = native(inputs)
    assert_layout_follows(inputs.X, on_gpu.Y, on_cpu.Y, on_gpu.dX, on_cpu.dX)
    assert_parity(Results(*(getattr(on_gpu, name) for name in RESULTS)), there)
    assert_parity(on_cpu, inputs)


@pytest.mark.large
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_14_more_than_2_31_elements(case):
    """apex #1845: offsets past 32 bits. Checked on slices against fp64, by stock's own error."""
    need = 12 * case.numel
    free, _ = torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"needs {need >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    assert case.numel > 1 << 31
    shape = (case.N, *case.shape[2:], case.C)

    def tensor() -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").movedim(-1, 1)

    X = tensor()
    # The last rows have another level: sums that miss them are off by far more than an ulp.
    X[:, :, -case.shape[2] // 4 :] += 3
    gamma, beta = torch.randn(2, case.C, dtype=torch.bfloat16, device="cuda")
    dY = tensor()
    inputs = Inputs(X, gamma, beta, dY, case.groups)
    with expect_calls("cuda", forward=True, backward=True):
        ours = native(inputs)
    assert_layout_follows(X, ours.Y, ours.dX)
    # Groups are independent: each is a problem of its own, which stock and fp64 can take.
    D = case.D
    for group in (0, 13, case.groups - 1):
        channels = slice(group * D, (group + 1) * D)
        part = Inputs(
            X[:, channels].contiguous(),
            gamma[channels],
            beta[channels],
            dY[:, channels].contiguous(),
            1,
        )
        reference, theirs = exact(part), stock(part)
        for name in RESULTS:
            whole = getattr(ours, name)
            mine = whole[channels] if name in ("dgamma", "dbeta") else whole[:, channels]
            mine = whole[:, group : group + 1] if name in ("mean", "rstd") else mine
            assert_close(
                mine, getattr(theirs, name), getattr(reference, name), name, reference.scale[name]
            )
        del reference, theirs


@pytest.mark.large
def test_14_many_small_samples_past_2_31():
    """The same with a large batch instead of a large image: N * HxW * C past 32 bits."""
    N, C, H, W = 1 << 18, 256, 6, 6
    need = 6 * N * C * H * W
    free, _ = torch.cuda.mem_get_info()
    if free < need:
        pytest.skip(f"needs {need >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    X = torch.randn(N, H, W, C, dtype=torch.bfloat16, device="cuda").movedim(-1, 1)
    assert X.numel() > 1 << 31
    with torch.no_grad():
        Y = F.group_norm(X, 32)
    assert calls(FORWARD, "cuda") == (1, 0)
    for n in (0, N // 2, N - 1):
        part = Inputs(X[n : n + 1], None, None, X[n : n + 1], 32)
        assert_close(Y[n : n + 1], stock(part).Y, exact(part, (False,) * 3).Y, f"Y[{n}]")
