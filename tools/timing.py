"""What the GPU benchmarks time, and how: one timing function, the same steps for every provider.

A step is captured in a CUDA graph and replayed with a cold L2 cache (triton.testing.do_bench);
its figure is the median, in microseconds of GPU time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import results
import torch
from torch import Tensor

sys.path.insert(0, str(results.ROOT / "tests"))
import reference

Step = Callable[[], Any]
Norm = Callable[[Tensor, int, Tensor, Tensor], Tensor]  # (X, G, gamma, beta) -> Y

# What steps() gives, and which results of the reference each step returns.
RESULTS = {"fwd": ("Y",), "fwd_bwd": ("dX", "dgamma", "dbeta")}


def microseconds(step: Step, milliseconds: int) -> float:
    """Median GPU time of a step, captured in a CUDA graph, with a cold L2 cache.

    milliseconds   how long to measure, cache flushes included
    """
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
    warmup = min(10, milliseconds)
    return 1e3 * do_bench(graph.replay, warmup=warmup, rep=milliseconds, return_mode="median")


def steps(norm: Norm, inputs: reference.Inputs, layout: str) -> dict[str, Step]:
    """What is timed: forward without autograd; forward plus backward to X, gamma and beta."""
    G = inputs.groups
    assert inputs.gamma is not None and inputs.beta is not None
    X = reference.lay_out(inputs.X, layout).requires_grad_()
    dY = reference.lay_out(inputs.dY, layout)
    gamma, beta = (t.clone().requires_grad_() for t in (inputs.gamma, inputs.beta))

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (norm(X, G, gamma, beta),)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm(X, G, gamma, beta), (X, gamma, beta), dY)

    return {"fwd": forward, "fwd_bwd": forward_backward}


def difference(what: str, found: tuple[Tensor, ...], stock: reference.Results) -> str:
    """Whether the results of a step are far from stock's: says which is, or "".

    A rough check, by the relative l2 error: at most 8 eps of the dtype, and 0.001 in any case.
    It finds wrong results, not inexact ones.
    """
    for name, value in zip(RESULTS[what], found, strict=True):
        theirs = getattr(stock, name)
        if value.shape != theirs.shape:
            return f"{name}: shape {tuple(value.shape)}, stock {tuple(theirs.shape)}"
        wide = {"dtype": torch.float64}
        error = torch.linalg.vector_norm(value - theirs, **wide)
        error = float(error / torch.linalg.vector_norm(theirs, **wide))
        limit = max(8 * torch.finfo(theirs.dtype).eps, 1e-3)
        if not error <= limit:  # so that a NaN is one
            return f"{name}: relative l2 error {error:.2e}, limit {limit:.2e}"
    return ""


def gpu_lost() -> bool:
    """Whether an error before has broken the CUDA context, so that nothing more can run."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
