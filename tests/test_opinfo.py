"""PyTorch's own test data as acceptance: the samples of op_db and module_db, with torch's checks.

The samples are native_group_norm's, nn.functional.group_norm's and nn.GroupNorm's, as torch has
them and in channels-last as sequences, images and volumes. The checks are those that torch's own
suite runs on such an operator: its checkers where they are part of the wheel, else the same
question asked here. A sample that fails is tried with the override off: only if stock fails it
alike, and STOCK_FAILS says why, the failure is accepted, and shows as an expected one.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from reference import (
    BACKWARD,
    FORWARD,
    TORCH,
    Inputs,
    assert_parity,
    calls,
    composite,
    is_channels_last,
    lay_out,
    native,
    override_off,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal import composite_compliance
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import gn_override  # noqa: F401  (loads the extension and switches on)

aten = torch.ops.aten

OPERATORS = ("native_group_norm", "nn.functional.group_norm")
SOURCES = (*OPERATORS, "nn.GroupNorm")
# The rank that X gets, if it has less, and its memory layout. What has one pixel only is NCHW too.
LAYOUTS = {
    "given": (0, None),
    "channels_last": (0, "channels_last"),
    "image": (4, "channels_last"),
    "volume": (5, "channels_last"),
}


@dataclass(frozen=True)
class Call:
    """A sample: a function of its tensors (X, then gamma and beta if given), and these."""

    name: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    gamma: Tensor | None
    beta: Tensor | None
    groups: int
    eps: float

    @property
    def X(self) -> Tensor:
        return self.tensors[0]

    @property
    def inputs(self) -> Inputs:
        """With a random dY."""
        dY = torch.randn(self.X.shape).to(self.X)
        return Inputs(self.X, self.gamma, self.beta, dY, self.groups, self.eps)

    def leaves(self, requires_grad: bool = True) -> list[Tensor]:
        return [t.detach().requires_grad_(requires_grad) for t in self.tensors]

    def with_X(self, X: Tensor) -> Call:
        return replace(self, tensors=(X, *self.tensors[1:]))


def _info(name: str) -> Any:
    infos = [op for op in op_db if op.name == name]
    if not infos:
        pytest.skip(f"torch {torch.__version__} has no samples of {name}")
    return infos[0]


def _module_info() -> Any:
    (info,) = [module for module in module_db if module.module_cls is nn.GroupNorm]
    return info


def _operator_calls(
    name: str, device: str, dtype: torch.dtype, reference_inputs: bool
) -> Iterator[Call]:
    info = _info(name)
    draw = info.reference_inputs if reference_inputs else info.sample_inputs
    samples = draw(device, dtype, requires_grad=False)
    for number, sample in enumerate(samples):
        flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]

        def function(*tensors: Tensor, flat=flat, spec=spec, places=places) -> Any:
            leaves = list(flat)
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            X, args, kwargs = pytree.tree_unflatten(leaves, spec)
            return info.op(X, *args, **kwargs)

        if name == "native_group_norm":
            gamma, beta, *_, groups, eps = sample.args
        else:
            (groups,) = sample.args
            gamma, beta = sample.kwargs.get("weight"), sample.kwargs.get("bias")
            eps = sample.kwargs.get("eps", 1e-5)
        tensors = tuple(flat[i].detach() for i in places)
        yield Call(f"sample {number}", function, tensors, gamma, beta, groups, eps)


def _module_calls(device: str, dtype: torch.dtype) -> Iterator[Call]:
    info = _module_info()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = info.module_inputs_func(info, device, dtype, requires_grad=False, training=True)
    for sample in samples:
        build = sample.constructor_input
        norm = nn.GroupNorm(*build.args, **build.kwargs).to(device, dtype)
        names = [name for name, _ in norm.named_parameters()]

        def function(X: Tensor, *params: Tensor, norm=norm, names=names) -> Tensor:
            with_names = dict(zip(names, params, strict=True))
            return torch.func.functional_call(norm, with_names, (X,))

        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        X, *_ = sample.forward_input.args
        gamma, beta = (None if p is None else p.detach() for p in (norm.weight, norm.bias))
        tensors = tuple(t for t in (X.detach(), gamma, beta) if t is not None)
        yield Call(sample.desc, function, tensors, gamma, beta, norm.num_groups, norm.eps)


def calls_of(
    source: str, layout: str, device: str, dtype: torch.dtype, reference_inputs: bool = False
) -> list[Call]:
    """Every sample of a source, X in the layout; without those that the layout leaves as is.

    reference_inputs  of an operator the larger list, which begins with the samples
    """
    if source in OPERATORS:
        samples = _operator_calls(source, device, dtype, reference_inputs)
    else:
        samples = _module_calls(device, dtype)
    rank, memory = LAYOUTS[layout]
    found = []
    for call in samples:
        X = call.X
        if memory is not None and (X.dim() < 3 if rank == 0 else X.dim() >= rank):
            continue
        while X.dim() < rank:
            X = X.unsqueeze(2)
        X = X if memory is None else lay_out(X, memory)
        found.append(call.with_X(X))
    return found


# --- the checks ------------------------------------------------------------------------------


def outputs(call: Call, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    result = call.function(*tensors)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def gradients(call: Call, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    results = outputs(call, leaves)
    return torch.autograd.grad(
        results, leaves, [torch.ones_like(r) for r in results], allow_unused=True
    )


def assert_equal(actual: Any, expected: Any, equal_nan: bool = True) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=equal_nan)


def numeric(**options: Any) -> Callable[[Call], None]:
    """gradcheck as torch's suite calls it: first derivatives."""

    def check(call: Call) -> None:
        gradcheck(call.function, call.leaves(), fast_mode=True, **options)

    return check


def second(**options: Any) -> Callable[[Call], None]:
    """gradgradcheck: second derivatives."""

    def check(call: Call) -> None:
        gradgradcheck(call.function, call.leaves(), fast_mode=True, **options)

    return check


def non_contiguous(call: Call) -> None:
    """Every tensor with a gap after each element: results as of the tensors that have none."""

    def spread(t: Tensor) -> Tensor:
        return t.detach().repeat_interleave(2, dim=-1)[..., ::2].requires_grad_()

    spreads = [spread(t) for t in call.tensors]
    assert_equal(outputs(call, spreads), outputs(call, call.leaves()))
    assert_equal(gradients(call, spreads), gradients(call, call.leaves()))


def batched(call: Call, of_vjp: bool = False) -> None:
    """vmap against a loop: X batched in its first and in its last dimension, then every tensor."""
    batches = [torch.stack([t, t.cos(), t.sin()]) for t in call.tensors]
    alone = [*call.tensors[1:]]

    def vjp(*tensors: Tensor) -> Any:
        results, pull = torch.func.vjp(call.function, *tensors)
        return pull(pytree.tree_map(torch.ones_like, results))

    function = vjp if of_vjp else call.function
    for in_dims, tensors in (
        ((0, *[None] * len(alone)), [batches[0], *alone]),
        ((call.X.dim(), *[None] * len(alone)), [batches[0].movedim(0, -1), *alone]),
        ((0,) * len(batches), batches),
    ):
        slices = [
            [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)]
            for i in range(3)
        ]
        loop = [function(*tensors) for tensors in slices]
        together = pytree.tree_map(lambda *each: torch.stack(each), loop[0], *loop[1:])
        assert_equal(torch.func.vmap(function, in_dims)(*tensors), together)


def composite_forward(call: Call) -> None:
    composite_compliance.check_with_mode(call.function, call.leaves(False), {}, assert_equal)
    composite_compliance.check_all_permutations(call.function, call.leaves(False), {}, assert_equal)


def composite_backward(call: Call) -> None:
    composite_compliance.check_backward_formula(
        call.function, call.leaves(), {}, assert_equal_fn=assert_equal
    )


def distinct(samples: list[Call]) -> list[Call]:
    """Without those that differ from another in their numbers alone."""
    by_form = {tuple((t.shape, t.stride()) for t in call.tensors): call for call in samples}
    return list(by_form.values())


def composite_forward_ad(call: Call) -> None:
    composite_compliance.check_forward_ad_formula(
        call.function, call.leaves(), {}, assert_equal_fn=assert_equal
    )


def copy_on_write(call: Call) -> None:
    """Neither forward nor backward makes a lazy copy of its operands a real one."""
    values = [t.clone(memory_format=torch.preserve_format) for t in call.tensors]
    lazy = [torch._lazy_clone(t) for t in call.tensors]
    leaves = [t.requires_grad_() for t in lazy]
    results = outputs(call, leaves)
    assert all(torch._C._is_cow_tensor(t) for t in lazy), "materialised in forward"
    sources = [torch.ones_like(r) for r in results]
    grads = [torch._lazy_clone(s) for s in sources]
    torch.autograd.grad(results, leaves, grads, allow_unused=True)
    assert all(torch._C._is_cow_tensor(t) for t in (*lazy, *grads)), "materialised in backward"
    assert_equal(list(call.tensors), values)


def strides(t: Tensor) -> list[int]:
    """Of the dimensions that have more than one element: the others' mean nothing."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def facts(tensors: Any) -> list[Any]:
    return [
        None if t is None else (tuple(t.shape), strides(t), t.dtype, t.device.type) for t in tensors
    ]


def fake(call: Call) -> None:
    """Sizes, strides, dtypes and device of fake results, forward and backward, are the real's."""
    leaves = call.leaves()
    real = (*outputs(call, leaves), *gradients(call, leaves))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(t) for t in call.tensors]
    with mode:
        leaves = [t.detach().requires_grad_() for t in fakes]
        found = (*outputs(call, leaves), *gradients(call, leaves))
    assert facts(found) == facts(real)


def cross_reference(call: Call, autocast: bool = False) -> None:
    """Every operator of forward and backward runs on fake tensors too, and is compared."""
    with (
        torch.autocast(call.X.device.type, torch.bfloat16, enabled=autocast),
        CrossRefFakeMode(check_aliasing=True),
        torch.autograd.set_multithreading_enabled(False),
    ):
        gradients(call, call.leaves())


def memory_format(call: Call) -> None:
    """Y and dX have X's strides."""
    if call.X.numel() == 0:
        return  # of no layout
    leaves = call.leaves()
    Y, dX = outputs(call, leaves)[0], gradients(call, leaves)[0]
    assert strides(Y) == strides(dX) == strides(call.X)


CHECKS: dict[str, Callable[[Call], None]] = {
    "gradient": numeric(),
    "batched gradient": numeric(check_batched_grad=True, check_undefined_grad=False),
    "forward AD": numeric(check_forward_ad=True, check_backward_ad=False),
    "batched forward AD": numeric(
        check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True
    ),
    "gradgrad": second(),
    "gradgrad non-contiguous": second(gen_non_contig_grad_outputs=True),
    "batched gradgrad": second(check_batched_grad=True),
    "forward over reverse": second(
        check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    ),
    "non-contiguous": non_contiguous,
    "vmap": batched,
    "vmap of vjp": functools.partial(batched, of_vjp=True),
    "composite forward": composite_forward,
    "composite backward": composite_backward,
    "composite forward AD": composite_forward_ad,
    "copy-on-write": copy_on_write,
    "fake": fake,
    "fake cross-reference": cross_reference,
    "fake cross-reference, autocast": functools.partial(cross_reference, autocast=True),
    "memory format": memory_format,
}

# (check, source): why stock fails some samples. It may be only some versions, layouts and devices:
# what stock passes there has to pass here too.
_STATISTICS = "stock's native_group_norm has no gradient for a mean or rstd alone"
_VMAP = "vmap cannot say whether a batched tensor is channels-last"
_FORWARD_AD = "stock's forward-mode formula takes a view that channels-last tensors do not have"
STOCK_FAILS: dict[tuple[str, str], str] = {
    ("gradient", "native_group_norm"): _STATISTICS,
    ("batched gradient", "native_group_norm"): _STATISTICS,
    ("composite backward", "native_group_norm"): _STATISTICS,
    ("forward AD", "native_group_norm"): _FORWARD_AD,
    ("batched forward AD", "native_group_norm"): _FORWARD_AD,
    ("forward over reverse", "native_group_norm"): _FORWARD_AD,
    ("composite forward AD", "native_group_norm"): _FORWARD_AD,
    ("non-contiguous", "native_group_norm"): "stock's native_group_norm takes dense tensors alone",
    **{
        (check, source): _VMAP
        for check in ("batched gradient", "batched gradgrad", "vmap", "vmap of vjp")
        for source in ("nn.functional.group_norm", "nn.GroupNorm")
    },
}

# In a forward-mode level and under vmap the call may be stock's.
NOT_OURS = ("composite forward AD", "vmap", "vmap of vjp")


def error_of(check: Callable[[Call], None], call: Call) -> Exception | None:
    try:
        check(call)
    except Exception as error:
        return error
    return None


# Stock's native_group_norm of a sequence that is channels-last, up to 2.13 on CPU.
REFUSED = "Expected X.is_contiguous(memory_format) to be true"


def stock_error_of(check: Callable[[Call], None], call: Call) -> Exception | None:
    """What stock makes of the sample; of its image where it does not take sequences."""
    with override_off():
        error = error_of(check, call)
        if call.X.dim() == 3 and error is not None and REFUSED in str(error):
            return error_of(check, call.with_X(call.X.unsqueeze(2)))
    return error


def kind_of(error: Exception) -> tuple[type, str]:
    """Type and first line, with no numbers: those of a difference are not the same twice."""
    lines = str(error).splitlines() or [""]
    return type(error), re.sub(r"[-+]?[\d.]+(e[-+]?\d+)?", "#", lines[0])


def run(name: str, source: str, samples: list[Call]) -> None:
    check = CHECKS[name]
    reason, accepted = STOCK_FAILS.get((name, source)), 0
    for call in samples:
        error = error_of(check, call)
        if error is None:
            continue
        theirs = stock_error_of(check, call)
        if theirs is None or kind_of(theirs) != kind_of(error):
            where = f"{call.name}, X {tuple(call.X.shape)} {call.X.stride()}"
            raise AssertionError(f"{where}: {error!r}; stock: {theirs!r}") from error
        assert reason, f"{call.name}: stock fails it too, and STOCK_FAILS does not list it: {error}"
        accepted += 1
    if accepted:
        pytest.xfail(f"{accepted} of {len(samples)} samples fail as in stock: {reason}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("check", CHECKS)
def test_check(device, check, source, layout):
    dtype = torch.float if "autocast" in check else torch.double
    samples = calls_of(source, layout, device, dtype)
    assert len(samples) >= 3
    if check == "composite forward AD":  # 64 calls a sample
        samples = distinct(samples)
    run(check, source, samples)
    if layout != "given" and check not in NOT_OURS:
        assert calls(FORWARD, device)[0] > 0


# --- values, dtypes, errors, registration ----------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_08_values(device, source, layout, dtype):
    """Samples and reference inputs against fp64, results and gradients (#98089)."""
    served = 0
    for call in calls_of(source, layout, device, dtype, reference_inputs=True):
        inputs = call.inputs
        if call.X.numel() == 0:
            assert composite(inputs).Y.shape == call.X.shape
        elif is_channels_last(call.X):
            ours = native(inputs) if source == "native_group_norm" else composite(inputs)
            missing = {"mean", "rstd"} if source != "native_group_norm" else set()
            missing |= {"dgamma"} if call.gamma is None and missing else set()
            missing |= {"dbeta"} if call.beta is None and missing else set()
            assert_parity(ours, inputs, only=sorted(set(vars(ours)) - missing))
            served += 1
        else:
            ours = composite(inputs)
            found = [name for name, value in vars(ours).items() if value is not None]
            assert_parity(ours, inputs, only=found)
    least = 2 if TORCH < (2, 13) else 3  # 2.11 has fewer samples
    assert served >= least or layout == "given"
    assert calls(FORWARD, device)[0] == calls(BACKWARD, device)[0] == served


@pytest.mark.parametrize("layout", ["given", "channels_last"])
@pytest.mark.parametrize("source", OPERATORS)
def test_dtypes(device, source, layout):
    """The same dtypes forward and backward as torch says, and the same errors for the others."""
    info = _info(source)
    samples = calls_of(source, layout, device, torch.float32)
    X, gamma, beta = next(call.tensors for call in samples if call.X.dim() == 3)
    sizes = (*X.shape, 1, 1e-5)

    def outcome(dtype: torch.dtype) -> tuple[str, str]:
        leaves = [t.to(dtype) for t in (X, gamma, beta)]
        leaves = [t.requires_grad_() if dtype.is_floating_point else t for t in leaves]
        try:
            if source == "native_group_norm":
                Y = aten.native_group_norm(*leaves, *sizes)[0]
            else:
                Y = torch.nn.functional.group_norm(leaves[0], 1, *leaves[1:])
            Y.sum().backward()
        except RuntimeError as error:
            return "raises", str(error)
        return "works", ""

    known = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    others = [torch.complex64, torch.int32, torch.int8, torch.bool]
    supported = info.supported_dtypes(device) & info.supported_backward_dtypes(device)
    for dtype in (*known, *others):
        ours = outcome(dtype)
        assert (ours[0] == "works") == (dtype in supported), f"{dtype}: {ours}"
        if ours[0] != "works":
            with override_off():
                assert outcome(dtype) == ours


@pytest.mark.parametrize("layout", ["given", "channels_last"])
def test_error_samples(device, layout):
    """The bad inputs of op_db and module_db raise with the override what they raise without."""
    failures: list[tuple[Any, Callable[[], Any]]] = []
    for error in _info("nn.functional.group_norm").error_inputs(device):
        sample = error.sample_input
        X = sample.input
        if X.dim() > 2 and layout != "given":
            X = lay_out(X, layout)
        failures.append(
            (
                error,
                functools.partial(torch.nn.functional.group_norm, X, *sample.args, **sample.kwargs),
            )
        )
    info = _module_info()
    if info.module_error_inputs_func is not None:
        for error in info.module_error_inputs_func(
            info, device, torch.double, requires_grad=False, training=True
        ):
            build = error.module_error_input.constructor_input
            failures.append((error, functools.partial(nn.GroupNorm, *build.args, **build.kwargs)))
    assert len(failures) >= 2
    for error, call in failures:
        raised = []
        for context in (contextlib.nullcontext, override_off):
            with context(), pytest.raises(error.error_type, match=error.error_regex) as caught:
                call()
            raised.append(str(caught.value))
        assert raised[0] == raised[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(device, layout):
    """Schema, autograd registration, fake tensors and AOTAutograd, by torch's own checker."""
    samples = distinct(calls_of("native_group_norm", layout, device, torch.float32))
    for call in samples:
        if call.X.numel() == 0 or (call.X.dim() < 3 and layout != "given"):
            continue
        i = call.inputs
        leaves = iter(call.leaves())
        X, gamma, beta = (None if t is None else next(leaves) for t in (i.X, i.gamma, i.beta))
        torch.library.opcheck(
            aten.native_group_norm.default, (X, gamma, beta, *i.sizes, abs(i.eps))
        )
        if i.gamma is None and not is_channels_last(i.X):
            continue  # stock's dgamma is undefined then, which the checker does not take
        _, mean, rstd = aten.native_group_norm(i.X, i.gamma, i.beta, *i.sizes, abs(i.eps))
        torch.library.opcheck(
            aten.native_group_norm_backward.default,
            (lay_out(i.dY, "channels_last"), i.X, mean, rstd, i.gamma, *i.sizes, [True] * 3),
        )
    if layout != "given":
        assert calls(BACKWARD, device)[0] > 0
