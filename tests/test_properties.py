"""Random calls against the reference: shapes, dtypes, layouts, options and values together.

GN_OVERRIDE_TEST_EXAMPLES says how many calls a test tries (100). The choice is the same in every
run; with GN_OVERRIDE_TEST_EXPLORE=1 it is new each time.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

import gn_override  # noqa: F401  (loads the extension and switches on)

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import (
    GRAD_LAYOUTS,
    LAYOUTS,
    MASKS,
    assert_layout_follows,
    assert_parity,
    composite,
    expect_calls,
    is_channels_last,
    make_inputs,
    native,
)
from shapes import Case

random_calls = settings(
    max_examples=int(os.environ.get("GN_OVERRIDE_TEST_EXAMPLES", "100")),
    derandomize="GN_OVERRIDE_TEST_EXPLORE" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
pytestmark = pytest.mark.usefixtures("poison")

DTYPES = [
    (torch.float32, None),
    (torch.float64, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to 2^16 elements, any rank that we serve; every size from 1."""
    G = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32]))
    D = draw(st.one_of(st.integers(1, 9), st.integers(1, 70)))
    N = draw(st.integers(1, 5))
    rank = draw(st.integers(1, 3))
    spatial: list[int] = []
    for _ in range(rank):
        room = (1 << 16) // (N * G * D * math.prod(spatial))
        spatial.append(draw(st.integers(1, max(1, min(room, 300 if rank == 1 else 40)))))
    return Case("random", (N, G * D, *spatial), G)


@random_calls
@given(
    case=cases(),
    dtypes=st.sampled_from(DTYPES),
    layout=st.sampled_from(["channels_last", "channels_last", "unaligned"]),
    dY_layout=st.sampled_from(GRAD_LAYOUTS),
    affine=st.sampled_from(["both", "none", "weight", "bias"]),
    mask=st.sampled_from(MASKS[1:]),
    eps=st.sampled_from([1e-5, 1e-5, 1e-3, 0.5]),
    seed=st.integers(0, 1 << 31),
)
def test_native_ops(device, case, dtypes, layout, dY_layout, affine, mask, eps, seed):
    torch.manual_seed(seed)
    inputs = make_inputs(
        case, device, *dtypes, affine=affine, layout=layout, dY_layout=dY_layout, eps=eps
    )
    if not is_channels_last(inputs.X):
        return  # aten's, which refuses some of these
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs, mask)
    assert_parity(ours, inputs, mask)
    assert_layout_follows(inputs.X, ours.Y, ours.dX)


@random_calls
@given(
    case=cases(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(LAYOUTS),
    dY_layout=st.sampled_from(GRAD_LAYOUTS),
    affine=st.sampled_from(["both", "none", "weight", "bias"]),
    seed=st.integers(0, 1 << 31),
)
def test_group_norm_in_any_layout(device, case, dtype, layout, dY_layout, affine, seed):
    if case.N * case.D * case.HxW == 1 or case.D * case.HxW == 1:
        return  # refused by torch, or without any deviation
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, dtype, affine=affine, layout=layout, dY_layout=dY_layout)
    if affine == "bias" and not is_channels_last(inputs.X):
        inputs.beta = None  # aten's, and the backward of stock CPU refuses it
    ours = composite(inputs)
    assert_parity(
        ours, inputs, only=[name for name, value in vars(ours).items() if value is not None]
    )
