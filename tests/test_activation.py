"""gn_override::group_norm_act and its backward: norm and activation in one operator.

The bound is that of reference.py: the error against the exact values may exceed that of stock's
group norm followed by PyTorch's activation by the rounding of the last place alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from reference import (
    ACTIVATIONS,
    ALL,
    CAST,
    FUSED,
    GRAD_LAYOUTS,
    LAYOUTS,
    MASKS,
    RESULTS,
    TORCHS,
    Inputs,
    Mask,
    Results,
    activate,
    assert_close,
    assert_layout_follows,
    calls,
    condition_of,
    exact,
    is_channels_last,
    is_mixed,
    lay_out,
    make_inputs,
    override_off,
    stock,
    stock_act,
    torchs,
    ulp,
)
from reference import assert_parity as assert_norm_parity
from shapes import EDGE_CASES, EMPTY_CASES, KERNEL_CASES, Case, cpu_subset
from test_parity import for_gpu
from test_schemes import CASES as SCHEME_CASES
from test_schemes import DTYPES as SCHEME_DTYPES
from test_schemes import PINS, all_pins, assert_same_bits, case_of, pin  # noqa: F401  (a fixture)
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import gn_override
from gn_override._explain import explain_shape

op = torch.ops.gn_override.group_norm_act
op_backward = torch.ops.gn_override.group_norm_act_backward
op_inference = torch.ops.gn_override.group_norm_act_inference

DTYPES = {
    "float": (torch.float32, None),
    "double": (torch.float64, None),
    "half": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "half-float": (torch.float16, torch.float32),
    "bfloat16-float": (torch.bfloat16, torch.float32),
    "half to float": (torch.float16, torch.float32, torch.float32),
    "bfloat16 to float": (torch.bfloat16, torch.float32, torch.float32),
}
all_dtypes = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
all_activations = pytest.mark.parametrize("activation", ACTIVATIONS)
fused_activations = pytest.mark.parametrize("activation", ACTIVATIONS[1:])
by_id = {"ids": lambda value: value.name if isinstance(value, Case) else None}

# Vectors fit, vectors do not fit, a volume; few elements, since erf in long double is slow.
FEW = tuple(next(c for c in EDGE_CASES if c.name == name) for name in ("d3", "c9", "volume"))
few_cases = pytest.mark.parametrize("case", FEW, **by_id)

pytestmark = pytest.mark.usefixtures("poison")


def stock_wide(inputs: Inputs, activation: str, mask: Mask = ALL) -> Results:
    """stock_act(), with mean and rstd of the accumulators' type."""
    i = inputs
    results = stock_act(inputs, activation, mask)
    wide = torch.promote_types(i.X.dtype, torch.float32)
    params = [t if t is None else t.to(wide) for t in (i.gamma, i.beta)]
    of_wide = stock(Inputs(i.X.to(wide), *params, i.dY.to(wide), i.groups, i.eps))
    results.mean, results.rstd = of_wide.mean, of_wide.rstd
    return results


def away_from_kink(inputs: Inputs, activation: str) -> Inputs:
    """relu's derivative jumps at 0: no gradient comes where Z is 0 up to rounding."""
    if activation != "relu":
        return inputs
    reference = exact(inputs, (False, False, False))
    tolerance = 64 * ulp(reference.scale["Y"], torch.promote_types(inputs.X.dtype, torch.float32))
    Z = torch.as_tensor(reference.Y.astype("float64") if is_array(reference.Y) else reference.Y)
    near = (Z.abs() <= tolerance).to(inputs.dY.device)
    dY = inputs.dY.masked_fill(near, 0)
    if dY.stride() != inputs.dY.stride() and 0 not in inputs.dY.stride():
        dY = torch.empty_like(inputs.dY).copy_(dY)
    return dataclasses.replace(inputs, dY=dY)


def is_array(values: object) -> bool:
    return not isinstance(values, Tensor)


def run(inputs: Inputs, activation: str, mask: Mask = ALL) -> Results:
    """Both operators, called directly."""
    i = inputs
    Y, mean, rstd = op(i.X, i.groups, i.gamma, i.beta, i.eps, activation, i.dY.dtype)
    grads = op_backward(i.dY, i.X, mean, rstd, i.gamma, i.beta, i.groups, activation, list(mask))
    return Results(Y, mean, rstd, *grads)


@contextlib.contextmanager
def expect_taken(inputs: Inputs) -> Iterator[None]:
    """Inside, one call of each operator: on our kernels, or on aten's operators."""
    torch.ops.gn_override.reset_counters()
    yield
    want = (1, 0) if is_taken(inputs) else (0, 1)
    for name in CAST if is_wide(inputs) else FUSED:
        assert calls(name, inputs.X.device.type) == want, torch.ops.gn_override.counters()


def is_wide(inputs: Inputs) -> bool:
    return inputs.dY.dtype != inputs.X.dtype


def is_taken(inputs: Inputs) -> bool:
    if is_wide(inputs):
        return inputs.X.is_cuda and is_channels_last(inputs.X)
    one_layout = inputs.X.shape[1] == 1 or inputs.sizes[2] == 1
    return is_channels_last(inputs.X) or (inputs.X.is_cuda and is_mixed(inputs) and one_layout)


def assert_parity(
    ours: Results,
    inputs: Inputs,
    activation: str,
    mask: Mask = ALL,
    only: Sequence[str] = RESULTS,
) -> None:
    def compute(inputs: Inputs, mask: Mask) -> Results:
        results = stock_wide(inputs, activation, mask)
        for name in ("dgamma", "dbeta"):  # without a gamma, stock's are of X's dtype
            actual, aten = getattr(ours, name), getattr(results, name)
            if actual is not None and aten is not None:
                setattr(results, name, aten.to(actual.dtype))
        return results

    reference = exact(inputs, mask, activation)
    assert_norm_parity(ours, inputs, mask, only, reference=reference, compute=compute)


def make_added(inputs: Inputs) -> Tensor:
    """[N, C] of X's dtype, some deviations of X wide."""
    N, C, _, _ = inputs.sizes
    return 3 * torch.randn(N, C, dtype=inputs.X.dtype, device=inputs.X.device)


def assert_parity_of_sum(
    ours: Results, inputs: Inputs, added: Tensor, activation: str, conditioned: bool = False
) -> None:
    """Forward of X + added, against stock's of the rounded sum, by the error from the exact one.

    `conditioned` allows for the problem's condition, as reference.assert_parity() does.
    """
    of_pixels = added.reshape(*added.shape, *[1] * (inputs.X.dim() - 2))

    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.double()

    exact_sum = dataclasses.replace(
        inputs,
        X=inputs.X.double() + of_pixels,
        gamma=wide(inputs.gamma),
        beta=wide(inputs.beta),
        dY=inputs.dY.double(),
    )
    reference = exact(exact_sum, (False, False, False), activation)
    rounded = dataclasses.replace(inputs, X=inputs.X + of_pixels)
    theirs = stock_wide(rounded, activation, (False, False, False))
    allowed = max(1.0, 2 * condition_of(reference)) if conditioned else 1.0
    for name in ("Y", "mean", "rstd"):
        actual, aten, values = (getattr(of, name) for of in (ours, theirs, reference))
        if actual is not None:
            if inputs.X.dtype != torch.float64:
                values = torch.from_numpy(values.astype("float64")).to(actual.device)
            assert_close(actual, aten, values, name, reference.scale[name] * allowed)


def check(
    inputs: Inputs, activation: str, mask: Mask = ALL, only: Sequence[str] = RESULTS
) -> Results:
    inputs = away_from_kink(inputs, activation)
    with expect_taken(inputs):
        ours = run(inputs, activation, mask)
    assert_parity(ours, inputs, activation, mask, only)
    if is_channels_last(inputs.X) and is_taken(inputs):
        assert_layout_follows(inputs.X, ours.Y, ours.dX)
    return ours


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cpu_subset(EDGE_CASES), **by_id)
@pytest.mark.parametrize("dtypes", [DTYPES["float"], DTYPES["bfloat16"]], ids=["float", "bfloat16"])
@fused_activations
def test_parity(device, case, dtypes, activation):
    check(make_inputs(case, device, *dtypes), activation)


@few_cases
@all_dtypes
@all_activations
def test_dtypes(device, case, dtypes, activation):
    """mean and rstd are accumulators; gradients of parameters have the parameters' dtype."""
    inputs = make_inputs(case, device, *dtypes)
    ours = check(inputs, activation)
    wide = torch.promote_types(dtypes[0], torch.float32)
    assert ours.Y.dtype == inputs.dY.dtype and ours.dX.dtype == dtypes[0]
    assert ours.mean.dtype == ours.rstd.dtype == wide
    assert ours.dgamma.dtype == ours.dbeta.dtype == (dtypes[1] or dtypes[0])
    assert_same_bits(run(away_from_kink(inputs, activation), activation), ours)


# Its dX is not large; large, and written past the caches; the same, with rows left by the fold.
KEPT = (
    Case("small", (5, 60, 9, 9), 6),
    Case("streamed", (2, 64, 160, 130), 32),
    Case("folded", (3, 3, 601, 587), 3),
)


@pytest.mark.parametrize("case", KEPT, **by_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
@fused_activations
def test_any_number_of_threads(case, dtype, activation):
    """On a CPU, where backward's last step reads what others may have left in dX."""
    inputs = make_inputs(case, "cpu", dtype)
    want = run(inputs, activation)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert_same_bits(run(inputs, activation), want)
    finally:
        torch.set_num_threads(before)


@few_cases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
@fused_activations
def test_gradient_of_half_is_nearer_than_stocks(device, case, dtype, activation):
    """By root mean square: PyTorch rounds Z and dZ, a fused backward dZ at most."""
    inputs = away_from_kink(make_inputs(case, device, dtype), activation)
    want = exact(inputs, (True, False, False), activation).dX

    def error(dX: Tensor) -> float:
        return float((dX.double().reshape(want.shape) - want).square().mean().sqrt())

    assert error(run(inputs, activation).dX) <= 1.01 * error(stock_act(inputs, activation).dX)


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@fused_activations
def test_layouts(device, case, dtype, layout, activation):
    inputs = away_from_kink(make_inputs(case, device, dtype, layout=layout), activation)
    ours = run(inputs, activation)
    assert_parity(ours, inputs, activation)
    want = lay_out(inputs.X, "channels_last" if layout == "sliced" else layout)
    if layout == "permuted":
        want = inputs.X.contiguous()  # a layout that is neither: NCHW
    assert ours.Y.stride() == ours.dX.stride() == want.stride()


@few_cases
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("dY_layout", GRAD_LAYOUTS)
def test_layouts_of_gradient(device, case, layout, dY_layout):
    inputs = make_inputs(case, device, torch.float32, layout=layout, dY_layout=dY_layout)
    assert_parity(run(inputs, "silu"), inputs, "silu")


@few_cases
@all_dtypes
@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_without_weight_or_bias(device, case, dtypes, affine, layout):
    inputs = make_inputs(case, device, *dtypes, affine=affine, layout=layout)
    ours = run(inputs, "silu")
    assert_parity(ours, inputs, "silu")


@few_cases
@pytest.mark.parametrize("dtypes", [DTYPES["float"], DTYPES["bfloat16-float"]], ids=["f32", "mix"])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: "".join("01"[bit] for bit in m))
def test_output_masks(device, case, dtypes, layout, mask):
    inputs = make_inputs(case, device, *dtypes, layout=layout)
    ours, whole = run(inputs, "silu", mask), run(inputs, "silu")
    for name, wanted in zip(("dX", "dgamma", "dbeta"), mask, strict=True):
        assert (getattr(ours, name) is not None) == wanted
        if wanted:
            assert torch.equal(getattr(ours, name), getattr(whole, name)), name


@few_cases
@all_dtypes
@pytest.mark.parametrize("eps", [0.5, 1e-3, 0.0])
def test_eps(device, case, dtypes, eps):
    check(make_inputs(case, device, *dtypes, eps=eps), "silu")


@pytest.mark.cuda
@pytest.mark.parametrize("case", for_gpu(KERNEL_CASES))
def test_benchmark_shapes(case):
    check(make_inputs(case, "cuda", getattr(torch, case.dtype)), "silu")


@pytest.mark.cuda
@all_pins
@pytest.mark.parametrize("case", SCHEME_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "dtypes",
    [*SCHEME_DTYPES.values(), DTYPES["half to float"], DTYPES["bfloat16 to float"]],
    ids=[*SCHEME_DTYPES, "half to float", "bfloat16 to float"],
)
def test_scheme(pin, dtypes, case, pins):  # noqa: F811
    """Every scheme on a GPU. The activations take turns: which one is in use is no part of it."""
    fitting = ACTIVATIONS[1:] if case.numel < 30000 or dtypes[0] != torch.float64 else ("silu",)
    activation = fitting[(PINS.index(pins) + SCHEME_CASES.index(case)) % len(fitting)]
    inputs = away_from_kink(make_inputs(case, "cuda", *dtypes), activation)
    pin(*pins)
    torch.ops.gn_override.reset_counters()
    ours = run(inputs, activation)
    rules = {name.split()[2] for name in torch.ops.gn_override.counters()}
    if rules != {pins[0]}:
        pytest.skip(f"no {pins[0]} plan of such a geometry")
    assert_parity(ours, inputs, activation)
    assert_same_bits(run(inputs, activation), ours)


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", ["registers", "resident", "cooperative", "two_pass"])
@fused_activations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_activation_of_a_scheme(pin, scheme, activation, dtype):  # noqa: F811
    if scheme == "registers" and dtype.itemsize > 2:
        pytest.skip("registers hold two-byte types alone")
    inputs = away_from_kink(make_inputs(case_of(scheme), "cuda", dtype), activation)
    pin(scheme, 0, 0, 0)
    torch.ops.gn_override.reset_counters()
    ours = run(inputs, activation)
    assert {name.split()[2] for name in torch.ops.gn_override.counters()} == {scheme}
    assert_parity(ours, inputs, activation)


# --- the result alone, and a value of each channel added first --------------------------------


@few_cases
@pytest.mark.parametrize("dtypes", list(DTYPES.values())[:6], ids=list(DTYPES)[:6])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@all_activations
def test_inference(device, case, dtypes, layout, activation):
    i = make_inputs(case, device, *dtypes, layout=layout)
    expected = op(i.X, i.groups, i.gamma, i.beta, i.eps, activation)[0]
    Y = op_inference(i.X, None, i.groups, i.gamma, i.beta, i.eps, activation)
    assert Y.stride() == expected.stride() and torch.equal(Y, expected)


def test_declined_inference_counts_once(device):
    i = make_inputs(FEW[0], device, torch.float32, layout="nchw")
    torch.ops.gn_override.reset_counters()
    op_inference(i.X, None, i.groups, i.gamma, i.beta, i.eps, "silu")
    assert calls("group_norm_act", device) == (0, 1)


@pytest.mark.cuda
@all_pins
@pytest.mark.parametrize("case", SCHEME_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtypes", SCHEME_DTYPES.values(), ids=SCHEME_DTYPES)
def test_inference_of_a_scheme(pin, dtypes, case, pins):  # noqa: F811
    """What a block leaves for others stands behind the statistics."""
    i = make_inputs(case, "cuda", *dtypes)
    pin(*pins)
    torch.ops.gn_override.reset_counters()
    Y = op_inference(i.X, None, i.groups, i.gamma, i.beta, i.eps, "silu")
    skip_unless_ran(pins[0])
    assert torch.equal(Y, op(i.X, i.groups, i.gamma, i.beta, i.eps, "silu")[0])


def skip_unless_ran(scheme: str) -> None:
    """Since the counters were reset."""
    if {name.split()[2] for name in torch.ops.gn_override.counters()} != {scheme}:
        pytest.skip(f"no {scheme} plan of such a geometry")


def run_add(inputs: Inputs, added: Tensor, activation: str) -> Results:
    i = inputs
    return Results(
        op_inference(i.X, added, i.groups, i.gamma, i.beta, i.eps, activation), None, None
    )


@few_cases
@pytest.mark.parametrize("dtypes", list(DTYPES.values())[:6], ids=list(DTYPES)[:6])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@all_activations
def test_added(device, case, dtypes, layout, activation):
    inputs = make_inputs(case, device, *dtypes, layout=layout)
    added = make_added(inputs)
    assert_parity_of_sum(run_add(inputs, added, activation), inputs, added, activation)


@pytest.mark.cuda
@all_pins
@pytest.mark.parametrize("case", SCHEME_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtypes", SCHEME_DTYPES.values(), ids=SCHEME_DTYPES)
def test_added_of_a_scheme(pin, dtypes, case, pins):  # noqa: F811
    inputs = make_inputs(case, "cuda", *dtypes)
    added = make_added(inputs)
    pin(*pins)
    torch.ops.gn_override.reset_counters()
    ours = run_add(inputs, added, "silu")
    skip_unless_ran(pins[0])
    if case.numel < 100_000:  # long doubles are slow
        assert_parity_of_sum(ours, inputs, added, "silu")
    else:
        torch.testing.assert_close(ours.Y, of_sum(inputs, added), rtol=0.02, atol=0.02)
    assert_same_bits(run_add(inputs, added, "silu"), ours)


def of_sum(inputs: Inputs, added: Tensor) -> Tensor:
    """silu of the norm by PyTorch's own functions, in float32 at least."""
    i, wide = inputs, torch.promote_types(inputs.X.dtype, torch.float32)
    X = i.X.to(wide) + added.to(wide).reshape(*added.shape, 1, 1)
    with override_off():
        Z = F.group_norm(X, i.groups, i.gamma.to(wide), i.beta.to(wide), i.eps)
        return F.silu(Z).to(i.X.dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_added_wherever_it_stands(shift, strided):
    inputs = make_inputs(Case("d10", (5, 40, 13, 11), 4), "cuda", torch.bfloat16)
    added = make_added(inputs)
    room = torch.empty(2 * added.numel() + shift, dtype=added.dtype, device="cuda")[shift:]
    placed = room.view(5, 80)[:, ::2] if strided else room[: added.numel()].view(5, 40)
    placed.copy_(added)
    ours = run_add(inputs, placed, "silu")
    assert_parity_of_sum(ours, inputs, added, "silu")


@pytest.mark.parametrize("adds", [True, False])
def test_inference_has_gradients(device, adds):
    """By an addition and group_norm_act."""
    i = make_inputs(FEW[0], device, torch.float32)
    operands = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta, make_added(i))]
    X, gamma, beta, added = operands
    if not adds:
        operands, added = operands[:3], None
    Y = op_inference(X, added, i.groups, gamma, beta, i.eps, "silu")
    ours = torch.autograd.grad(Y, operands, i.dY)
    with override_off():
        moved = X + added.reshape(*added.shape, 1, 1) if adds else X
        Z = F.group_norm(moved, i.groups, gamma, beta, i.eps)
        theirs = torch.autograd.grad(F.silu(Z), operands, i.dY)
    for mine, aten in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, aten, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (3, 8), (2, 8, 1, 1)], ids=str)
def test_added_of_another_shape(device, shape):
    X = lay_out(torch.randn(2, 8, 5, 3, device=device), "channels_last")
    with pytest.raises(ValueError, match=r"added must be \[N, C\]"):
        op_inference(X, torch.zeros(shape, device=device), 4, None, None, 1e-5, "silu")


# --- the functions themselves -----------------------------------------------------------------


def values_of(activation: str, Z: Tensor) -> tuple[Tensor, Tensor]:
    """activation(Z) and its derivative from our kernels, element by element.

    With gamma = 0, Z is beta; with dY = 1 at one pixel alone, dbeta is the derivative.
    """
    X = lay_out(torch.randn(1, Z.numel(), 2, 2, dtype=Z.dtype, device=Z.device), "channels_last")
    dY = torch.zeros_like(X)
    dY[..., 0, 0] = 1
    results = run(Inputs(X, torch.zeros_like(Z), Z, dY, 1), activation)
    return results.Y[0, :, 0, 0], results.dbeta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@fused_activations
def test_functions(device, activation, dtype):
    """Within a few units in the last place, far out too, where PyTorch's own are not."""
    Z = torch.cat([torch.linspace(-12, 12, 3001), torch.linspace(-80, 80, 161)]).to(dtype)
    wide = Z.double() if dtype == torch.float32 else Z.numpy().astype("longdouble")
    references = activate(wide, activation)
    least = 128 * torch.finfo(dtype).tiny  # Z times a gate that is not subnormal
    Z = Z.to(device)
    for ours, reference, is_slope in zip(
        values_of(activation, Z), references, (False, True), strict=True
    ):
        for z, a, r in zip(Z.tolist(), ours.tolist(), reference, strict=True):
            # A derivative near its zero is a difference of two terms.
            scale = max(abs(float(r)), 0.5 if is_slope and -2 < z < 0 else least)
            # The four roundings of an argument are relative errors of its exponential.
            argument = 1.6 * abs(z) + 0.0714 * abs(z) ** 3 if activation == "gelu_tanh" else 0
            units = 8 + 2 * argument
            assert abs(a - r) <= units * ulp(scale, dtype), f"{activation}({z}): {a}, exact {r}"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@fused_activations
def test_signs_and_ends(device, activation, dtype):
    inf = float("inf")
    Z = torch.tensor([0.0, 100.0, -100.0, float("nan"), inf], dtype=dtype[0], device=device)
    Y, slope = values_of(activation, Z)
    assert Y[:2].tolist() == [0, 100] and abs(float(Y[2])) < 1e-30
    assert abs(float(slope[0]) - (0 if activation == "relu" else 0.5)) < 2**-15
    assert slope[1] == 1 and abs(float(slope[2])) < 1e-30
    assert Y[3].isnan()
    assert Y[4] == inf


@few_cases
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@fused_activations
def test_not_a_number_stays_in_its_group(device, case, value, activation):
    inputs = make_inputs(case, device, torch.float32)
    clean = run(inputs, activation)
    n, c = case.N - 1, case.C // 2
    inputs.X[n, c].view(-1)[0] = value
    dirty = run(inputs, activation)
    g = c // case.D
    own = torch.zeros(case.shape, dtype=torch.bool, device=device)
    own[n, g * case.D : (g + 1) * case.D] = True
    for name in ("Y", "dX"):
        assert getattr(dirty, name)[own].isnan().all()
        assert torch.equal(getattr(dirty, name)[~own], getattr(clean, name)[~own])
    assert dirty.dgamma[g * case.D : (g + 1) * case.D].isnan().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("name", ["gamma", "beta", "mean", "rstd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
@all_activations
def test_not_a_number_with_a_payload_stays_one(device, activation, dtype, name, bits):
    """A NaN of ones alone: rounded to sixteen bits as numbers are, it would carry into zero."""
    inputs = make_inputs(FEW[0], device, dtype, torch.float32)
    clean = op(inputs.X, inputs.groups, inputs.gamma, inputs.beta, inputs.eps, activation, dtype)
    operands = {"gamma": inputs.gamma, "beta": inputs.beta, "mean": clean[1], "rstd": clean[2]}
    operands[name].view(torch.int32).view(-1)[:] = bits
    if name in ("gamma", "beta"):
        assert run(inputs, activation).Y.isnan().all()
    if name != "beta":
        dX, _, _ = op_backward(
            inputs.dY,
            inputs.X,
            operands["mean"],
            operands["rstd"],
            inputs.gamma,
            inputs.beta,
            inputs.groups,
            activation,
            [True] * 3,
        )
        assert dX.isnan().all()


# --- autograd ---------------------------------------------------------------------------------


def small(device: str, layout: str, affine: str = "both") -> list[Tensor | None]:
    torch.manual_seed(1)
    i = make_inputs(
        Case("small", (2, 6, 3, 2), 3), device, torch.float64, layout=layout, affine=affine
    )
    return [t if t is None else t.requires_grad_() for t in (i.X, i.gamma, i.beta)]


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@all_activations
def test_gradcheck(device, layout, affine, activation):
    tensors = small(device, layout, affine)
    given = [t for t in tensors if t is not None]

    def function(*present: Tensor) -> Tensor:
        rest = iter(present)
        X, gamma, beta = (None if t is None else next(rest) for t in tensors)
        return op(X, 3, gamma, beta, 1e-5, activation)[0]

    assert gradcheck(function, given, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, given)


@few_cases
@pytest.mark.parametrize("dtypes", [DTYPES["float"], DTYPES["bfloat16-float"]], ids=["f32", "mix"])
@fused_activations
def test_training(device, case, dtypes, activation):
    """The gradients of autograd are those of the backward operator; nothing more is saved."""
    inputs = away_from_kink(make_inputs(case, device, *dtypes), activation)
    want = run(inputs, activation)
    leaves = [t.detach().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Y, mean, rstd = op(leaves[0], case.G, *leaves[1:], inputs.eps, activation)
    assert sorted(t.data_ptr() for t in saved) == sorted(
        t.data_ptr() for t in (*leaves, mean, rstd)
    )
    assert Y.requires_grad and not mean.requires_grad and not rstd.requires_grad
    Y.backward(inputs.dY)
    assert_same_bits(Results(Y.detach(), mean, rstd, *(t.grad for t in leaves)), want)


@pytest.mark.parametrize("which", range(3), ids=["X", "weight", "bias"])
def test_operand_changed_before_backward(device, which):
    """An error, as of an operand of PyTorch's that it saves; here the bias is one, too."""
    i = make_inputs(FEW[0], device, torch.float32)
    leaves = [t.clone().requires_grad_() for t in (i.X, i.gamma, i.beta)]
    X, gamma, beta = leaves
    Y = gn_override.functional.group_norm(X, i.groups, gamma, beta, activation="silu")
    with torch.no_grad():
        leaves[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.sum().backward()


def test_parameters_of_inference_mode(device):
    """PyTorch saves gamma for backward, which an inference tensor cannot be, and no beta."""
    i = make_inputs(FEW[0], device, torch.float32)
    X = i.X.requires_grad_()
    with torch.inference_mode():
        gamma, beta = i.gamma.clone(), i.beta.clone()
    op(X, i.groups, i.gamma, beta, i.eps, "silu")[0].backward(i.dY)
    assert torch.equal(X.grad, run(i, "silu").dX)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        op(X, i.groups, gamma, i.beta, i.eps, "silu")


def test_frozen_parameters(device):
    """Only the gradients that are needed are asked for."""
    i = make_inputs(FEW[0], device, torch.float32)
    X = i.X.requires_grad_()
    op(X, i.groups, i.gamma, i.beta, i.eps, "silu")[0].backward(i.dY)
    assert torch.equal(X.grad, run(i, "silu").dX)
    assert i.gamma.grad is None and i.beta.grad is None


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@all_activations
def test_functorch(device, layout, activation):
    X, gamma, beta = (t.detach() for t in small(device, layout))

    def ours(x: Tensor, gamma: Tensor = gamma) -> Tensor:
        return op(x, 3, gamma, beta, 1e-5, activation)[0]

    def theirs(x: Tensor, gamma: Tensor = gamma) -> Tensor:
        return TORCHS[activation](F.group_norm(x.contiguous(), 3, gamma, beta))

    func = torch.func
    for transformed in (
        lambda f: func.vmap(f)(torch.stack([X, X.cos()])),
        lambda f: func.grad(lambda x: f(x).cos().sum())(X),
        lambda f: func.jvp(f, (X,), (X.cos(),)),
        lambda f: func.vmap(func.grad(lambda x: f(x).cos().sum()))(torch.stack([X, X.cos()])),
        lambda f: func.jacrev(lambda g: f(X, g))(gamma),
        lambda f: func.hessian(lambda g: f(X, g).cos().sum())(gamma),
    ):
        torch.testing.assert_close(transformed(ours), transformed(theirs))


def test_only_what_is_added_wants_a_gradient(device):
    i = make_inputs(FEW[0], device, torch.float32)
    added = make_added(i).requires_grad_()
    assert op_inference(i.X, added, i.groups, i.gamma, i.beta, i.eps, "silu").requires_grad


def test_only_what_is_added_has_a_tangent(device):
    X, gamma, beta = (t.detach() for t in small(device, "channels_last"))
    added = X[..., 0, 0].contiguous()

    def theirs(t: Tensor) -> Tensor:
        return F.silu(F.group_norm(X.contiguous() + t[..., None, None], 3, gamma, beta))

    _, tangent = torch.func.jvp(theirs, (added,), (added.cos(),))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(added, added.cos())
        Y = op_inference(X, dual, 3, gamma, beta, 1e-5, "silu")
        torch.testing.assert_close(forward_ad.unpack_dual(Y).tangent, tangent)


@pytest.mark.parametrize("which", range(3), ids=["X", "weight", "bias"])
def test_only_one_operand_has_a_tangent(device, which):
    tensors = [t.detach() for t in small(device, "channels_last")]
    moved = tensors[which]

    def theirs(t: Tensor) -> Tensor:
        X, *parameters = [*tensors[:which], t, *tensors[which + 1 :]]
        return F.silu(F.group_norm(X.contiguous(), 3, *parameters))

    _, tangent = torch.func.jvp(theirs, (moved,), (moved.cos(),))
    with forward_ad.dual_level():
        tensors[which] = forward_ad.make_dual(moved, moved.cos())
        X, *parameters = tensors
        Y, *_ = op(X, 3, *parameters, 1e-5, "silu")
        torch.testing.assert_close(forward_ad.unpack_dual(Y).tangent, tangent)


@pytest.mark.parametrize("which", range(3), ids=["X", "weight", "bias"])
def test_function_of_a_dual_operand_is_pytorchs(device, which):
    """Its own norm and activation, in their layout."""
    tensors = [t.detach() for t in small(device, "channels_last")]

    def primal_and_tangent() -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            operands = list(tensors)
            operands[which] = forward_ad.make_dual(tensors[which], tensors[which].cos())
            Y = gn_override.functional.group_norm(operands[0], 3, *operands[1:], 1e-5, "relu")
            return tuple(t.clone() for t in forward_ad.unpack_dual(Y))

    with gn_override.disabled():
        try:
            stock = primal_and_tangent()
        except RuntimeError as error:
            pytest.xfail(f"stock cannot do it: {error}")
    torch.testing.assert_close(primal_and_tangent(), stock, check_stride=True)


def test_second_derivative_of_the_backward_operator_is_an_error(device):
    i = make_inputs(FEW[0], device, torch.float32)
    _, mean, rstd = op(i.X, i.groups, i.gamma, i.beta, i.eps, "silu")
    dX, _, _ = op_backward(
        i.dY.requires_grad_(), i.X, mean, rstd, i.gamma, i.beta, i.groups, "silu", [True] * 3
    )
    with pytest.raises(RuntimeError, match="not implemented"):
        dX.sum().backward()


# --- what is declined, and errors -------------------------------------------------------------


@pytest.mark.parametrize("case", EMPTY_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@all_activations
def test_empty_batch(device, case, layout, activation):
    inputs = make_inputs(case, device, torch.float32, layout=layout)
    ours = run(inputs, activation)
    assert ours.Y.shape == ours.dX.shape == inputs.X.shape
    assert ours.mean.shape == ours.rstd.shape == (0, case.G)
    assert not ours.dgamma.any() and not ours.dbeta.any()
    assert ours.dgamma.shape == ours.dbeta.shape == (case.C,)


def test_unknown_activation(device):
    i = make_inputs(FEW[0], device, torch.float32)
    message = 'activation must be one of identity, relu, silu, gelu, gelu_tanh, got "swish"'
    _, mean, rstd = op(i.X, i.groups, i.gamma, i.beta)
    for X in (i.X, i.X.contiguous(), i.X.to("meta"), i.X.detach().requires_grad_()):
        with pytest.raises(ValueError, match=message):
            op(X, i.groups, None, None, i.eps, "swish")
    with pytest.raises(ValueError, match=message):
        op_backward(i.dY, i.X, mean, rstd, i.gamma, i.beta, i.groups, "swish", [True] * 3)


WRONG = {
    "no groups": lambda x, w: (x, 0, w, w),
    "negative groups": lambda x, w: (x, -2, w, w),
    "indivisible": lambda x, w: (x, 5, w, w),
    "long weight": lambda x, w: (x, 2, torch.cat([w, w]), w),
    "matrix bias": lambda x, w: (x, 2, w, w[None]),
    "one dimension": lambda x, w: (x.flatten(), 2, w, w),
    "integers": lambda x, w: (x.long(), 2, None, None),
    "float8": lambda x, w: (x.to(torch.float8_e4m3fn), 2, None, None),
    "half weight": lambda x, w: (x, 2, w.half(), w.half()),
    "double weight": lambda x, w: (x, 2, w.double(), w.double()),
    "two dtypes": lambda x, w: (x, 2, w, w.double()),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_wrong_arguments_are_refused_as_by_stock(device, wrong, layout):
    arguments = wrong(
        lay_out(torch.randn(2, 4, 3, 3, device=device), layout), torch.randn(4, device=device)
    )
    with override_off(), pytest.raises(Exception) as theirs:
        torch.group_norm(*arguments)
    for X in (arguments[0], arguments[0].detach().clone()):
        with pytest.raises(type(theirs.value)) as ours:
            op(X, *arguments[1:], 1e-5, "silu")
        assert str(ours.value) == str(theirs.value)


def test_sparse_inputs_are_refused_as_by_stock(device):
    X = torch.ones(2, 4, 3, 3, device=device).to_sparse()
    with override_off(), pytest.raises(Exception) as theirs:
        torch.group_norm(X, 2)
    with pytest.raises(type(theirs.value)) as ours:
        gn_override.functional.group_norm(X, 2, activation="silu")
    assert str(ours.value) == str(theirs.value)


def with_strided(inputs: Inputs, which: str) -> Inputs:
    strided = getattr(inputs, which).repeat_interleave(2)[::2]
    return dataclasses.replace(inputs, **{which: strided})


@pytest.mark.parametrize("which", ["gamma", "beta"])
def test_parameters_that_are_not_contiguous(device, which):
    i = make_inputs(FEW[0], device, torch.float32)
    assert_same_bits(run(with_strided(i, which), "silu"), run(i, "silu"))


@pytest.mark.parametrize("case", [FEW[0], Case("sequence", (2, 96, 7), 32)], **by_id)
@pytest.mark.parametrize("which", ["gamma", "beta"])
def test_double_backward_of_parameters_that_are_not_contiguous(device, which, case):
    def derivatives(i: Inputs) -> list[Tensor]:
        operands = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)]
        Y = gn_override.functional.group_norm(
            operands[0], i.groups, *operands[1:], i.eps, activation="silu"
        )
        first = torch.autograd.grad(Y, operands, i.dY, create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), operands)]

    i = make_inputs(case, device, torch.float32)
    torch.testing.assert_close(derivatives(with_strided(i, which)), derivatives(i))


@pytest.mark.parametrize("bias", [torch.ones(3), torch.ones(8).double()], ids=["short", "double"])
def test_backward_refuses_a_wrong_bias(device, bias):
    X = lay_out(torch.randn(2, 8, 5, 3, device=device), "channels_last")
    ones = torch.ones(8, device=device)
    _, mean, rstd = op(X, 4, ones, ones, 1e-5, "silu")
    before = calls("group_norm_act_backward", device)[0]
    with pytest.raises(RuntimeError):
        op_backward(X, X, mean, rstd, ones, bias.to(device), 4, "silu", [True] * 3)
    assert calls("group_norm_act_backward", device)[0] == before


@pytest.mark.parametrize("which", ["X", "gamma", "beta"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_that_was_given_back(device, which, backward):
    i = make_inputs(FEW[0], device, torch.float32)
    statistics = torch.ones(2, i.X.shape[0], i.groups, device=device).unbind()
    getattr(i, which).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        if backward:
            mask = [True] * 3
            op_backward(i.dY, i.X, *statistics, i.gamma, i.beta, i.groups, "silu", mask)
        else:
            op(i.X, i.groups, i.gamma, i.beta, i.eps, "silu")


def test_gradients_of_parameters_that_are_not_there():
    """They have dY's type, as if there were any; the composite is asked, on X of a CPU."""
    X, dY = (lay_out(torch.randn(2, 8, 5, 3), "channels_last") for _ in range(2))
    statistics = torch.ones(2, 2, 4).unbind()
    gradients = op_backward(dY, X.half(), *statistics, None, None, 4, "silu", [True] * 3)
    assert [t.dtype for t in gradients] == [torch.half, torch.float, torch.float]


def test_switch_does_not_concern_them(device):
    inputs = make_inputs(FEW[0], device, torch.float32)
    on = run(inputs, "gelu")
    with gn_override.disabled(), expect_taken(inputs):
        off = run(inputs, "gelu")
    assert_same_bits(on, off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_autocast(device, dtype, layout):
    """As F.group_norm followed by the activation: in float on CUDA, as it is on the CPU."""
    inputs = make_inputs(FEW[0], device, dtype, layout=layout)
    i = inputs
    leaves = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)]
    with torch.autocast(device, torch.bfloat16):
        want = F.silu(F.group_norm(i.X, i.groups, i.gamma, i.beta))
        Y = op(leaves[0], i.groups, *leaves[1:], 1e-5, "silu")[0]
    assert Y.dtype == want.dtype
    torch.testing.assert_close(Y, want)
    Y.backward(i.dY.to(Y.dtype))
    assert [t.grad.dtype for t in leaves] == [dtype] * 3


# --- tracing ----------------------------------------------------------------------------------


@few_cases
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", [DTYPES["float"], DTYPES["half-float"]], ids=["f32", "mix"])
def test_opcheck(device, case, layout, dtypes):
    inputs = make_inputs(case, device, *dtypes, layout=layout)
    i = inputs
    leaves = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)]
    torch.library.opcheck(op, (leaves[0], i.groups, *leaves[1:], i.eps, "gelu"), rtol=0, atol=0)
    _, mean, rstd = op(i.X, i.groups, i.gamma, i.beta, i.eps, "gelu")
    for mask in (ALL, (False, True, True)):
        torch.library.opcheck(
            op_backward,
            (i.dY, i.X, mean, rstd, i.gamma, i.beta, i.groups, "gelu", list(mask)),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@fused_activations
def test_compile(device, dynamic, layout, activation):
    torch._dynamo.reset()
    inputs = make_inputs(FEW[0], device, torch.float32, layout=layout)

    def step(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return op(X, inputs.groups, gamma, beta, 1e-5, activation)[0]

    results = []
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for function in (step, compiled):
        leaves = [t.detach().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta)]
        Y = function(*leaves)
        Y.backward(inputs.dY)
        results.append((Y.detach(), *(t.grad for t in leaves)))
    for eager, ours in zip(*results, strict=True):
        assert torch.equal(eager, ours)
        assert eager.stride() == ours.stride()


def test_explain():
    """The answer is of the problem that the operator has, which names the activation."""
    i = make_inputs(FEW[0], "cpu", torch.float32)
    arguments = {"weight": i.gamma, "bias": i.beta}
    answer = gn_override.explain(i.X, i.groups, activation="gelu_tanh", **arguments)
    assert answer.served and "gelu_tanh" in answer.problem
    assert "identity" not in gn_override.explain(i.X, i.groups, **arguments).problem
    shape = explain_shape(FEW[0].shape, FEW[0].G, activation="silu", backward=True, device="cuda")
    assert "silu" in shape.problem
    for backward in (False, True):  # statistics in float do not keep it from registers
        small = explain_shape(
            (2, 2560, 8, 8),
            32,
            dtype=torch.bfloat16,
            activation="silu",
            backward=backward,
            device="cuda",
        )
        assert small.rule == "registers"
    with pytest.raises(ValueError, match="activation must be one of identity, relu"):
        gn_override.explain(i.X, i.groups, activation="swish")


# --- the bound can fail -----------------------------------------------------------------------


@pytest.mark.parametrize("result", RESULTS)
def test_bound_catches(result):
    inputs = make_inputs(FEW[0], "cpu", torch.float32)
    wrong = copy.copy(run(inputs, "silu"))
    setattr(wrong, result, getattr(wrong, result) * (1 + 1e-3))
    with pytest.raises(AssertionError, match=f"{result}: error"):
        assert_parity(wrong, inputs, "silu")


def test_reference_agrees_with_pytorch():
    Z = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for activation in ACTIVATIONS:
        theirs = torchs(activation, Z, torch.ones_like(Z))
        torch.testing.assert_close(activate(Z, activation), theirs)
        arrays = activate(Z.numpy().astype("longdouble"), activation)
        torch.testing.assert_close(
            tuple(torch.from_numpy(a.astype("float64")) for a in arrays), theirs
        )
