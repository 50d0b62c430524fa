"""Parity with aten: every result of forward and backward against the fp64 reference.

Our error may exceed stock's own by the rounding of the last place alone (reference.py says why).
Each test asserts by the counters which kernels really ran.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import mappings
import pytest
import torch
from reference import (
    ALL,
    CHANNELS_LAST_LAYOUTS,
    EPS,
    GRAD_LAYOUTS,
    LAYOUTS,
    MASKS,
    RESULTS,
    Inputs,
    Results,
    assert_close,
    assert_layout_follows,
    assert_parity,
    composite,
    exact,
    expect_calls,
    is_channels_last,
    is_mixed,
    lay_out,
    make_inputs,
    native,
    override_off,
    stock,
    ulp,
)
from shapes import CPU_CASES, EDGE_CASES, KERNEL_CASES, MODEL_CASES, Case, cpu_subset

import gn_override

# (dtype of X, dtype of the parameters): what stock CPU takes, and what we serve on a GPU.
DTYPES = {
    "float": (torch.float32, None),
    "double": (torch.float64, None),
    "half": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "half-float": (torch.float16, torch.float32),
    "bfloat16-float": (torch.bfloat16, torch.float32),
}

all_dtypes = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
by_id = {"ids": lambda value: value.name if isinstance(value, Case) else None}

pytestmark = pytest.mark.usefixtures("poison")


def by_name(name: str) -> Case:
    return next(case for case in EDGE_CASES if case.name == name)


# Three shapes for the products of options: vectors fit, vectors do not fit, a volume.
FEW = ("d10", "c30", "volume")
few_cases = pytest.mark.parametrize("case", [by_name(name) for name in FEW], **by_id)


def run_ours(inputs: Inputs, mask=ALL) -> Results:
    """The native ops; both must run on our kernels where X is channels-last and not empty.

    Where that is NCHW as well, stock's kernels answer, except on CUDA for mixed types, which stock
    refuses there.
    """
    one_layout = inputs.X.shape[1] == 1 or inputs.sizes[2] == 1
    ours = is_channels_last(inputs.X) or (inputs.X.is_cuda and is_mixed(inputs) and one_layout)
    backward = ours if any(mask) else None
    device = inputs.X.device.type
    with expect_calls(device, forward=ours, backward=backward):
        if any(mask):
            return native(inputs, mask)
        i = inputs
        return Results(*torch.ops.aten.native_group_norm(i.X, i.gamma, i.beta, *i.sizes, i.eps))


@pytest.mark.parametrize("case", EDGE_CASES, **by_id)
@all_dtypes
def test_edge_shapes(device, case, dtypes):
    inputs = make_inputs(case, device, *dtypes)
    assert is_channels_last(inputs.X) == (not case.one_layout)
    ours = run_ours(inputs)
    assert_parity(ours, inputs)
    if not case.one_layout:
        assert_layout_follows(inputs.X, ours.Y, ours.dX)


@pytest.mark.parametrize("case", cpu_subset(MODEL_CASES), **by_id)
def test_model_shapes(device, case):
    inputs = make_inputs(case, device, getattr(torch, case.dtype))
    ours = run_ours(inputs)
    assert_parity(ours, inputs)
    assert_layout_follows(inputs.X, ours.Y, ours.dX)


# Without the largest, whose reference alone takes seconds: N = 128 is n129's in EDGE_CASES.
@pytest.mark.parametrize(
    "case", [case for case in CPU_CASES if case.numel < 1 << 24], ids=lambda case: case.id
)
def test_cpu_benchmark_shapes(case):
    inputs = make_inputs(case, "cpu", getattr(torch, case.dtype))
    assert_parity(run_ours(inputs), inputs)


def for_gpu(cases: Iterable[Case]) -> list[Any]:
    """Parameters; the reference of the largest takes tens of GiB."""
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.large] * (case.numel > 1 << 28))
        for case in cases
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "case", for_gpu((*KERNEL_CASES, *(case for case in MODEL_CASES if not case.fits_cpu)))
)
def test_gpu_benchmark_and_model_shapes(case):
    inputs = make_inputs(case, "cuda", getattr(torch, case.dtype))
    ours = run_ours(inputs)
    assert_parity(ours, inputs)
    assert_layout_follows(inputs.X, ours.Y, ours.dX)


@few_cases
@all_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_input(device, case, dtypes, layout):
    """Through F.group_norm, as stock's native ops refuse some of these: no layout is an error."""
    if layout != "channels_last" and dtypes[1] is not None and device == "cuda":
        pytest.skip("stock refuses half input with float parameters, and has these layouts")
    inputs = make_inputs(case, device, *dtypes, layout=layout)
    ran = layout in (*CHANNELS_LAST_LAYOUTS, "sliced")  # the last after one copy
    with expect_calls(device, forward=ran, backward=ran):
        ours = composite(inputs)
    if layout != "permuted":
        assert_layout_follows(lay_out(inputs.X, "channels_last" if ran else "nchw"), ours.Y)
        assert layout == "sliced" or ours.dX.stride() == ours.Y.stride()
    assert_parity(ours, inputs, only=("Y", "dX", "dgamma", "dbeta"))


@few_cases
@all_dtypes
@pytest.mark.parametrize("dY_layout", GRAD_LAYOUTS)
def test_layouts_of_gradient(device, case, dtypes, dY_layout):
    """dX follows X whatever dY's layout is, expanded (stride 0) ones included."""
    inputs = make_inputs(case, device, *dtypes, dY_layout=dY_layout)
    ours = run_ours(inputs)
    assert_parity(ours, inputs)
    assert_layout_follows(inputs.X, ours.Y, ours.dX)


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
@pytest.mark.parametrize("dY_layout", GRAD_LAYOUTS)
def test_layouts_of_gradient_for_contiguous_input(device, case, dtype, dY_layout):
    """The converse: an NCHW input goes to aten, and its gradient is right for any dY."""
    inputs = make_inputs(case, device, dtype, layout="nchw", dY_layout=dY_layout)
    with expect_calls(device, forward=False, backward=False):
        ours = composite(inputs)
    assert_parity(ours, inputs, only=("Y", "dX", "dgamma", "dbeta"))


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU kernels of one instruction set, which the machine has."""
    choose = torch.ops.gn_override.set_cpu_instruction_set
    best = json.loads(torch.ops.gn_override.build_info())["cpu_instruction_set"]
    if not choose(request.param):
        pytest.skip(f"this machine does not have {request.param}")
    yield request.param
    assert choose(best)


instruction_sets = pytest.mark.parametrize(
    "instruction_set", ["baseline", "avx2", "avx512"], indirect=True
)


def in_huge_pages(tensor: torch.Tensor) -> float:
    """The share of its memory for which the system was asked for huge pages."""
    begin = tensor.data_ptr()
    of_areas = mappings.areas(begin, begin + tensor.nbytes)
    asked = sum(shared for shared, fields in of_areas if "hg" in fields["VmFlags"].split())
    return asked / tensor.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="the system is not asked elsewhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_in_new_memory(dtype, poison):
    """Large outputs are written otherwise where the system has yet to give their pages."""
    inputs = make_inputs(Case("large", (4, 256, 144, 144), 32), "cpu", dtype)
    used = native(inputs)
    poison.value = False
    ctypes.CDLL(None).malloc_trim(0)  # what tests before have freed is given back
    with expect_calls("cpu", forward=True, backward=True):
        new = native(inputs)
    for name in ("Y", "dX"):
        assert in_huge_pages(getattr(new, name)) > 0.9, name
    for name in RESULTS:
        assert torch.equal(getattr(new, name), getattr(used, name)), name
    with override_off():
        assert in_huge_pages(native(inputs).Y) == 0


@instruction_sets
@few_cases
@all_dtypes
@pytest.mark.parametrize("size", [1.0, 2.0**-22], ids=["normal", "subnormal half"])
def test_instruction_sets(instruction_set, case, dtypes, size):
    """Those that the machine would not choose, too; results down to where half is subnormal."""
    inputs = make_inputs(case, "cpu", *dtypes)
    inputs.gamma, inputs.beta, inputs.dY = (
        t * size for t in (inputs.gamma, inputs.beta, inputs.dY)
    )
    assert_parity(run_ours(inputs), inputs)


@instruction_sets
@pytest.mark.parametrize(
    "dtype, size",
    [(torch.float32, 1e19), (torch.bfloat16, 1e19), (torch.float64, 1e154)],
    ids=["float", "bfloat16", "double"],
)
def test_variances_that_overflow(instruction_set, dtype, size):
    """Where squares overflow, the variance is infinite: rstd is 0, and Y is beta."""
    inputs = make_inputs(Case("overflow", (1, 320, 16, 16), 32), "cpu", dtype)
    inputs.X.mul_(size)
    ours = native(inputs)
    assert ours.rstd.eq(0).all()
    assert torch.equal(ours.Y, inputs.beta[:, None, None].expand_as(ours.Y))


@instruction_sets
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@pytest.mark.parametrize("shape", [(2, 30, 7, 7), (1, 96, 5, 331)], ids=["folded", "chunks"])
@pytest.mark.parametrize("value", [1 / 3, -1.7e10, 37478043102426.08])
def test_constant_groups(instruction_set, dtype, shape, value):
    """They have no variance, whatever multiples of their mean are rounded to."""
    inputs = make_inputs(Case("constant", shape, 3), "cpu", dtype)
    inputs.X.fill_(value)
    ours = native(inputs)
    exact = torch.full_like(ours.rstd, inputs.eps**-0.5)
    torch.testing.assert_close(ours.rstd, exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(ours.mean, torch.full_like(ours.mean, value))
    assert torch.equal(ours.Y, inputs.beta[:, None, None].expand_as(ours.Y))


@instruction_sets
def test_subnormal_halves_where_floats_are_flushed(instruction_set):
    """They are no subnormal floats: torch.set_flush_denormal() changes nothing."""
    inputs = make_inputs(Case("small", (2, 16, 8, 8), 4), "cpu", torch.float16)
    inputs.X.mul_(3e-5)
    inputs.eps = 1e-12
    plain = native(inputs)
    assert torch.set_flush_denormal(True)
    try:
        flushed = native(inputs)
    finally:
        torch.set_flush_denormal(False)
    for name in ("Y", "mean", "rstd"):
        assert torch.equal(getattr(plain, name), getattr(flushed, name)), name


@instruction_sets
@pytest.mark.parametrize("first", [3000.0, 100.0, 1.0])
def test_first_pixels_far_from_the_rest(instruction_set, first):
    """They do not cost the others' squares their digits, nor the mean its own."""
    inputs = make_inputs(Case("outliers", (16, 300, 512), 300), "cpu", torch.float32)
    inputs.X[:, :, :2] *= first
    assert_parity(run_ours(inputs), inputs)


@instruction_sets
def test_mean_of_folded_rows(instruction_set):
    """Rows of several pixels start from a mean of all of these, not of the first."""
    for _ in range(10):
        inputs = make_inputs(Case("folded", (4, 4, 2048), 4), "cpu", torch.float32)
        inputs.X -= inputs.X.mean((0, 2), keepdim=True)
        assert_parity(native(inputs), inputs, only=("mean",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_means_of_many_single_channels(device, dtype):
    """The worst of a thousand, where no other channel of the group evens a channel's error out."""
    inputs = make_inputs(Case("channels", (64, 16, 511), 16), device, dtype)
    inputs.X += 3
    assert_parity(native(inputs), inputs)


@few_cases
@all_dtypes
@pytest.mark.parametrize("affine", ["none", "weight", "bias"])
def test_without_weight_or_bias(device, case, dtypes, affine):
    """dgamma and dbeta are honoured where asked for, even without weight."""
    inputs = make_inputs(case, device, *dtypes, affine=affine)
    ours = run_ours(inputs)
    assert_parity(ours, inputs)


@few_cases
@pytest.mark.parametrize("dtypes", [DTYPES["float"], DTYPES["bfloat16-float"]], ids=["f32", "mix"])
@pytest.mark.parametrize("affine", ["both", "none"])
@pytest.mark.parametrize(
    "mask", [m for m in MASKS if any(m)], ids=lambda m: "".join("01"[bit] for bit in m)
)
def test_output_masks(device, case, dtypes, affine, mask):
    """Gradients that are not asked for are undefined, the others are as without the mask."""
    inputs = make_inputs(case, device, *dtypes, affine=affine)
    ours = run_ours(inputs, mask)
    assert [g is not None for g in (ours.dX, ours.dgamma, ours.dbeta)] == list(mask)
    assert_parity(ours, inputs, mask)
    whole = native(inputs)
    for name in ("dX", "dgamma", "dbeta"):
        if getattr(ours, name) is not None:
            assert torch.equal(getattr(ours, name), getattr(whole, name)), name


def test_no_gradient_asked_for(device):
    """A mask of three False returns three undefined tensors."""
    i = make_inputs(by_name("d3"), device, torch.float32)
    _, mean, rstd = torch.ops.aten.native_group_norm(i.X, i.gamma, i.beta, *i.sizes, i.eps)
    with expect_calls(device, forward=None, backward=True):
        grads = torch.ops.aten.native_group_norm_backward(
            i.dY, i.X, mean, rstd, i.gamma, *i.sizes, [False] * 3
        )
    assert grads == (None, None, None)


@few_cases
@all_dtypes
@pytest.mark.parametrize("eps", [0.5, 0.0, 1e-3, 1e-12])
def test_eps(device, case, dtypes, eps):
    inputs = make_inputs(case, device, *dtypes, eps=eps)
    assert_parity(run_ours(inputs), inputs)


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
def test_negative_eps(device, case, dtype):
    """OpInfo's samples use -0.5; variances here are about 4, so nothing is a NaN."""
    inputs = make_inputs(case, device, dtype, eps=-0.5)
    assert_parity(run_ours(inputs), inputs)


@few_cases
@all_dtypes
def test_module(device, case, dtypes):
    """nn.GroupNorm in training, as programs call it."""
    if dtypes[1] is not None and device == "cuda":
        pytest.skip("stock refuses half input with float parameters")
    inputs = make_inputs(case, device, *dtypes)
    norm = torch.nn.GroupNorm(case.G, case.C, device=device, dtype=inputs.gamma.dtype)
    with torch.no_grad():
        norm.weight.copy_(inputs.gamma)
        norm.bias.copy_(inputs.beta)
    X = inputs.X.clone().requires_grad_()
    with expect_calls(device, forward=True, backward=True):
        Y = norm(X)
        Y.backward(inputs.dY)
    ours = Results(Y.detach(), None, None, X.grad, norm.weight.grad, norm.bias.grad)
    assert_parity(ours, inputs, only=("Y", "dX", "dgamma", "dbeta"))
    assert_layout_follows(inputs.X, Y, X.grad)


@few_cases
@all_dtypes
def test_results_have_stock_dtypes(device, case, dtypes):
    """mean and rstd are [N, G] in X's dtype, in float where the types are mixed."""
    inputs = make_inputs(case, device, *dtypes)
    ours = run_ours(inputs)
    param = dtypes[1] or dtypes[0]
    assert ours.Y.dtype == ours.dX.dtype == dtypes[0]
    assert ours.mean.dtype == ours.rstd.dtype == param
    assert ours.dgamma.dtype == ours.dbeta.dtype == param
    assert ours.mean.shape == ours.rstd.shape == (case.N, case.G)
    assert ours.dgamma.shape == ours.dbeta.shape == (case.C,)
    for tensor in (ours.mean, ours.rstd, ours.dgamma, ours.dbeta):
        assert tensor.is_contiguous()


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
def test_off_is_stock_bit_for_bit(device, case, dtype):
    inputs = make_inputs(case, device, dtype)
    with override_off():
        first = composite(inputs)
    gn_override.disable()
    torch.ops.gn_override.reset_counters()
    second = composite(inputs)
    gn_override.enable()
    assert not gn_override.report().calls
    for name in ("Y", "dX", "dgamma", "dbeta"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


# --- the bound itself can fail ---------------------------------------------------------------

# Each changes one result as a bug would.
PERTURBATIONS = {
    "one element off": lambda t: t.reshape(-1)[t.numel() // 2].add_(1e-2 * t.abs().max()),
    "one element unwritten": lambda t: t.reshape(-1)[-1:].fill_(math.nan),
    "scaled": lambda t: t.mul_(1.02),
    "two elements swapped": lambda t: _swap_extremes(t),
}


def _swap_extremes(t: torch.Tensor) -> None:
    flat = t.reshape(-1)
    low, high = int(flat.argmin()), int(flat.argmax())
    flat[[low, high]] = flat[[high, low]]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("change", PERTURBATIONS.values(), ids=PERTURBATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_bound_catches(result, change, dtype):
    """The check that all parity tests share rejects small errors in every result."""
    inputs = make_inputs(by_name("d3"), "cpu", dtype, layout="nchw")
    theirs = stock(inputs)
    reference = exact(inputs)
    wrong = copy.copy(theirs)
    tensor = getattr(theirs, result).clone()
    change(tensor)
    setattr(wrong, result, tensor)
    assert_close(getattr(theirs, result), getattr(theirs, result), getattr(reference, result))
    with pytest.raises(AssertionError, match=f"{result}: error"):
        assert_parity(wrong, inputs, theirs=[theirs])


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_bound_is_a_few_units_in_the_last_place(result, dtype):
    """Six of them are too many for the largest element; the exact value is none too many."""
    inputs = make_inputs(by_name("d3"), "cpu", dtype, layout="nchw")
    theirs, reference = stock(inputs), exact(inputs)
    value, unit = getattr(reference, result), ulp(reference.scale[result], dtype)
    want = torch.as_tensor(value.astype("float64") if dtype == torch.float64 else value)
    at = int(want.abs().argmax())
    for units, caught in ((0, False), (6, True)):
        wrong = copy.copy(theirs)
        setattr(wrong, result, getattr(theirs, result).clone())
        getattr(wrong, result).reshape(-1)[at] = want.reshape(-1)[at] + units * unit
        match = f"{result}: error"
        with pytest.raises(AssertionError, match=match) if caught else contextlib.nullcontext():
            assert_parity(wrong, inputs, theirs=[theirs])


def test_reference_agrees_with_autograd():
    """The formulas of the reference against autograd's derivative of the plain definition."""
    inputs = make_inputs(by_name("d3"), "cpu", torch.float64, layout="nchw")
    N, C, HxW, G = inputs.sizes
    X, gamma, beta = (t.detach().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta))
    x = X.reshape(N, G, -1)
    centred = x - x.mean(-1, keepdim=True)
    xhat = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    Y = xhat.reshape(N, C, HxW) * gamma[:, None] + beta[:, None]
    Y.backward(inputs.dY.reshape(Y.shape))
    reference = exact(inputs)
    want = {
        "Y": Y.detach().reshape(X.shape),
        "dX": X.grad,
        "dgamma": gamma.grad,
        "dbeta": beta.grad,
    }
    for name, value in want.items():
        got = torch.from_numpy(getattr(reference, name).astype("float64"))
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)


def test_fresh_memory_is_poisoned(device):
    """The fixture that all of these run under does what it says, for large and small blocks."""
    fresh = [torch.empty(numel, device=device) for numel in (100, 1 << 16, 1 << 22)]
    assert all(block.isnan().all() for block in fresh)
