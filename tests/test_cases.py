"""What broke group normalisation before: one or more tests for each reported class of bug.

The numbers in the names are those of the list that the project keeps; issue numbers are
pytorch/pytorch's. Cases that need a GPU by their nature (streams, graphs, other devices, more than
2^31 elements) are in test_cuda.py; transforms (vmap, jvp, double backward) in test_dispatch.py.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import (
    ATEN,
    BACKWARD,
    CAST,
    FORWARD,
    FUSED,
    GRAD_LAYOUTS,
    TORCH,
    Inputs,
    Results,
    assert_close,
    assert_layout_follows,
    assert_parity,
    calls,
    composite,
    exact,
    expect_calls,
    is_channels_last,
    lay_out,
    make_inputs,
    native,
    override_off,
    stock,
    ulp,
)
from shapes import EDGE_CASES, EMPTY_CASES, Case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gn_override

GRADIENTS = ("dX", "dgamma", "dbeta")
COMPOSITE = ("Y", *GRADIENTS)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
FLOATS = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"]
)

pytestmark = pytest.mark.usefixtures("poison")


def edge(name: str) -> Case:
    return next(case for case in EDGE_CASES + EMPTY_CASES if case.name == name)


def outcome(call) -> tuple:
    """What a call does: its result, or its exception's type and text."""
    try:
        return "returned", call()
    except Exception as error:
        return type(error), str(error)


def equal(a, b) -> bool:
    """Nested results are equal bit for bit (a NaN equals a NaN), dtypes and strides too."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and torch.equal(torch.isnan(a), torch.isnan(b))
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def assert_same_as_off(call) -> tuple:
    """The call returns, or raises, exactly what it does with the override off."""
    on = outcome(call)
    with override_off():
        off = outcome(call)
    assert equal(on, off), f"on: {on}\noff: {off}"
    return on


# --- 1: layout of the outputs ----------------------------------------------------------------


@FLOATS
@pytest.mark.parametrize("name", ["c30", "volume", "volume_t1", "n1", "w1", "h1"])
def test_01_outputs_are_channels_last(device, name, dtype):
    """#111824, #59168: 2-D and 3-D images keep their layout, forward and backward."""
    inputs = make_inputs(edge(name), device, dtype)
    form = torch.channels_last if inputs.X.dim() == 4 else torch.channels_last_3d
    assert inputs.X.is_contiguous(memory_format=form)
    with expect_calls(device, forward=True, backward=True):
        ours = composite(inputs)
    assert ours.Y.is_contiguous(memory_format=form)
    assert ours.dX.is_contiguous(memory_format=form)
    assert_parity(ours, inputs, only=COMPOSITE)


@FLOATS
def test_01_sequences(device, dtype):
    """[N, C, L] as `x.transpose(1, 2)` gives it: never an error, values as stock's."""
    X = torch.randn(3, 20, 64, device=device, dtype=dtype).transpose(1, 2)
    norm = nn.GroupNorm(32, 64, device=device, dtype=dtype)
    inputs = Inputs(X, norm.weight.detach(), norm.bias.detach(), torch.randn_like(X), 32)
    assert is_channels_last(X)
    assert_parity(composite(inputs), inputs, only=COMPOSITE)
    with expect_calls(device, forward=True, backward=True):
        direct = native(inputs)
    assert_layout_follows(X, direct.Y, direct.dX)


@FLOATS
def test_01_matrices(device, dtype):
    """[N, C] is NCHW and channels-last at once: aten's, bit for bit."""
    inputs = make_inputs(edge("nc"), device, dtype)
    with expect_calls(device, forward=False, backward=False):
        ours = composite(inputs)
    with override_off():
        theirs = composite(inputs)
    for name in COMPOSITE:
        assert equal(getattr(ours, name), getattr(theirs, name)), name


# --- 2: layout of the gradient ---------------------------------------------------------------


@FLOATS
@pytest.mark.parametrize("name", ["c9", "volume", "ncl"])
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("dY_layout", GRAD_LAYOUTS)
def test_02_gradient_in_any_layout(device, name, dtype, layout, dY_layout):
    """#92166: X and dY in the same and in different layouts, dY expanded and permuted."""
    inputs = make_inputs(edge(name), device, dtype, layout=layout, dY_layout=dY_layout)
    ours = composite(inputs)
    assert_parity(ours, inputs, only=COMPOSITE)


@FLOATS
def test_02_gradient_of_sum(device, dtype):
    """`.sum().backward()` hands an expanded scalar to backward: all strides are 0."""
    inputs = make_inputs(edge("d3"), device, dtype)
    X = inputs.X.clone().requires_grad_()
    gamma, beta = (t.clone().requires_grad_() for t in (inputs.gamma, inputs.beta))
    F.group_norm(X, inputs.groups, gamma, beta).sum().backward()
    inputs.dY = torch.ones((), device=device, dtype=dtype).expand(X.shape)
    ours = Results(None, None, None, X.grad, gamma.grad, beta.grad)
    assert_parity(ours, inputs, only=GRADIENTS)
    assert calls(BACKWARD, device) == (1, 0)


# --- 3: ambiguous strides --------------------------------------------------------------------

AMBIGUOUS = {
    # #115940: one pixel
    "pixel": ((2048, 384, 1, 1), (384, 1, 786432, 1), 32),
    "pixel_dense": ((2048, 384, 1, 1), (384, 1, 384, 384), 32),
    "one_channel": ((4, 1, 6, 5), (30, 1, 5, 1), 1),
    "one_channel_other": ((4, 1, 6, 5), (30, 30, 5, 1), 1),
    "one_sample": ((1, 24, 6, 5), (7, 1, 120, 24), 8),
    "one_column": ((3, 24, 6, 1), (144, 1, 24, 5), 8),
    "one_row": ((3, 24, 1, 6), (144, 1, 3, 24), 8),
}


@FLOATS
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_03_ambiguous_strides(device, name, dtype):
    """Dimensions of size 1 have any stride: values as stock's, forward and backward."""
    shape, strides, groups = AMBIGUOUS[name]
    X = torch.randn(shape, device=device, dtype=dtype)
    storage = torch.empty_strided(shape, strides, device=device, dtype=dtype)
    storage.copy_(X)
    C = shape[1]
    gamma, beta = torch.randn(2, C, device=device, dtype=dtype)
    dY = torch.randn(shape, device=device, dtype=dtype)
    inputs = Inputs(storage, gamma, beta, dY, groups)
    served = is_channels_last(storage)
    assert served == (C > 1 and X[0, 0].numel() > 1)
    with expect_calls(device, forward=served, backward=served):
        ours = composite(inputs)
    assert_parity(ours, inputs, only=COMPOSITE)


# --- 4, 5, 6: numerics -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("small", (1, 8, 64, 64, 72), 2),
        pytest.param(
            Case("reported", (1, 32, 256, 256, 72), 4),
            marks=pytest.mark.cuda,
        ),
    ],
    ids=str,
)
def test_04_accurate_mean(device, case, request):
    """#54293: groups of 4.7 million elements away from zero, within 1e-5 in fp32."""
    if not case.fits_cpu and case.name == "reported" and device == "cpu":
        pytest.skip("600 MB tensors are for the GPU")
    X = torch.rand(case.shape, device=device).to(memory_format=torch.channels_last_3d)
    inputs = Inputs(X, None, None, X, case.groups)
    Y, mean, rstd = torch.ops.aten.native_group_norm(X, None, None, *inputs.sizes, 1e-5)
    assert calls(FORWARD, device) == (1, 0)
    reference = exact(inputs, (False, False, False))
    assert (Y.double() - reference.Y).abs().max() <= 1e-5
    theirs = stock(inputs)
    for name, ours in {"Y": Y, "mean": mean, "rstd": rstd}.items():
        assert_close(ours, getattr(theirs, name), getattr(reference, name), name)


@pytest.mark.parametrize("value", [0.05, 1.0, -3.7, 1e4, 80985.1, 4.71e8])
@pytest.mark.parametrize("shape", [(1, 32, 25), (2, 32, 7, 9), (1, 64, 40, 40)], ids=str)
def test_05_constant_input(device, value, shape):
    """#67907: no variance. With m the mean rounded to float, |X - m| is at most one ulp of X, so
    |Y| is at most that times rstd = 1 / sqrt(eps); a cancelling variance would give far more.
    """
    X = lay_out(torch.full(shape, value, device=device), "channels_last")
    sizes = Inputs(X, None, None, X, 32).sizes
    Y, mean, rstd = torch.ops.aten.native_group_norm(X, None, None, *sizes, 1e-5)
    assert calls(FORWARD, device) == (1, 0)
    step = ulp(abs(value), torch.float32)
    assert (mean - value).abs().max() <= step
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5**-0.5), rtol=1e-6, atol=0)
    assert Y.abs().max() <= step * 1e-5**-0.5


@pytest.mark.parametrize("name", ["c30_big", "n1", "hw3350", "volume", "d1", "g1_wide"])
@pytest.mark.parametrize("mean", [1e3, 1e4])
@pytest.mark.parametrize("std", [0.01, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_05_mean_far_above_deviation(device, name, mean, std, dtype):
    """E[X^2] - m^2 loses everything here: in fp32, 1e8 +- 8 against a variance of 1e-4."""
    inputs = make_inputs(edge(name), device, dtype)
    inputs.X.mul_(std).add_(mean)
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    assert_parity(ours, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_05_one_group_far_away(device, dtype):
    """Groups of one image have nothing to do with each other: means of -1e3 to 1e3 side by side."""
    inputs = make_inputs(edge("c60"), device, dtype)
    offsets = torch.linspace(-1e3, 1e3, inputs.groups, device=device)
    offsets = offsets.repeat_interleave(inputs.X.shape[1] // inputs.groups)
    inputs.X.add_(offsets.to(dtype)[:, None, None])
    assert_parity(native(inputs), inputs)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
def test_05_large_values_do_not_overflow(device, dtype):
    """Squares of 2e4 overflow half, and sums of them lose bfloat16's digits: sums are fp32."""
    inputs = make_inputs(edge("c30"), device, dtype)
    inputs.X.mul_(5e3)
    assert_parity(native(inputs), inputs)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)


@pytest.mark.parametrize(
    "dtype, size", [(torch.float32, 1e17), (torch.float64, 1e138)], ids=["float", "double"]
)
def test_05_huge_values(device, dtype, size):
    """Variances are still in range. dX has rstd^3 in its formula, which is not."""
    inputs = make_inputs(edge("d3"), device, dtype)
    inputs.X.mul_(size)
    assert_parity(native(inputs), inputs)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)


@pytest.mark.parametrize(
    "dtype, size",
    [(torch.float32, 1e20), (torch.bfloat16, 1e20), (torch.float64, 1e155)],
    ids=["float", "bfloat16", "double"],
)
def test_05_variances_that_overflow(device, dtype, size):
    """They are infinite, not NaN as on aten's CPU kernels: rstd is zero, and Y is beta."""
    inputs = make_inputs(edge("d3"), device, dtype)
    inputs.X.mul_(size)
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    assert ours.rstd.eq(0).all()
    assert torch.equal(ours.Y, inputs.beta[:, None, None].expand_as(ours.Y))


@pytest.mark.parametrize("shape", [(6, 16), (6, 16, 1), (6, 16, 1, 1), (6, 16, 1, 1, 1)], ids=str)
def test_06_one_element_a_group(device, shape):
    """No variance and no deviation: Y is beta. Both layouts are the same: aten's, bit for bit."""
    X = torch.randn(shape, device=device)
    gamma, beta = torch.randn(2, 16, device=device)
    Y = assert_same_as_off(lambda: F.group_norm(X, 16, gamma, beta))[1]
    assert calls(FORWARD, device) == (0, 1)
    # Stock CPU computes a * X + b with a = gamma * rstd: two roundings of terms of that size.
    scale = float((gamma * X.reshape(6, 16) * 1e-5**-0.5).abs().max())
    difference = (Y.reshape(6, 16) - beta).abs().max()
    assert difference <= 2 * ulp(scale, torch.float32)


def test_06_one_pixel_of_several_channels(device):
    """#94288: (1, C, 1, 1) with D > 1 is a valid input."""
    inputs = make_inputs(edge("single_pixel"), device, torch.float32)
    with expect_calls(device, forward=False, backward=False):
        ours = composite(inputs)
    assert_parity(ours, inputs, only=COMPOSITE)


# --- 7, 8, 15: gradients of the parameters ---------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("small", (8, 64, 32, 32), 16),
        pytest.param(Case("reported", (256, 64, 64, 64), 16), marks=pytest.mark.cuda),
    ],
    ids=str,
)
def test_07_dgamma_of_every_group(device, case):
    """#140913: one group's dgamma was off by a quarter. (torch.compile itself: test_dispatch.)"""
    if case.name == "reported" and device == "cpu":
        pytest.skip("the reported size is for the GPU")
    inputs = make_inputs(case, device, torch.bfloat16)
    ours = native(inputs)
    reference, theirs = exact(inputs), stock(inputs)
    for group in range(case.groups):
        channels = slice(group * case.D, (group + 1) * case.D)
        assert_close(
            ours.dgamma[channels],
            theirs.dgamma[channels],
            reference.dgamma[channels],
            f"dgamma of group {group}",
        )
    assert calls(BACKWARD, device) == (1, 0)


@FLOATS
@pytest.mark.parametrize("N", [129, 256, 512])
@pytest.mark.parametrize("C, G", [(32, 4), (64, 8), (128, 32)])
def test_15_large_batches(device, N, C, G, dtype):
    """#178663: dgamma and dbeta are sums over the batch; more than 128 samples went wrong."""
    inputs = make_inputs(Case("batch", (N, C, 4, 4), G), device, dtype)
    ours = native(inputs)
    assert_parity(ours, inputs)
    assert calls(BACKWARD, device) == (1, 0)


@HALVES
@pytest.mark.parametrize("shape", [(512, 64), (512, 64, 1, 1)], ids=str)
def test_15_one_pixel_in_half_precision(device, shape, dtype):
    """#180740: HxW = 1 is aten's, so its answer is stock's bit for bit."""
    inputs = make_inputs(Case("pixel", shape, 8), device, dtype)
    ours = composite(inputs)
    with override_off():
        theirs = composite(inputs)
    for name in COMPOSITE:
        assert equal(getattr(ours, name), getattr(theirs, name)), name


def test_16_small_maps(device):
    """#46086 was slow at HxW = 1: that shape is routed to stock; 7x7 and 14x14 are ours (their
    speed is measured by the benchmark, since a timing is no test).
    """
    X = torch.randn(1024, 512, device=device)
    F.group_norm(X, 32)
    assert calls(FORWARD, device) == (0, 1)
    torch.ops.gn_override.reset_counters()
    for size in (7, 14):
        X = torch.randn(4, 64, size, size, device=device).to(memory_format=torch.channels_last)
        F.group_norm(X, 32)
    assert calls(FORWARD, device) == (2, 0)


# --- 9: mixed types --------------------------------------------------------------------------


@HALVES
@pytest.mark.parametrize("affine", ["both", "weight", "bias"])
@pytest.mark.parametrize("name", ["d3", "c30_big", "volume"])
def test_09_half_input_with_float_parameters(device, name, dtype, affine):
    """#17216: served with float statistics, as on stock CPU; stock CUDA raises."""
    inputs = make_inputs(edge(name), device, dtype, torch.float32, affine=affine)
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    assert ours.mean.dtype == ours.rstd.dtype == torch.float32
    assert ours.dgamma.dtype == (dtype if affine == "bias" else torch.float32)
    assert_parity(ours, inputs)


@HALVES
def test_09_mixed_types_of_contiguous_input(device, dtype):
    """NCHW inputs are aten's: served on CPU, refused on CUDA, in stock's own words."""
    i = make_inputs(edge("d3"), device, dtype, torch.float32, layout="nchw")
    assert_same_as_off(lambda: F.group_norm(i.X, i.groups, i.gamma, i.beta))


@pytest.mark.parametrize(
    "X_dtype, param_dtype",
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float64),
        (torch.int32, torch.float32),
        (torch.complex64, torch.complex64),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_09_other_types_are_refused_as_by_stock(device, X_dtype, param_dtype, layout):
    X = lay_out(torch.ones(2, 8, 3, 5, device=device).to(X_dtype), layout)
    gamma, beta = torch.ones(2, 8, device=device).to(param_dtype)
    for bias in (beta, None):
        kind = assert_same_as_off(lambda bias=bias: F.group_norm(X, 4, gamma, bias))[0]
        assert kind in (RuntimeError, NotImplementedError), kind


def test_09_weight_and_bias_of_different_types(device):
    X = lay_out(torch.randn(2, 8, 3, 5, device=device).bfloat16(), "channels_last")
    one = torch.ones(8, device=device)
    kind = assert_same_as_off(lambda: F.group_norm(X, 4, one, one.bfloat16()))[0]
    assert kind is RuntimeError


# --- 10, 11, 12: bad and empty input ---------------------------------------------------------


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("groups", [0, -1, -4, 3, 16])
def test_10_groups_that_do_not_fit(device, layout, groups):
    """#73188, #184280: aten's own exception and text."""
    X = lay_out(torch.randn(2, 8, 3, 5, device=device), layout)
    gamma, beta = torch.randn(2, 8, device=device)
    assert_same_as_off(lambda: F.group_norm(X, groups, gamma, beta))
    assert_same_as_off(lambda: torch.group_norm(X, groups, gamma, beta))
    kind = assert_same_as_off(
        lambda: torch.native_group_norm(X, gamma, beta, 2, 8, 15, groups, 1e-5)
    )[0]
    assert kind != "returned", "stock accepts these groups"


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("size", [(7,), (9,), (0,), (8, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_10_parameters_of_the_wrong_size(device, layout, size, which):
    X = lay_out(torch.randn(2, 8, 3, 5, device=device), layout)
    bad, good = torch.randn(size, device=device), torch.randn(8, device=device)
    gamma, beta = (bad, good) if which == "weight" else (good, bad)
    kind = assert_same_as_off(lambda: F.group_norm(X, 4, gamma, beta))[0]
    assert kind is RuntimeError
    assert_same_as_off(lambda: torch.native_group_norm(X, gamma, beta, 2, 8, 15, 4, 1e-5))


@pytest.mark.parametrize("shape", [(), (8,)], ids=str)
def test_10_too_few_dimensions(device, shape):
    X = torch.randn(shape, device=device)
    kind, _ = assert_same_as_off(lambda: F.group_norm(X, 4))
    assert issubclass(kind, Exception)


def test_10_one_value_a_group_in_training():
    """torch refuses it in Python, before any kernel."""
    kind, text = assert_same_as_off(lambda: F.group_norm(torch.randn(1, 4, 1, 1), 4))
    assert kind is ValueError and "Expected more than 1 value per channel" in text


@pytest.mark.cuda
@pytest.mark.parametrize("which", ["weight", "bias", "both"])
def test_10_parameters_on_another_device(which):
    X = lay_out(torch.randn(2, 8, 3, 5, device="cuda"), "channels_last")
    cpu, cuda = torch.randn(8), torch.randn(8, device="cuda")
    gamma = cpu if which in ("weight", "both") else cuda
    beta = cpu if which in ("bias", "both") else cuda
    kind = assert_same_as_off(lambda: F.group_norm(X, 4, gamma, beta))[0]
    assert kind is RuntimeError


@FLOATS
@pytest.mark.parametrize("case", EMPTY_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_11_empty_batch(device, case, dtype, layout):
    """#12013: empty output and dX, zero gradients of the parameters."""
    X = lay_out(torch.empty(case.shape, device=device, dtype=dtype), layout).requires_grad_()
    gamma, beta = (
        torch.ones(case.C, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    Y = F.group_norm(X, case.groups, gamma, beta)
    Y.sum().backward()
    assert Y.shape == X.shape == X.grad.shape
    assert torch.equal(gamma.grad, torch.zeros_like(gamma))
    assert torch.equal(beta.grad, torch.zeros_like(beta))
    assert_same_as_off(
        lambda: torch.native_group_norm(
            X.detach(), gamma.detach(), beta.detach(), 0, case.C, case.HxW, case.groups, 1e-5
        )
    )


@pytest.mark.parametrize("shape", [(2, 8, 0, 5), (2, 8, 3, 0), (2, 8, 0), (2, 0, 3, 5)], ids=str)
@pytest.mark.parametrize("groups", [4, 1])
def test_11_no_pixels_or_no_channels(device, shape, groups):
    """#32401: an error from 2.14 on, empty results before; always stock's answer."""
    X = torch.empty(shape, device=device)
    if X.dim() == 4:
        X = X.to(memory_format=torch.channels_last)
    gamma = torch.ones(shape[1], device=device)
    assert_same_as_off(lambda: F.group_norm(X, groups, gamma, gamma))
    HxW = 0 if shape[1] else 15
    assert_same_as_off(
        lambda: torch.native_group_norm(X, gamma, gamma, 2, shape[1], HxW, groups, 1e-5)
    )


LIES = {
    "N": (3, 8, 15, 4),
    "C": (2, 16, 15, 4),
    "HxW": (2, 8, 16, 4),
    "HxW far": (2, 8, 1 << 40, 4),
    "overflow": (1 << 32, 1 << 31, 2, 4),
    "negative": (2, -8, -15, 4),
    "all zero": (0, 0, 0, 4),
}


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("lie", LIES)
def test_12_sizes_that_lie(device, layout, lie):
    """#194806: direct calls with sizes that are not the input's never read out of bounds."""
    if lie == "overflow" and (layout == "nchw" or TORCH < (2, 13)):
        pytest.skip("stock's own kernels, where such a call ends, trust its sizes and may crash")
    X = lay_out(torch.randn(2, 8, 3, 5, device=device), layout)
    gamma, beta = torch.randn(2, 8, device=device)
    for parameters in ((gamma, beta), (None, None)):
        assert_same_as_off(
            lambda parameters=parameters: torch.native_group_norm(X, *parameters, *LIES[lie], 1e-5)
        )
    assert calls(FORWARD, device)[0] == 0


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("sizes", [(4, 4, 15, 2), (1, 16, 15, 4), (2, 24, 5, 4)], ids=str)
def test_12_other_sizes_of_the_same_product(device, layout, sizes):
    """The product is right, so nothing is out of bounds: stock's answer, whatever it is."""
    X = lay_out(torch.randn(2, 8, 3, 5, device=device), layout)
    assert_same_as_off(lambda: torch.native_group_norm(X, None, None, *sizes, 1e-5))
    assert calls(FORWARD, device)[0] == 0


def test_12_rank_one(device):
    X = torch.randn(240, device=device)
    assert_same_as_off(lambda: torch.native_group_norm(X, None, None, 2, 8, 15, 4, 1e-5))
    assert_same_as_off(lambda: torch.native_group_norm(X[::2], None, None, 1, 8, 15, 4, 1e-5))
    assert calls(FORWARD, device)[0] == 0


def _backward_lies(inputs: Inputs) -> dict[str, dict]:
    other = torch.randn(2, 8, 3, 4, device=inputs.X.device)
    N, C, HxW, G = inputs.sizes
    stats = torch.ones(N, G, device=inputs.X.device)
    return {
        "dY smaller": {"dY": other},
        "dY double": {"dY": inputs.dY.double()},
        "mean short": {"mean": stats[:1]},
        "rstd short": {"rstd": stats[:, :1]},
        "statistics of double": {"mean": stats.double(), "rstd": stats.double()},
        "gamma short": {"gamma": inputs.gamma[:5]},
        "gamma double": {"gamma": inputs.gamma.double()},
        "N": {"sizes": (N + 1, C, HxW, G)},
        "HxW": {"sizes": (N, C, HxW + 1, G)},
        "groups": {"sizes": (N, C, HxW, 3)},
        "no groups": {"sizes": (N, C, HxW, 0)},
    }


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize(
    "lie", list(_backward_lies(make_inputs(edge("hw2"), "cpu", torch.float32)))
)
def test_12_backward_operands_that_lie(device, layout, lie):
    X = lay_out(torch.randn(2, 8, 3, 5, device=device), layout)
    inputs = Inputs(X, torch.ones(8, device=device), None, torch.randn_like(X), 4)
    stats = torch.ones(2, 4, device=device)
    operands = {"dY": inputs.dY, "mean": stats, "rstd": stats, "gamma": inputs.gamma}
    operands |= {"sizes": inputs.sizes} | _backward_lies(inputs)[lie]
    dY, mean, rstd, gamma, sizes = operands.values()
    kind = assert_same_as_off(
        lambda: torch.ops.aten.native_group_norm_backward(
            dY, X, mean, rstd, gamma, *sizes, [True] * 3
        )
    )[0]
    assert kind is RuntimeError
    assert calls(BACKWARD, device)[0] == 0


@pytest.mark.parametrize("which", ["X", "gamma", "beta"])
def test_12_memory_that_was_given_back(device, which):
    """A storage of no bytes, as FSDP leaves of a parameter: an error, as in PyTorch."""
    inputs = make_inputs(edge("d3"), device, torch.float32)
    getattr(inputs, which).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        torch.native_group_norm(inputs.X, inputs.gamma, inputs.beta, *inputs.sizes, inputs.eps)
    assert calls(FORWARD, device)[0] == 0


@pytest.mark.parametrize("which", ["dY", "X", "mean", "rstd", "gamma"])
def test_12_memory_that_was_given_back_before_backward(device, which):
    inputs = make_inputs(edge("d3"), device, torch.float32)
    N, _, _, G = inputs.sizes
    operands = {"dY": inputs.dY, "X": inputs.X}
    operands |= {name: torch.ones(N, G, device=device) for name in ("mean", "rstd")}
    operands["gamma"] = inputs.gamma
    operands[which].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        torch.ops.aten.native_group_norm_backward(*operands.values(), *inputs.sizes, [True] * 3)
    assert calls(BACKWARD, device)[0] == 0


# --- 13: which gradients are asked for -------------------------------------------------------


@FLOATS
@pytest.mark.parametrize("name", ["c30", "tiles_deep"])
@pytest.mark.parametrize("asked", ["X", "gamma", "beta", "gamma beta", "X beta", "X gamma"])
def test_13_some_operands_need_no_gradient(device, name, dtype, asked):
    """#44863: the others stay without one, through autograd. (All masks: test_parity.)"""
    i = make_inputs(edge(name), device, dtype)
    operands = {"X": i.X.clone(), "gamma": i.gamma.clone(), "beta": i.beta.clone()}
    for operand in asked.split():
        operands[operand].requires_grad_()
    Y = F.group_norm(operands["X"], i.groups, operands["gamma"], operands["beta"])
    Y.backward(i.dY)
    mask = tuple(operand in asked.split() for operand in operands)
    ours = Results(None, None, None, *(t.grad for t in operands.values()))
    assert_parity(ours, i, mask, only=GRADIENTS)
    assert calls(BACKWARD, device) == (1, 0)


@FLOATS
@pytest.mark.parametrize("affine", ["weight", "bias"])
@pytest.mark.parametrize("name", ["c9", "tiles_map"])
def test_13_weight_without_bias_and_bias_without_weight(device, name, dtype, affine):
    inputs = make_inputs(edge(name), device, dtype, affine=affine)
    ours = composite(inputs)
    want = {"weight": ("Y", "dX", "dgamma"), "bias": ("Y", "dX", "dbeta")}[affine]
    assert_parity(ours, inputs, only=want)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)


# --- 14: grid limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("groups_of_batch", (2100, 64, 2, 2), 32),
        Case("many_groups", (1, 70000, 2, 2), 70000),
        Case("many_samples", (66000, 4, 2, 1), 2),
        Case("many_channels", (1, 140000, 3, 1), 2),
    ],
    ids=lambda case: case.name,
)
def test_14_grid_limits(device, case):
    """N * G, G, N and C above 65535. Stock CUDA fails there, so stock CPU is the yardstick."""
    inputs = make_inputs(case, "cpu", torch.float32)
    theirs = stock(inputs)
    there = Inputs(
        *(t.to(device) for t in (inputs.X, inputs.gamma, inputs.beta, inputs.dY)), case.G
    )
    with expect_calls(device, forward=True, backward=True):
        ours = native(there)
    ours = Results(*(getattr(ours, name).cpu() for name in vars(ours)))
    assert_parity(ours, inputs, theirs=[theirs])


# --- 17: contracts ---------------------------------------------------------------------------


@HALVES
def test_17_autocast_returns_float(device, dtype):
    """group_norm is on CUDA autocast's fp32 list (not on the CPU's); layouts pass, ours runs."""
    X = lay_out(torch.randn(2, 32, 6, 5, device=device).to(dtype), "channels_last")
    norm = nn.GroupNorm(8, 32).to(device)
    with torch.autocast(device, dtype):
        Y = norm(X)
    kind = torch.float32 if device == "cuda" else dtype
    assert Y.dtype == kind
    assert Y.stride() == X.stride()
    assert calls(CAST[0] if device == "cuda" else FORWARD, device) == (1, 0)
    inputs = Inputs(X.to(kind), norm.weight.detach(), norm.bias.detach(), X.to(kind), 8)
    assert_close(Y.detach(), stock(inputs).Y, exact(inputs).Y, "Y")


def test_17_copy_on_write_inputs_stay_unmaterialised(device):
    inputs = make_inputs(edge("d3"), device, torch.float32)
    lazy = [torch._lazy_clone(t) for t in (inputs.X, inputs.gamma, inputs.beta, inputs.dY)]
    assert is_channels_last(lazy[0])
    clones = Inputs(*lazy, inputs.groups)
    ours = native(clones)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)
    assert all(torch._C._is_cow_tensor(t) for t in lazy)
    again = native(inputs)
    assert all(equal(getattr(ours, name), getattr(again, name)) for name in vars(ours))


@pytest.mark.parametrize("name", ["tiles_map", "n512", "c60", "hw_prime"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)],
    ids=["float", "bfloat16", "mixed"],
)
def test_17_repeats_bit_for_bit(device, name, dtypes):
    inputs = make_inputs(edge(name), device, *dtypes)
    first = native(inputs)
    for _ in range(4):
        again = native(inputs)
        for result in vars(first):
            assert equal(getattr(first, result), getattr(again, result)), result
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (5, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["c30", "d2", "tiles", "volume", "d1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float", "bfloat16"])
def test_17_nan_and_inf_stay_in_their_group(device, name, value, dtype):
    case = edge(name)
    inputs = make_inputs(case, device, dtype)
    clean = native(inputs)
    n, c = case.N - 1, case.C // 2
    group = c // case.D
    inputs.X[n, c].view(-1)[-1:] = value
    ours = native(inputs)
    inside = torch.zeros(case.N, case.C, dtype=torch.bool, device=device)
    inside[n, group * case.D : (group + 1) * case.D] = True
    for result in ("Y", "dX"):
        was, now = getattr(clean, result), getattr(ours, result)
        assert torch.equal(was[~inside], now[~inside]), result
        assert now[inside].isnan().all(), result
    statistics = torch.zeros(case.N, case.G, dtype=torch.bool, device=device)
    statistics[n, group] = True
    for result in ("mean", "rstd"):
        was, now = getattr(clean, result), getattr(ours, result)
        assert torch.equal(was[~statistics], now[~statistics]), result
        assert not now[statistics].isfinite().any() or result == "rstd"
    if device == "cpu":  # an infinity's mean is that infinity, as stock's is
        assert equal(ours.mean[statistics], torch.full((1,), value, dtype=dtype))
        assert equal(ours.mean[statistics], stock(inputs).mean[statistics])
        assert equal(ours.rstd[statistics], stock(inputs).rstd[statistics])
    hit = inside[n]
    assert torch.equal(clean.dgamma[~hit], ours.dgamma[~hit])
    assert ours.dgamma[hit].isnan().all()
    assert torch.equal(clean.dbeta, ours.dbeta), "dbeta is a sum of dY alone"
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (2, 0)


def test_17_gradient_through_relu_of_nan(device):
    """PyTorch's relu hands it on: what a NaN bias makes of one channel is dY in the others' dX."""
    inputs = make_inputs(edge("d3"), device, torch.float32)
    inputs.beta[4] = float("nan")

    def gradients(function) -> list[Tensor]:
        operands = [t.clone().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta)]
        function(*operands).backward(inputs.dY)
        return [t.grad for t in operands]

    ours = gradients(
        lambda X, gamma, beta: gn_override.functional.group_norm(
            X, inputs.groups, gamma, beta, activation="relu"
        )
    )
    assert calls(FUSED[1], device) == (1, 0)
    with override_off():
        theirs = gradients(lambda X, *both: F.relu(F.group_norm(X, inputs.groups, *both)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert all(t.isfinite().all() for t in ours)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["d10", "c30", "d1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_17_storage_offset(device, name, dtype, offset):
    """`randn(n + k)[k:]`: every alignment that a vector load could need."""
    inputs = make_inputs(edge(name), device, dtype)
    for operand in ("X", "dY"):
        tensor = getattr(inputs, operand)
        storage = torch.empty(tensor.numel() + offset, device=device, dtype=dtype)
        shifted = storage[offset:].as_strided(tensor.shape, tensor.stride(), offset)
        shifted.copy_(tensor)
        setattr(inputs, operand, shifted)
    gamma = torch.empty(inputs.gamma.numel() + offset, device=device, dtype=dtype)[offset:]
    inputs.gamma = gamma.copy_(inputs.gamma)
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    assert_parity(ours, inputs)


SLICES = {
    "channels": lambda t: t[:, 8:24],
    "samples": lambda t: t[1:3],
    "every other sample": lambda t: t[::2],
    "rows": lambda t: t[:, :, 1:-1],
    "columns": lambda t: t[:, :, :, 2:],
    "every other column": lambda t: t[..., ::2],
    "transposed": lambda t: t.transpose(2, 3),
    "flipped strides": lambda t: t.permute(3, 1, 0, 2),
    "expanded": lambda t: t[:1].expand(3, *t.shape[1:]),
    "expanded pixels": lambda t: t[:, :, :1, :1].expand(*t.shape[:2], 5, 4),
}


@FLOATS
@pytest.mark.parametrize("how", SLICES)
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_17_sliced_inputs(device, how, layout, dtype):
    """Views that are not dense, or dense in another order: right values, never an error."""
    X = SLICES[how](lay_out(torch.randn(4, 32, 7, 6, device=device).to(dtype), layout))
    C = X.shape[1]
    gamma, beta = torch.randn(2, C, device=device).to(dtype)
    inputs = Inputs(X, gamma, beta, torch.randn(X.shape, device=device).to(dtype), 8)
    assert_parity(composite(inputs), inputs, only=COMPOSITE)


@FLOATS
def test_17_parameters_that_are_not_contiguous(device, dtype):
    inputs = make_inputs(edge("d3"), device, dtype)
    inputs.gamma = inputs.gamma.repeat_interleave(2)[::2]
    inputs.beta = inputs.beta[:1].expand(inputs.beta.shape)
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    assert_parity(ours, inputs)


class HandsOnNCHW(TorchDispatchMode):
    """Operators get what they are given in NCHW."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args = [
            value.contiguous() if isinstance(value, torch.Tensor) and value.dim() == 4 else value
            for value in args
        ]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradients", [False, True])
def test_17_parameters_that_are_not_contiguous_reach_stocks_kernels(device, gradients):
    """Where a call turns to those below the composite: they read a contiguous gamma and beta."""
    inputs = make_inputs(edge("d3"), device, torch.float32)
    gamma = inputs.gamma.repeat_interleave(2)[::2].requires_grad_(gradients)
    beta = inputs.beta[:1].expand(inputs.beta.shape)
    with HandsOnNCHW(), expect_calls(device, forward=False, backward=None):
        Y = F.group_norm(inputs.X, inputs.groups, gamma, beta)
    exact = F.group_norm(inputs.X.double(), inputs.groups, gamma.double(), beta.double())
    torch.testing.assert_close(Y.double(), exact, rtol=1e-4, atol=1e-5)


# 65 and 96 are more than the runs of samples that gradients are summed over.
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 65, 96])
@pytest.mark.parametrize("name", ["tiles_map", "n512", "n_odd", "c9", "g1_wide"])
def test_17_any_number_of_threads(threads, name):
    """The number of threads changes neither the values nor their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = make_inputs(edge(name), "cpu", torch.float32)
        ours = native(inputs)
        assert_parity(ours, inputs)
    finally:
        torch.set_num_threads(before)
    again = native(inputs)
    for result in vars(ours):
        assert equal(getattr(ours, result), getattr(again, result)), result
    assert calls(FORWARD, "cpu") == calls(BACKWARD, "cpu") == (2, 0)


def test_17_calls_from_many_threads(device):
    """Concurrent calls share no state: each returns what it returns alone."""
    inputs = [make_inputs(edge(name), device, torch.float32) for name in ("c60", "d3", "n_odd")]
    alone = [native(i) for i in inputs]
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            for _ in range(10):
                ours = native(inputs[index])
                for name in vars(ours):
                    if not equal(getattr(ours, name), getattr(alone[index], name)):
                        failures.append(f"{name} of input {index}")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(index % 3,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (63, 0)


# --- 18 is the shapes and eps of test_parity -------------------------------------------------


@pytest.mark.parametrize("D", [3, 5, 6, 7, 9, 11, 12, 24, 33, 42, 63, 65])
@pytest.mark.parametrize("G", [1, 2, 3])
def test_18_any_group_width(device, D, G):
    inputs = make_inputs(Case("width", (2, D * G, 5, 9), G), device, torch.float32)
    with expect_calls(device, forward=True, backward=True):
        ours = native(inputs)
    assert_parity(ours, inputs)


# --- 19, 20: programs around the norm --------------------------------------------------------


@pytest.mark.parametrize("how", ["relu_", "ReLU", "mul_"])
@pytest.mark.parametrize("autocast", [False, True], ids=["eager", "autocast"])
def test_19_in_place_after_the_norm(device, how, autocast):
    """Every ResNet does it; an output that is a view, or saved for backward, would raise."""
    inputs = make_inputs(edge("d3"), device, torch.float32)
    apply = {
        "relu_": F.relu_,
        "ReLU": nn.ReLU(inplace=True),
        "mul_": lambda t: t.mul_(0.5),
    }[how]

    def train() -> tuple[Tensor, ...]:
        X = inputs.X.clone().requires_grad_()
        gamma, beta = (t.clone().requires_grad_() for t in (inputs.gamma, inputs.beta))
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = apply(F.group_norm(X, inputs.groups, gamma, beta))
            (out * inputs.dY).sum().backward()
        return out.detach(), X.grad, gamma.grad, beta.grad

    ours = train()
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)
    # The gradient that reaches the norm, by the sign of our own output.
    pre = native(inputs).Y
    if how == "mul_":
        factor = torch.full_like(pre, 0.5)
    else:
        factor = (pre > 0).float()
    assert torch.equal(ours[0], pre * factor)
    inputs.dY = inputs.dY * factor
    assert_parity(Results(None, None, None, *ours[1:]), inputs, only=GRADIENTS)


@HALVES
def test_20_autocast_training_with_float_parameters(device, dtype):
    """conv (half out) -> norm (float) -> conv: the norm's gradients arrive, finite and float."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(True), nn.Conv2d(32, 8, 1)
    ).to(device, memory_format=torch.channels_last)
    image = torch.randn(2, 3, 12, 10, device=device).to(memory_format=torch.channels_last)

    seen: dict[str, Tensor] = {}
    net[1].register_forward_hook(lambda m, args, out: seen.update(X=args[0].detach()))
    with torch.autocast(device, dtype):
        loss = net(image).float().square().mean()
    loss.backward()
    assert seen["X"].dtype == dtype
    ops = CAST if device == "cuda" else ATEN
    assert calls(ops[0], device) == calls(ops[1], device) == (1, 0)
    ours = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with override_off():
        with torch.autocast(device, dtype):
            loss_off = net(image).float().square().mean()
        loss_off.backward()
    for mine, parameter in zip(ours, net.parameters(), strict=True):
        assert mine.dtype == torch.float32
        # The convolutions compute in half precision: its ulp is the scale of any difference.
        limit = 4 * ulp(float(parameter.grad.abs().max()), dtype)
        assert (mine - parameter.grad).abs().max() <= limit


@pytest.mark.parametrize("options", [(3, 1, 1), (3, 2, 1), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("name", ["ncl", "d3", "volume"])
def test_average_pools_after_the_norm(device, name, options):
    """Up to torch 2.13 theirs is wrong for channels-last CUDA tensors, if padded."""
    inputs = make_inputs(edge(name), device, torch.float32)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[inputs.X.dim() - 3]

    def gradient(X: Tensor) -> Tensor:
        X = X.detach().requires_grad_()
        pool(F.group_norm(X, inputs.groups), *options).square().sum().backward()
        return X.grad

    ours = gradient(inputs.X)
    assert calls(BACKWARD, device) == (1, 0) and is_channels_last(ours)
    with override_off():
        expected = gradient(inputs.X.contiguous())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_average_pools_without_the_override_are_stocks(device):
    """Also where they are wrong: on a GPU, up to 2.13, for a channels-last input."""
    X = torch.randn(2, 8, 6, 5, device=device).to(memory_format=torch.channels_last)
    dY = torch.randn_like(X)

    def gradient(X: Tensor) -> Tensor:
        X = X.detach().requires_grad_()
        return torch.autograd.grad(F.avg_pool2d(X, 3, 1, 1), X, dY)[0]

    ours = gradient(X)
    assert is_channels_last(ours)
    torch.testing.assert_close(ours, gradient(X.contiguous()))
    with override_off():
        assert torch.equal(ours, gradient(X)) == (device == "cpu" or TORCH >= (2, 14))


# --- 21: modules are untouched ---------------------------------------------------------------


def test_21_modules_copy_pickle_and_load(device):
    net = nn.Sequential(nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.SiLU()).to(device)
    X = torch.randn(2, 3, 5, 4, device=device).to(memory_format=torch.channels_last)
    assert type(net[1]) is nn.GroupNorm
    assert nn.GroupNorm.forward.__module__ == "torch.nn.modules.normalization"
    assert F.group_norm.__module__ == "torch.nn.functional"
    want = net(X)
    assert calls(FORWARD, device) == (1, 0)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(X), want)
    state = net.state_dict()
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = copy.deepcopy(net)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(X), want)


def test_21_switch_is_not_part_of_a_module(device):
    norm = nn.GroupNorm(4, 16).to(device)
    before = pickle.dumps(norm)
    gn_override.disable()
    assert pickle.dumps(norm) == before
    assert "gn_override" not in repr(vars(norm))


# --- the list --------------------------------------------------------------------------------


def test_every_case_has_a_test():
    """The project's list has 21 items; the tests of one are named test_<item>_..."""
    folder = Path(__file__).parent
    text = "\n".join(path.read_text() for path in sorted(folder.glob("test_*.py")))
    named = {int(number) for number in re.findall(r"^def test_(\d\d)_", text, re.MULTILINE)}
    assert named == set(range(1, 22))
