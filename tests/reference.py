"""What group normalisation should give: an fp64 reference, stock's own answer, and the bound.

Names follow ATen: X [N, C, *spatial], groups G, D = C / G, gamma, beta [C], mean, rstd [N, G].

The bound, stated once for every test: for each result tensor, the largest error against the
reference is at most that of stock aten on the same values plus a floor. Where that is exceeded,
stock's error is that of the worst of ORDERS orders of the pixels, and of the channels of each
group: one order may hit the exact value by luck, as random examples by the thousand show, and any
of them is as good a computation of the same sums. The floor is one unit in
the last place (ulp) of the tensor's dtype where sums are kept in a wider type, two where they are
not (float and double), at the tensor's scale.

Why one ulp. A result is a value computed in the accumulation type, then rounded to its dtype. That
rounding alone is an error of up to half an ulp; two correct computations that differ in the order
of their sums can land on opposite sides of the true value and so differ by one ulp. Where the
accumulation type is the dtype itself the roundings before the last are as large: those of
a = rstd * gamma and of b = beta - a * mean, half an ulp each, in a * X + b; those of the last
additions in a sum. Two computations then differ by another ulp.

Why a scale. An ulp is relative, and rounding happens to the terms, not to what is left when they
cancel (dX where dY is constant, say, is zero up to the rounding of its terms). The scale of a
result is the largest magnitude in its tensor or among the terms that its formula adds:
    Y       gamma * xhat, beta
    mean    sqrt(sum X^2) / n        what a sum of n terms of random signs adds up to
    dX      rstd * gamma * dY
    dbeta   sqrt(sum dY^2)
    dgamma  sqrt(sum (dY * xhat)^2), and sum(dY) * rstd times mean and mean's scale, which every
            formula subtracts in one way or another: it carries the error of the saved mean
With an activation, dZ takes dY's place in these, at the magnitude
    |dY| (k |activation'(Z)| + |activation''(Z)| (|gamma xhat| + |beta| + |gamma rstd mean|))
since Z is computed again, and its terms are rounded again. k is 2 for float and double, where the
error of exponential functions shows: two ulp by CUDA's manual, as much as the floor has for all
else; else 1.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mpmath
import numpy as np
import torch
import torch.nn.functional as F
from shapes import Case
from torch import Tensor, nn

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

Mask = tuple[bool, bool, bool]
ALL: Mask = (True, True, True)
MASKS: tuple[Mask, ...] = tuple(
    (bool(i & 4), bool(i & 2), bool(i & 1))
    for i in range(8)  # (dX, dgamma, dbeta)
)
EPS = 1e-5

ACTIVATIONS = ("identity", "relu", "silu", "gelu", "gelu_tanh")
RESULTS = ("Y", "mean", "rstd", "dX", "dgamma", "dbeta")
FORWARD = "native_group_norm"
BACKWARD = "native_group_norm_backward"
ATEN = (FORWARD, BACKWARD)
FUSED = ("group_norm_act", "group_norm_act_backward")
CAST = ("group_norm_autocast", "group_norm_autocast_backward")  # half X, float Y


@dataclass
class Inputs:
    """The operands of one call; gamma and beta may be None."""

    X: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    dY: Tensor
    groups: int
    eps: float = EPS

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """N, C, HxW, G as the native ops take them."""
        shape = self.X.shape
        return shape[0], shape[1], math.prod(shape[2:]), self.groups


@dataclass
class Results:
    """What forward and backward return: tensors of one call, or the reference's arrays."""

    Y: Any
    mean: Any
    rstd: Any
    dX: Any = None
    dgamma: Any = None
    dbeta: Any = None


@dataclass
class Reference(Results):
    """The exact values, and for each the scale at which its last place is taken."""

    scale: dict[str, float] = field(default_factory=dict)


# --- layouts ---------------------------------------------------------------------------------

# Served by our kernels without a copy of X, served with one or by aten, and for dY alone.
CHANNELS_LAST_LAYOUTS = ("channels_last", "unaligned")
LAYOUTS = (*CHANNELS_LAST_LAYOUTS, "nchw", "sliced", "permuted")
GRAD_LAYOUTS = (*LAYOUTS, "expanded", "expanded_pixels")


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The values of `tensor` [N, C, *spatial] in a memory layout; any rank from 2 up.

    channels_last    dense in the order N, spatial, C: strides (C*L, 1, C) for [N, C, L]
    unaligned        the same, its first element off every vector's alignment
    nchw             dense in the order N, C, spatial
    sliced           channels-last with gaps: a slice of a tensor with more channels
    permuted         dense in the order C, spatial, N
    expanded         one value everywhere, strides 0 (what `.sum()` hands to a backward)
    expanded_pixels  one value an image and channel, stride 0 over the pixels
    """
    last = tensor.movedim(1, -1)
    if layout == "channels_last":
        return last.contiguous().movedim(-1, 1)
    if layout == "unaligned":
        storage = tensor.new_empty(tensor.numel() + 1)
        storage[1:].view(last.shape).copy_(last)
        return storage[1:].view(last.shape).movedim(-1, 1)
    if layout == "nchw":
        return tensor.contiguous()
    if layout == "sliced":
        storage = tensor.new_full((*last.shape[:-1], last.shape[-1] + 3), math.nan)
        storage[..., 1:-2].copy_(last)
        return storage[..., 1:-2].movedim(-1, 1)
    if layout == "permuted":
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "expanded":
        return tensor.reshape(-1)[:1].reshape([1] * tensor.dim()).expand(tensor.shape)
    if layout == "expanded_pixels":
        one = tensor.flatten(2)[..., :1] if tensor.dim() > 2 else tensor
        return one.reshape(*tensor.shape[:2], *[1] * (tensor.dim() - 2)).expand(tensor.shape)
    raise ValueError(f"unknown layout {layout!r}; one of {GRAD_LAYOUTS}")


def randomised(module: nn.Module, weight: float = 0.0, deviation: float = 1.0) -> nn.Module:
    """The module, with affine parameters of its norms that are not ones and zeros: normal, weights
    around `weight`, biases around 0."""
    for child in module.modules():
        if isinstance(child, nn.GroupNorm) and child.affine:
            nn.init.normal_(child.weight, weight, deviation)
            nn.init.normal_(child.bias, 0, deviation)
    return module


def is_channels_last(tensor: Tensor) -> bool:
    """Dense in the order N, spatial, C and not in the order N, C, spatial: what we serve."""
    return tensor.dim() > 2 and not tensor.is_contiguous() and tensor.movedim(1, -1).is_contiguous()


def make_inputs(
    case: Case,
    device: str,
    dtype: torch.dtype,
    param_dtype: torch.dtype | None = None,
    dY_dtype: torch.dtype | None = None,
    *,
    affine: str = "both",
    layout: str = "channels_last",
    dY_layout: str | None = None,
    eps: float = EPS,
) -> Inputs:
    """Random operands of a case; affine is "both", "none", "weight" or "bias"."""

    def normal(*size: int) -> Tensor:
        # Drawn on the CPU where that is cheap, so that every device sees the same values.
        where = "cpu" if case.fits_cpu else device
        kind = dtype if where != "cpu" else torch.float32
        return torch.randn(size, dtype=kind, device=where)

    X = (normal(*case.shape).mul_(2).add_(0.5)).to(device, dtype)
    dY = normal(*case.shape).to(device, dY_dtype or dtype)
    params = [normal(case.C).to(device, param_dtype or dtype) for _ in range(2)]
    return Inputs(
        X=lay_out(X, layout),
        gamma=params[0] if affine in ("both", "weight") else None,
        beta=params[1] if affine in ("both", "bias") else None,
        dY=lay_out(dY, dY_layout or layout),
        groups=case.groups,
        eps=eps,
    )


# --- three ways to compute the same call -----------------------------------------------------


def native(inputs: Inputs, mask: Mask = ALL) -> Results:
    """Both aten native ops, called directly, by whoever owns them now."""
    i = inputs
    Y, mean, rstd = torch.ops.aten.native_group_norm(i.X, i.gamma, i.beta, *i.sizes, i.eps)
    grads = torch.ops.aten.native_group_norm_backward(
        i.dY, i.X, mean, rstd, i.gamma, *i.sizes, list(mask)
    )
    return Results(Y, mean, rstd, *grads)


def composite(inputs: Inputs) -> Results:
    """F.group_norm and autograd, as a program calls them; mean and rstd do not show."""
    i = inputs
    X = i.X.detach().requires_grad_()
    gamma = None if i.gamma is None else i.gamma.detach().requires_grad_()
    beta = None if i.beta is None else i.beta.detach().requires_grad_()
    Y = torch.nn.functional.group_norm(X, i.groups, gamma, beta, i.eps)
    Y.backward(i.dY)
    return Results(
        Y.detach(),
        None,
        None,
        X.grad,
        None if gamma is None else gamma.grad,
        None if beta is None else beta.grad,
    )


@contextlib.contextmanager
def override_off() -> Iterator[None]:
    """Stock kernels inside, whether or not gn_override is loaded."""
    package = sys.modules.get("gn_override")
    if package is None:
        yield
        return
    before = package._set_on(False)  # and nothing that is compiled is dropped
    try:
        yield
    finally:
        package._set_on(before)


def _stock_format(X: Tensor) -> torch.memory_format:
    """X's own layout where stock has kernels for it: on CPU, and from 2.15 on CUDA."""
    if X.is_cpu or TORCH >= (2, 15):
        return torch._prims_common.suggest_memory_format(X)
    return torch.contiguous_format


def is_mixed(inputs: Inputs) -> bool:
    """X in half precision with float parameters: mean and rstd are float, and so are the
    parameters' gradients if there is a gamma.
    """
    param = inputs.gamma if inputs.gamma is not None else inputs.beta
    return param is not None and param.dtype != inputs.X.dtype


def stock(inputs: Inputs, mask: Mask = ALL) -> Results:
    """Stock aten on the same values, in the same layout where it has kernels for it.

    X and dY get one layout, since the backward of 2.11 - 2.13 is wrong where they differ. Stock
    CUDA refuses half X with float parameters: there it computes in float, rounded at the end. So it
    does under autocast, which is where dY is float; Y is then float too.
    All gradients are computed, then dropped by the mask, and a missing gamma is ones: stock's CPU
    backward reads a null pointer for some masks of half types, and refuses dgamma without gamma.
    """
    i = inputs
    form = _stock_format(i.X)
    as_float = i.dY.dtype != i.X.dtype or (is_mixed(i) and not i.X.is_cpu)
    gamma = i.gamma
    if gamma is None:
        gamma = (i.dY if i.beta is None else i.beta).new_ones(i.X.shape[1])
    X, dY = (t.float() if as_float else t for t in (i.X, i.dY))
    same = Inputs(
        X.contiguous(memory_format=form),
        gamma,
        i.beta,
        dY.contiguous(memory_format=form),
        i.groups,
        i.eps,
    )
    with override_off():
        results = native(same)
    if as_float:
        results.Y = results.Y.to(i.dY.dtype)
        results.dX = results.dX.to(i.X.dtype)
    if i.gamma is None:
        results.dgamma = results.dgamma.to(i.dY.dtype)
        results.dbeta = results.dbeta.to(i.dY.dtype)
    for name, wanted in zip(("dX", "dgamma", "dbeta"), mask, strict=True):
        if not wanted:
            setattr(results, name, None)
    return results


ORDERS = 4


def stock_in_other_orders(
    inputs: Inputs, mask: Mask = ALL, compute: Callable[[Inputs, Mask], Results] = stock
) -> list[Results]:
    """Of all ORDERS but the one in which the operands are given; `compute` has stock's results."""
    return [_stock_in_order(inputs, mask, compute, seed) for seed in range(1, ORDERS)]


def _stock_in_order(
    inputs: Inputs, mask: Mask, compute: Callable[[Inputs, Mask], Results], seed: int
) -> Results:
    """Stock's results, computed with pixels and the channels of each group in a random order."""
    i = inputs
    _, C, HxW, G = i.sizes
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randperm(HxW, generator=random).to(i.X.device)
    of_group = torch.stack([torch.randperm(C // G, generator=random) for _ in range(G)])
    channels = (of_group + torch.arange(0, C, C // G)[:, None]).flatten().to(i.X.device)

    def shuffled(t: Tensor) -> Tensor:
        flat = t.reshape(*t.shape[:2], -1)[:, channels][..., pixels].reshape(t.shape)
        return lay_out(flat, "channels_last") if is_channels_last(t) else flat

    def in_place(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if t.dim() == 1:
            return t[channels.argsort()]
        flat = t.reshape(*t.shape[:2], -1)
        return flat[:, channels.argsort()][..., pixels.argsort()].reshape(t.shape)

    gamma, beta = (None if t is None else t[channels] for t in (i.gamma, i.beta))
    results = compute(Inputs(shuffled(i.X), gamma, beta, shuffled(i.dY), i.groups, i.eps), mask)
    for name in ("Y", "dX", "dgamma", "dbeta"):
        setattr(results, name, in_place(getattr(results, name)))
    return results


TORCHS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z * 1,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


def torchs(activation: str, Z: Tensor, dY: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's own activation of Z, and dZ."""
    Z = Z.detach().requires_grad_()
    Y = TORCHS[activation](Z)
    return Y.detach(), torch.autograd.grad(Y, Z, dY)[0]


def stock_act(inputs: Inputs, activation: str, mask: Mask = ALL) -> Results:
    """Stock's norm, then PyTorch's activation."""
    Y, dZ = torchs(activation, stock(inputs, (False, False, False)).Y, inputs.dY)
    results = stock(replace(inputs, dY=dZ), mask)
    results.Y = Y
    return results


def activate(Z: Any, name: str) -> tuple[Any, Any]:
    """activation(Z) and its derivative, for a float64 tensor or an array of long doubles.

    By the definitions: Phi is the normal distribution function and sigma the logistic one.
        silu       Z sigma(Z)
        gelu       Z Phi(Z)
        gelu_tanh  Z sigma(2 u), u = sqrt(2 / pi) (Z + 0.044715 Z^3)
    """
    is_array = isinstance(Z, np.ndarray)
    if name == "identity":
        return Z, Z * 0 + 1
    if name == "relu":
        slope = (Z > 0) * (Z * 0 + 1)
        return Z * slope, slope
    exp = np.exp if is_array else torch.exp
    if name == "gelu":
        gate = _normal(Z) if is_array else torch.special.erfc(-Z * math.sqrt(0.5)) / 2
        slope = exp(-Z * Z / 2) / _constant("sqrt(2 * pi)", is_array)
    else:
        argument, factor = Z, 1
        if name == "gelu_tanh":
            linear = _constant("sqrt(8 / pi)", is_array)
            cubic = _constant("sqrt(8 / pi) * mpf('0.044715')", is_array)
            argument, factor = Z * (linear + cubic * Z * Z), linear + 3 * cubic * Z * Z
        e = exp(-abs(argument))
        larger, smaller = 1 / (1 + e), e / (1 + e)
        gate = np.where(Z < 0, smaller, larger) if is_array else torch.where(Z < 0, smaller, larger)
        slope = smaller * larger * factor
    return Z * gate, gate + Z * slope


def curvature(Z: Any, name: str) -> Any:
    """activation''(Z), by differences, for the scale of an error."""
    step = 1e-4
    wide = torch.from_numpy(Z.astype(np.float64)) if isinstance(Z, np.ndarray) else Z
    slopes = [activate(wide + h, name)[1] for h in (-step, step)]
    second = (slopes[1] - slopes[0]) / (2 * step)
    return second.numpy() if isinstance(Z, np.ndarray) else second


def _long_double(value: Any) -> np.longdouble:
    return np.longdouble(mpmath.nstr(value, 25))


def _constant(formula: str, as_long_double: bool) -> Any:
    with mpmath.workdps(30):
        value = eval(formula, vars(mpmath))
        return _long_double(value) if as_long_double else float(value)


def _normal(Z: np.ndarray) -> np.ndarray:
    """Phi of each element, by its Taylor series about the nearest multiple of 1/64.

    Phi' is phi(t) = exp(-t^2 / 2) / sqrt(2 pi), and phi^(k + 1) = -t phi^(k) - k phi^(k - 1).
    """
    Z = np.clip(Z, -150, 150)  # there Phi is 1e-4888 or 1 already
    ticks, place = np.unique(np.rint(64 * Z) / 64, return_inverse=True)
    with mpmath.workdps(30):
        of_ticks = np.array([_long_double(mpmath.ncdf(float(tick))) for tick in ticks])
    t, total = (values[place].reshape(Z.shape) for values in (ticks, of_ticks))
    h = power = Z - t
    derivative, before = np.exp(-t * t / 2) / _constant("sqrt(2 * pi)", True), 0 * t
    for k in range(24):
        total = total + derivative * power
        power = power * h / (k + 2)
        derivative, before = -t * derivative - k * before, derivative
    return total


def exact(inputs: Inputs, mask: Mask = ALL, activation: str = "identity") -> Reference:
    """The reference, in fp64 (in x86's 80-bit long double for double inputs), by the formulas

        mean = E[X]          rstd = 1 / sqrt(E[(X - mean)^2] + eps)      over (n, g)
        xhat = (X - mean) * rstd                Y = gamma * xhat + beta
        dbeta  = sum dY                         dgamma = sum dY * xhat   over n and the pixels
        dX = rstd * (gamma dY - E[gamma dY] - xhat * E[gamma dY * xhat])

    of Wu and He, "Group Normalization" (2018), equations 1 - 6, and their derivatives. With an
    activation, the Y above is Z, activation(Z) is Y, and dY activation'(Z) takes dY's place.
    """
    i = inputs
    N, C, HxW, G = i.sizes
    if i.X.dtype == torch.float64:

        def wide(t: Tensor) -> Any:
            return t.detach().cpu().numpy().astype(np.longdouble)
    else:

        def wide(t: Tensor) -> Any:
            return t.detach().contiguous().double()  # rows of pixels sum fast

    def parameter(t: Tensor | None) -> Any:
        return None if t is None else wide(t).reshape(1, G, C // G, 1)

    group, pixels = (2, 3), (0, 3)
    gamma, beta = parameter(i.gamma), parameter(i.beta)
    X = wide(i.X).reshape(N, G, C // G, HxW)
    mean = X.mean(axis=group, keepdims=True)
    xhat = X - mean
    mean_scale = (X * X).sum(axis=group, keepdims=True) ** 0.5 / (HxW * C // G)
    del X
    rstd = ((xhat * xhat).mean(axis=group, keepdims=True) + i.eps) ** -0.5
    xhat *= rstd
    Y = xhat if gamma is None else xhat * gamma
    Y = Y if beta is None else Y + beta
    Z = Y
    Y, slope = activate(Z, activation)
    results = Reference(Y.reshape(i.X.shape), mean.reshape(N, G), rstd.reshape(N, G))
    scale = results.scale
    scale["Y"] = max(_largest(t) for t in (Z, xhat if gamma is None else xhat * gamma))
    scale["mean"] = _largest(mean_scale)
    scale["rstd"] = _largest(rstd)
    if any(mask):
        dY = wide(i.dY).reshape(N, G, C // G, HxW)
        magnitude = abs(dY * slope)  # of dZ
        if activation not in ("identity", "relu"):
            terms = [xhat, mean * rstd] if gamma is None else [xhat * gamma, mean * rstd * gamma]
            terms += [] if beta is None else [beta]
            magnitude *= 2 if i.X.dtype.itemsize > 2 else 1
            magnitude += abs(dY * curvature(Z, activation)) * sum(abs(term) for term in terms)
        dY = dY * slope
        results.dbeta = dY.sum(axis=pixels).reshape(C) if mask[2] else None
        scale["dbeta"] = _largest((magnitude**2).sum(axis=pixels) ** 0.5)
        if mask[1]:
            results.dgamma = (dY * xhat).sum(axis=pixels).reshape(C)
            offset = abs(dY.sum(axis=3, keepdims=True)) * (abs(mean) + mean_scale) * rstd
            scale["dgamma"] = max(
                _largest(((magnitude * xhat) ** 2).sum(axis=pixels) ** 0.5),
                _largest(offset.sum(axis=0)),
            )
        if mask[0]:
            dY, magnitude = (t if gamma is None else t * gamma for t in (dY, magnitude))
            slope = (dY * xhat).mean(axis=group, keepdims=True)
            dX = (dY - dY.mean(axis=group, keepdims=True) - xhat * slope) * rstd
            results.dX = dX.reshape(i.X.shape)
            scale["dX"] = _largest(magnitude * rstd)
    for name, value in vars(results).items():
        if name in scale and value is not None:
            scale[name] = max(scale[name], _largest(value))
    return results


# --- the bound -------------------------------------------------------------------------------


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """One unit in the last place of dtype at a magnitude (of its least normal number at zero)."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(magnitude, info.tiny))
    return math.ldexp(info.eps, exponent - 1)


def _largest(values: Any) -> float:
    """Largest magnitude of what is a number; 0 of nothing."""
    if math.prod(values.shape) == 0:
        return 0.0
    largest = float(abs(values).max())
    return _largest(values[values == values]) if math.isnan(largest) else largest


def max_error(actual: Tensor, reference: Any) -> float:
    """Largest absolute difference where the reference is a number; NaN if actual has one there.

    Where the reference is NaN (a negative eps under the root), infinite if actual is not.
    """
    if isinstance(reference, np.ndarray):
        wide: Any = actual.detach().cpu().numpy().astype(np.longdouble)
    else:
        wide = actual.detach().double()
    if math.prod(reference.shape) == 0:
        return 0.0
    error = float(abs(wide - reference).max())
    if not math.isnan(error):
        return error
    number = reference == reference
    if (wide[~number] == wide[~number]).any():
        return math.inf
    difference = abs(wide[number] - reference[number])
    return float(difference.max()) if math.prod(difference.shape) else 0.0


def floor(scale: float, dtype: torch.dtype) -> float:
    """What the module's docstring allows above stock's own error."""
    return (1 if dtype in (torch.float16, torch.bfloat16) else 2) * ulp(scale, dtype)


def assert_close(
    actual: Tensor,
    theirs: Tensor,
    reference: Any,
    what: str = "result",
    scale: float | None = None,
    others: Callable[[], Iterable[Tensor]] = tuple,
) -> None:
    """Fail unless `actual` is as near to the reference as the bound asks, in shape and dtype too.

    actual, theirs   our tensor and stock's, of equal shape and dtype
    reference        the exact values: float64 tensor or longdouble array of the same shape
    scale            Reference.scale of the result; else the largest magnitude of the reference
    others()         stock's tensors from other orders of the sums
    """
    assert actual.shape == theirs.shape, f"{what}: shape {actual.shape}, stock {theirs.shape}"
    assert actual.dtype == theirs.dtype, f"{what}: dtype {actual.dtype}, stock {theirs.dtype}"
    scale = _largest(reference) if scale is None else scale
    error, stocks = max_error(actual, reference), max_error(theirs, reference)
    above = floor(scale, theirs.dtype)
    # `not <=` so that a NaN fails.
    if not error <= stocks + above:
        # Where stock's result is no number, ours is near the exact one.
        errors = [stocks, *(max_error(other, reference) for other in others())]
        stocks = max((e for e in errors if not math.isnan(e)), default=0.0)
    if not error <= stocks + above:
        raise AssertionError(
            f"{what}: error {error:.3e} against fp64 exceeds {stocks + above:.3e}, that is stock's "
            f"own {stocks:.3e} plus {above:.3e} of {theirs.dtype} at {scale:.3e}"
        )


def condition_of(reference: Reference) -> float:
    """The condition of the problem: the largest |mean| / deviation."""
    return float(abs(reference.mean * reference.rstd).max())


def assert_parity(
    ours: Results,
    inputs: Inputs,
    mask: Mask = ALL,
    only: Sequence[str] | None = None,
    theirs: Sequence[Results] = (),
    reference: Reference | None = None,
    condition: float = 0.0,
    compute: Callable[[Inputs, Mask], Results] = stock,
) -> None:
    """Every result of `ours` meets the bound; results that the mask leaves out are undefined.

    `only` names the results to look at; results that stock or ours does not have must be missing
    in both. `theirs` are stock's results, if another call than stock() gave them: by its own order
    of the sums, and possibly by others. `reference` is exact()'s, if the caller has one.
    `condition` is that of the problem, |mean| / deviation: a mean off by an ulp moves the other
    results by so many of theirs. Twice that is allowed, as an ulp is one to two times its dtype's
    epsilon. `compute` has stock's results where `theirs` has not.
    """
    own = theirs[0] if theirs else compute(inputs, mask)
    reference = reference or exact(inputs, mask)

    @functools.cache
    def others() -> Sequence[Results]:
        return theirs[1:] if theirs else stock_in_other_orders(inputs, mask, compute)

    for name in RESULTS:
        if only is not None and name not in only:
            continue
        actual, aten = getattr(ours, name), getattr(own, name)
        assert (actual is None) == (aten is None), f"{name}: ours {actual}, stock {aten}"
        if actual is not None:
            exactly, scale = getattr(reference, name), reference.scale[name]
            scale *= 1 if name == "mean" else max(1.0, 2 * condition)
            assert_close(
                actual, aten, exactly, name, scale, lambda n=name: [getattr(o, n) for o in others()]
            )


def assert_layout_follows(X: Tensor, *outputs: Tensor | None) -> None:
    """Outputs of X's shape have X's own strides; X is dense."""
    for output in outputs:
        if output is not None:
            assert output.shape == X.shape
            assert output.stride() == X.stride(), f"strides {output.stride()}, X's {X.stride()}"


# --- who computed it -------------------------------------------------------------------------


def calls(op: str, device: str) -> tuple[int, int]:
    """Calls of a native op since the last reset: (taken by our kernels, handed to aten)."""
    ours = stocks = 0
    for key, count in torch.ops.gn_override.counters().items():
        name, where, rule = key.split(" ", 2)
        if name == op and where == device:
            if rule == "aten" or rule.startswith("aten:"):
                stocks += count
            else:
                ours += count
    return ours, stocks


@contextlib.contextmanager
def expect_calls(
    device: str,
    forward: bool | None,
    backward: bool | None,
    ops: tuple[str, str] = ATEN,
) -> Iterator[None]:
    """Inside, exactly one call of each op: on our kernels (True), on aten (False), or no call.

    Of the other pairs of ops there is none.
    """
    torch.ops.gn_override.reset_counters()
    yield
    want = {True: (1, 0), False: (0, 1), None: (0, 0)}
    asked = dict.fromkeys((*ATEN, *FUSED, *CAST)) | dict(zip(ops, (forward, backward), strict=True))
    for op, ours in asked.items():
        got = calls(op, device)
        assert got == want[ours], (
            f"{op} on {device}: (ours, aten) calls {got}, expected {want[ours]}; "
            f"counters {dict(torch.ops.gn_override.counters())}"
        )
