"""Parity of the in-tree glue with stock through dispatch stubs; test_upstream_torch.py runs it.

    python tests/upstream_parity.py LIBRARY

Stock's results are computed before the library takes the stubs' place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from reference import (
    MASKS,
    Results,
    assert_layout_follows,
    assert_parity,
    make_inputs,
    stock,
    stock_in_other_orders,
)
from shapes import EDGE_CASES, KERNEL_CASES

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def assert_left_to_others(*calls: Callable[[], object]) -> None:
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "left to the other kernels" in str(error), error
        else:
            raise AssertionError("was taken")


def main(library: str) -> None:
    torch.ops.load_library(library)
    stub = torch.ops.group_norm_stub
    calls = []
    for case in EDGE_CASES:
        if len(case.shape) in (4, 5) and not case.one_layout:
            calls += [(make_inputs(case, "cuda", dtype), MASKS[-1]) for dtype in DTYPES]
    for case in KERNEL_CASES:
        if case.numel <= 1 << 24:
            calls.append((make_inputs(case, "cuda", getattr(torch, case.dtype)), MASKS[-1]))
    few = [case for case in EDGE_CASES if case.name in ("d10", "c9", "volume_c60", "n129")]
    for case in few:
        calls += [(make_inputs(case, "cuda", torch.bfloat16), mask) for mask in MASKS]
        for affine in ("none", "weight", "bias"):
            calls.append((make_inputs(case, "cuda", torch.float32, affine=affine), MASKS[-1]))
        calls.append((make_inputs(case, "cuda", torch.float16, layout="unaligned"), MASKS[-1]))
        calls.append((make_inputs(case, "cuda", torch.float32, eps=0.5), MASKS[-1]))
    expected = [[stock(*call), *stock_in_other_orders(*call)] for call in calls]

    stub.install()
    for (inputs, mask), theirs in zip(calls, expected, strict=True):
        i = inputs
        Y, mean, rstd = stub.forward(i.X, i.gamma, i.beta, *i.sizes, i.eps)
        grads = stub.backward(i.dY, i.X, mean, rstd, i.gamma, *i.sizes, list(mask))
        ours = Results(
            Y, mean, rstd, *(g if wanted else None for g, wanted in zip(grads, mask, strict=True))
        )
        assert_layout_follows(i.X, ours.Y, ours.dX)
        assert_parity(ours, inputs, mask, theirs=theirs)

    # Large samples take the whole chip where the process asks for that, and only there.
    i = make_inputs(next(c for c in KERNEL_CASES if c.name == "vae2"), "cuda", torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _, mean, rstd = stub.forward(i.X, i.gamma, i.beta, *i.sizes, i.eps)
        stub.backward(i.dY, i.X, mean, rstd, i.gamma, *i.sizes, [True] * 3)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    asked = os.environ.get("TORCH_GROUP_NORM_WHOLE_CHIP") == "1"
    for scheme, is_meant in (("resident_", asked), ("combine_statistics", not asked)):
        assert any(scheme in name for name in names) == is_meant, names

    # What is left to the other kernels.
    i = make_inputs(few[0], "cuda", torch.float32)
    N, C, HxW, G = i.sizes
    _, mean, rstd = stub.forward(i.X, i.gamma, i.beta, N, C, HxW, G, i.eps)
    half = i.gamma.half()
    assert_left_to_others(
        lambda: stub.forward(i.X.contiguous(), i.gamma, i.beta, N, C, HxW, G, i.eps),
        lambda: stub.forward(i.X[:, :, ::2], i.gamma, i.beta, N, C, HxW // 2, G, i.eps),
        lambda: stub.forward(i.X, half, half, N, C, HxW, G, i.eps),
        lambda: stub.forward(i.X, i.gamma[1:], i.beta, N, C, HxW, G, i.eps),
        lambda: stub.forward(i.X, i.gamma, i.beta, N, HxW, C, G, i.eps),
        lambda: stub.backward(
            i.dY.contiguous(), i.X, mean, rstd, i.gamma, N, C, HxW, G, [True] * 3
        ),
        lambda: stub.backward(i.dY, i.X, mean.half(), rstd, i.gamma, N, C, HxW, G, [True] * 3),
    )
    print(f"{len(calls)} calls agree with stock")


if __name__ == "__main__":
    main(sys.argv[1])
