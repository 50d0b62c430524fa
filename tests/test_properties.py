"""Random calls against the reference: shapes, dtypes, layouts, options and values together.

GN_OVERRIDE_TEST_EXAMPLES says how many calls a test tries (100). The choice is the same in every
run; with GN_OVERRIDE_TEST_EXPLORE=1 it is new each time.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

import gn_override  # noqa: F401  (loads the extension and switches on)

pytest.importorskip("hypothesis")
import test_activation
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reference import (
    ACTIVATIONS,
    GRAD_LAYOUTS,
    LAYOUTS,
    MASKS,
    RESULTS,
    Inputs,
    Reference,
    Results,
    assert_layout_follows,
    assert_parity,
    composite,
    condition_of,
    exact,
    expect_calls,
    floor,
    is_channels_last,
    lay_out,
    make_inputs,
    max_error,
    native,
    stock,
)
from shapes import Case
from torch import Tensor

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
def cases(draw: st.DrawFn, elements: int = 1 << 16) -> Case:
    """Up to so many elements, but for those of one pixel; any rank that we serve; sizes from 1."""
    G = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32]))
    D = draw(st.one_of(st.integers(1, 9), st.integers(1, 70)))
    N = draw(st.integers(1, 5))
    rank = draw(st.integers(1, 3))
    spatial: list[int] = []
    for _ in range(rank):
        room = elements // (N * G * D * math.prod(spatial))
        spatial.append(draw(st.integers(1, max(1, min(room, 300 if rank == 1 else 40)))))
    return Case("random", (N, G * D, *spatial), G)


def served_cases(elements: int = 1 << 16) -> st.SearchStrategy[Case]:
    """Those of which a channels-last tensor is not an NCHW one, which is aten's, as well."""
    return cases(elements).filter(lambda case: not case.one_layout)


def assert_conditioned(ours: Results, inputs: Inputs, reference: Reference) -> None:
    """The suite's bound, of results that an error of the mean moves."""
    assert_parity(ours, inputs, reference=reference, condition=condition_of(reference))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bit for bit, or both undefined."""
    return a is b if a is None or b is None else torch.equal(a, b)


@random_calls
@given(
    case=served_cases(),
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
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs, mask)
    assert_parity(ours, inputs, mask)
    assert_layout_follows(inputs.X, ours.Y, ours.dX)
    again = native(inputs, mask)
    for name in RESULTS:
        assert same(getattr(ours, name), getattr(again, name)), name


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
    assume(case.D * case.HxW > 1)  # else without any deviation, or refused by torch
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, dtype, affine=affine, layout=layout, dY_layout=dY_layout)
    if affine == "bias" and not is_channels_last(inputs.X):
        inputs.beta = None  # aten's, and the backward of stock CPU refuses it
    ours = composite(inputs)
    assert_parity(
        ours, inputs, only=[name for name, value in vars(ours).items() if value is not None]
    )


# --- strides ---------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[Case, list[slice], tuple[int, int] | None, int]:
    """A case to draw a tensor of, a slice of each dimension, dimensions that change places, and an
    offset into the storage: a view with any strides.
    """
    case = draw(cases())
    slices = []
    for dim, size in enumerate(case.shape):
        step = draw(st.sampled_from([1, 1, 1, 2, 3]))
        start = draw(st.integers(0, min(size - 1, 3))) if dim != 1 else 0
        slices.append(slice(start, None, step if dim != 1 else 1))
    swap = draw(st.sampled_from([None, (0, -1), (2, -1)]))
    return case, slices, swap, draw(st.integers(0, 9))


@random_calls
@given(
    view=views(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["channels_last", "nchw", "permuted"]),
    seed=st.integers(0, 1 << 31),
)
def test_any_view(device, view, dtype, layout, seed):
    """Whatever the strides and the offset of X and dY are, values are right: never an error."""
    case, slices, swap, offset = view
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, dtype, layout=layout)

    def viewed(t: Tensor) -> Tensor:
        storage = torch.empty(t.numel() + offset, dtype=dtype, device=device)
        moved = storage[offset:].as_strided(t.shape, t.stride(), offset)
        view = moved.copy_(t)[tuple(slices)]
        return view if swap is None or swap[0] == t.dim() - 1 else view.transpose(*swap)

    inputs.X, inputs.dY = viewed(inputs.X), viewed(inputs.dY)
    _, _, HxW, _ = inputs.sizes
    assume(case.D * HxW > 1)  # else without any deviation, or refused by torch
    ours = composite(inputs)
    assert_parity(ours, inputs, only=("Y", "dX", "dgamma", "dbeta"))


@random_calls
@given(
    case=served_cases(1 << 12),
    dtypes=st.sampled_from(list(test_activation.DTYPES.values())),
    activation=st.sampled_from(ACTIVATIONS),
    dY_layout=st.sampled_from(GRAD_LAYOUTS),
    affine=st.sampled_from(["both", "none", "weight", "bias"]),
    mask=st.sampled_from(MASKS[1:]),
    eps=st.sampled_from([1e-5, 1e-5, 1e-3, 0.5]),
    seed=st.integers(0, 1 << 31),
)
def test_fused_ops(device, case, dtypes, activation, dY_layout, affine, mask, eps, seed):
    """Few elements, since erf in long double is slow. The statistics that two-byte inputs save for
    backward may be off by more than the bound, see docs/math.md."""
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, *dtypes, affine=affine, dY_layout=dY_layout, eps=eps)
    only = RESULTS if inputs.X.dtype.itemsize > 2 else ("Y", "dX", "dgamma", "dbeta")
    ours = test_activation.check(inputs, activation, mask, only)
    inputs = test_activation.away_from_kink(inputs, activation)
    again = test_activation.run(inputs, activation, mask)
    for name in RESULTS:
        assert same(getattr(ours, name), getattr(again, name)), name
    if inputs.dY.dtype == inputs.X.dtype:
        added = test_activation.make_added(inputs)
        ours = test_activation.run_add(inputs, added, activation)
        test_activation.assert_parity_of_sum(ours, inputs, added, activation, conditioned=True)


# --- values ----------------------------------------------------------------------------------

# X from normal numbers; "subnormal" and "huge" are of the dtype's range.
VALUES = {
    "large mean": lambda X: X + 1000,
    "tiny variance": lambda X: X * 1e-4,
    "large mean, tiny variance": lambda X: X * 0.01 + 100,
    "constant": lambda X: torch.full_like(X, 0.3),
    "constant in a group": lambda X: X[..., :1].expand(X.shape).clone(),
    "zero": torch.zeros_like,
    "subnormal": lambda X: X * (torch.finfo(X.dtype).tiny / 4),
    "huge": lambda X: X * torch.finfo(X.dtype).max ** 0.45,
    "one outlier": lambda X: X.index_fill(0, torch.zeros(1, dtype=torch.long, device=X.device), 50),
}


@random_calls
@given(
    case=served_cases(),
    dtypes=st.sampled_from(DTYPES),
    values=st.sampled_from(sorted(VALUES)),
    eps=st.sampled_from([1e-5, 1e-3, 1e-12]),
    seed=st.integers(0, 1 << 31),
)
def test_values(device, case, dtypes, values, eps, seed):
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, *dtypes, eps=eps)
    inputs.X = lay_out(VALUES[values](inputs.X), "channels_last")
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    reference = exact(inputs)
    dtype = inputs.X.dtype
    assume(max(reference.scale.values()) <= torch.finfo(dtype).max)  # half cannot hold all terms
    # Sums that nearly overflow their type are those of which docs/reliability.md says what differs.
    most = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    squared_deviations = case.D * case.HxW * (reference.rstd**-2 - eps)
    assume(not ((most / 32 < squared_deviations) & (squared_deviations <= most)).any())
    assert_conditioned(ours, inputs, reference)


@random_calls
@given(
    case=served_cases(),
    dtypes=st.sampled_from(DTYPES),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    data=st.data(),
    seed=st.integers(0, 1 << 31),
)
def test_what_is_not_finite_stays_in_its_group(device, case, dtypes, value, data, seed):
    """One element of X: every other group has the bits that it has without."""
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, *dtypes)
    clean = native(inputs)
    n, c, *pixel = (data.draw(st.integers(0, size - 1)) for size in case.shape)
    inputs.X[(n, c, *pixel)] = value
    ours = native(inputs)
    g = c // case.D
    for name in ("Y", "dX", "mean", "rstd"):
        was, now = (getattr(r, name).reshape(case.N, case.G, -1).clone() for r in (clean, ours))
        if name != "rstd":  # of an infinite variance it is 0
            assert not now[n, g].isfinite().any(), name
        was[n, g] = now[n, g] = 0
        assert torch.equal(was, now), name
    for name in ("dgamma", "dbeta"):
        was, now = (getattr(r, name).reshape(case.G, -1).clone() for r in (clean, ours))
        if name == "dgamma":
            assert now[g].isnan().all()
            was[g] = now[g] = 0
        assert torch.equal(was, now), name


# --- what the formulas promise ---------------------------------------------------------------

FLOATS = [torch.float32, torch.float64, torch.bfloat16]


@random_calls
@given(
    case=served_cases(),
    dtype=st.sampled_from(FLOATS),
    power=st.sampled_from([-12, -3, 2, 9]),
    seed=st.integers(0, 1 << 31),
)
def test_scale_of_X(device, case, dtype, power, seed):
    """2^k X with 4^k eps: Y is the same, bit for bit, since powers of two round nothing."""
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, dtype, eps=2.0**-16)
    ours = native(inputs)
    scaled = native(
        Inputs(
            inputs.X * 2.0**power,
            inputs.gamma,
            inputs.beta,
            inputs.dY,
            inputs.groups,
            inputs.eps * 4.0**power,
        )
    )
    assert torch.equal(scaled.Y, ours.Y)
    assert torch.equal(scaled.mean, ours.mean * 2.0**power)
    assert torch.equal(scaled.rstd, ours.rstd * 2.0**-power)
    assert torch.equal(scaled.dX, ours.dX * 2.0**-power)
    assert torch.equal(scaled.dgamma, ours.dgamma) and torch.equal(scaled.dbeta, ours.dbeta)


@random_calls
@given(
    case=served_cases(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shift=st.integers(-4096, 4096),
    seed=st.integers(0, 1 << 31),
)
def test_shift_of_X(device, case, dtype, shift, seed):
    """X + c, exact in the dtype, against the exact Y of X."""
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, dtype)
    inputs.X = (inputs.X * 16).round() / 16
    unshifted = exact(inputs)
    inputs.X = inputs.X + shift
    reference = replace(unshifted, mean=unshifted.mean + shift, scale=exact(inputs).scale)
    assert_conditioned(native(inputs), inputs, reference)


@random_calls
@given(
    case=served_cases(),
    dtype=st.sampled_from(FLOATS),
    power=st.sampled_from([-9, -1, 3, 12]),
    seed=st.integers(0, 1 << 31),
)
def test_backward_is_linear_in_dY(device, case, dtype, power, seed):
    """Powers of two bit for bit, nothing of nothing, and sums up to the bounds of their parts."""
    torch.manual_seed(seed)
    inputs = make_inputs(case, device, dtype)

    def gradients(dY: Tensor) -> dict[str, Tensor]:
        ours = native(Inputs(inputs.X, inputs.gamma, inputs.beta, dY, inputs.groups))
        return {name: getattr(ours, name) for name in ("dX", "dgamma", "dbeta")}

    whole = gradients(inputs.dY)
    for name, value in gradients(inputs.dY * 2.0**power).items():
        assert torch.equal(value, whole[name] * 2.0**power), name
    for name, value in gradients(torch.zeros_like(inputs.dY)).items():
        assert not value.any(), name
    parts = [(inputs.dY * 8).round() / 8, (inputs.dY * 4).round() / 4]
    parts = [part.clamp(-4, 4) for part in parts]  # of six binary digits: their sum is exact
    found: list[dict[str, Tensor]] = []
    limits = dict.fromkeys(("dX", "dgamma", "dbeta"), 0.0)
    for dY in (*parts, parts[0] + parts[1]):
        each = Inputs(inputs.X, inputs.gamma, inputs.beta, dY, inputs.groups)
        reference, theirs = exact(each), stock(each)
        for name in limits:
            limits[name] += floor(reference.scale[name], dtype)
            limits[name] += max_error(getattr(theirs, name), getattr(reference, name))
        found.append(gradients(dY))
    for name, limit in limits.items():
        a, b, both = (grads[name].double() for grads in found)
        assert (both - a - b).abs().max() <= limit, name
