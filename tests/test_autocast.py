"""torch.autocast: half precision read as it is, float32 returned; or set_autocast("preserve").

What needs no GPU runs on fake CUDA tensors, where the extension is built with CUDA: dtypes,
strides, what is saved, and who takes a call. Values are compared on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import (
    ACTIVATIONS,
    ATEN,
    CAST,
    FUSED,
    LAYOUTS,
    Inputs,
    Results,
    assert_parity,
    calls,
    composite,
    expect_calls,
    is_channels_last,
    lay_out,
    make_inputs,
    override_off,
    stock,
)
from shapes import EDGE_CASES, KERNEL_CASES, Case
from test_compile import after_the_pass
from test_schemes import CASES as SCHEME_CASES
from test_schemes import all_pins, assert_same_bits, fits, pin  # noqa: F401  (a fixture)
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import gn_override
from gn_override import _library

op = torch.ops.gn_override.group_norm_act
op_backward = torch.ops.gn_override.group_norm_act_backward
HALVES = (torch.float16, torch.bfloat16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=["half", "bfloat16"])
# Up to 2.13 stock copies what it gets to NCHW, in the graph.
STOCK_DROPS_LAYOUT = _library.build_info()["conditions"]["STOCK_DROPS_LAYOUT"]
GROUPS = 4
SHAPE = (2, 8, 6, 5)


@pytest.fixture(autouse=True)
def _float32_again() -> Iterator[None]:
    yield
    gn_override.set_autocast("float32")


@pytest.fixture
def cuda_autocast(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """torch.autocast("cuda", ...), which else switches itself off where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    return lambda dtype=torch.float16: torch.autocast("cuda", dtype)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        yield mode


def fakes(
    layout: str = "channels_last",
    dtype: torch.dtype = torch.float16,
    param_dtype: torch.dtype | None = torch.float32,
    shape: tuple[int, ...] = SHAPE,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """X, gamma, beta that require gradients: fake CUDA tensors inside FakeTensorMode."""
    X = lay_out(torch.empty(shape, device="cuda", dtype=dtype), layout).detach().requires_grad_()
    if param_dtype is None:
        return X, None, None
    gamma, beta = (
        torch.empty(shape[1], device="cuda", dtype=param_dtype, requires_grad=True)
        for _ in range(2)
    )
    return X, gamma, beta


def norm(X: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    return F.group_norm(X, GROUPS, gamma, beta)


def is_ours(Y: Tensor) -> bool:
    """Y comes from group_norm_act, not from the native op."""
    assert Y.grad_fn is not None
    return "ActivatedNorm" in Y.grad_fn.name()


def saved_by(function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The result, and what autograd keeps for backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(), saved


# --- the contract, on fake tensors ------------------------------------------------------------


@pytest.mark.cuda_build
@halves
@pytest.mark.parametrize("shape", [(2, 8, 7), SHAPE, (2, 8, 3, 4, 5)], ids=["ncl", "nchw", "ncdhw"])
def test_dtypes_and_layouts(fake, cuda_autocast, dtype, shape):
    """float32 out, dX in X's dtype, gradients of parameters in theirs; all in X's layout."""
    tensors = fakes(dtype=dtype, shape=shape)
    with cuda_autocast(dtype):
        Y = norm(*tensors)
    assert is_ours(Y)
    assert Y.dtype == torch.float32 and is_channels_last(Y)
    # The engine wants a GPU; what it would call does not.
    X, gamma, beta = tensors
    mean = rstd = torch.empty(2, GROUPS, device="cuda")
    dX, dgamma, dbeta = op_backward(
        torch.empty_like(Y), X, mean, rstd, gamma, beta, GROUPS, "identity", [True] * 3
    )
    assert dX.dtype == dtype and is_channels_last(dX)
    assert dgamma.dtype == dbeta.dtype == torch.float32


@pytest.mark.cuda_build
def test_saved_for_backward(fake, cuda_autocast):
    """X itself, where stock keeps a float copy."""
    tensors = fakes()
    X = tensors[0]

    def run() -> Tensor:
        with cuda_autocast():
            return norm(*tensors)

    _, saved = saved_by(run)
    large = [t for t in saved if t.numel() == X.numel()]
    assert len(large) == 1 and large[0].dtype == X.dtype
    assert {t.shape for t in saved} == {X.shape, (8,), (2, GROUPS)}
    with gn_override.disabled():
        _, saved = saved_by(run)
    assert [t.dtype for t in saved if t.numel() == X.numel()] == [torch.float32]


@pytest.mark.cuda_build
@pytest.mark.parametrize("param_dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "unaligned", "sliced"])
def test_taken(fake, cuda_autocast, layout, param_dtype):
    tensors = [t for t in fakes(layout, param_dtype=param_dtype) if t is not None]
    with cuda_autocast():
        Y = norm(*tensors)
    assert is_ours(Y) and Y.dtype == torch.float32 and is_channels_last(Y)


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    "tensors",
    [
        lambda: fakes("nchw"),
        lambda: fakes("permuted"),
        lambda: fakes(shape=(2, 8, 1, 1)),
        lambda: fakes(shape=(2, 8)),
        lambda: fakes(shape=(0, 8, 6, 5)),
        lambda: fakes(dtype=torch.float32),
        lambda: fakes(dtype=torch.float64, param_dtype=torch.float64),
    ],
    ids=["nchw", "permuted", "pixel", "2-D", "empty", "float32", "float64"],
)
def test_not_taken(fake, cuda_autocast, tensors):
    """Stock's autocast kernel runs these: its dtypes, strides and autograd graph."""
    operands = tensors()
    with cuda_autocast():
        Y = norm(*operands)
        with gn_override.disabled():
            expected = norm(*operands)
    assert not is_ours(Y)
    assert Y.dtype == expected.dtype
    if is_channels_last(operands[0]):
        assert is_channels_last(Y)
    else:
        assert Y.stride() == expected.stride()
    if not is_channels_last(operands[0]) or not STOCK_DROPS_LAYOUT:  # else stock has a copy there
        assert Y.grad_fn.next_functions[0][0].name() == expected.grad_fn.next_functions[0][0].name()


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    "arguments",
    [
        lambda X, gamma, beta: (X, 3, gamma, beta),
        lambda X, gamma, beta: (X, 0, gamma, beta),
        lambda X, gamma, beta: (X, GROUPS, gamma[:3], beta),
        lambda X, gamma, beta: (X, GROUPS, gamma, beta[:3]),
        lambda X, gamma, beta: (X[0, :, 0, 0], GROUPS, gamma, beta),
        lambda X, gamma, beta: (X, GROUPS, gamma.double(), beta),
    ],
    ids=["groups", "no groups", "weight", "bias", "rank", "dtype"],
)
@pytest.mark.parametrize("mode", ["float32", "preserve"])
def test_errors_are_stocks(fake, cuda_autocast, arguments, mode):
    gn_override.set_autocast(mode)
    operands = arguments(*fakes())

    def outcome() -> tuple[type, str] | torch.dtype:
        try:
            return torch.group_norm(*operands).dtype
        except (RuntimeError, ValueError, IndexError) as error:
            return type(error), str(error)

    with cuda_autocast():
        ours = outcome()
        with gn_override.disabled():
            theirs = outcome()
    if mode == "float32" or isinstance(theirs, tuple):
        assert ours == theirs
    else:
        assert (ours, theirs) == (torch.float16, torch.float32)


@pytest.mark.cuda_build
def test_off_is_stocks(fake, cuda_autocast):
    tensors = fakes()
    gn_override.set_autocast("preserve")
    with gn_override.disabled(), cuda_autocast():
        Y = norm(*tensors)
    assert Y.dtype == torch.float32 and not is_ours(Y)


@pytest.mark.cuda_build
def test_outside_autocast(fake):
    X, gamma, beta = fakes(param_dtype=torch.float16)
    for mode in ("float32", "preserve"):
        gn_override.set_autocast(mode)
        assert norm(X, gamma, beta).dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(X, gamma, beta).dtype == torch.float16


# --- "preserve" -------------------------------------------------------------------------------


@pytest.mark.cuda_build
@halves
@pytest.mark.parametrize("param_dtype", [None, torch.float32, "same"], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 1, 1), SHAPE, (2, 8)], ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "nchw", "permuted"])
def test_preserve(fake, cuda_autocast, dtype, param_dtype, shape, layout):
    """X's dtype whoever runs the call."""
    gn_override.set_autocast("preserve")
    param_dtype = dtype if param_dtype == "same" else param_dtype
    tensors = [t for t in fakes(layout, dtype, param_dtype, shape) if t is not None]
    with cuda_autocast(dtype):
        Y = norm(*tensors)
    assert Y.dtype == dtype and Y.shape == shape


@pytest.mark.cuda_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preserve_keeps_wide_inputs(fake, cuda_autocast, dtype):
    gn_override.set_autocast("preserve")
    with cuda_autocast():
        assert norm(*fakes(dtype=dtype, param_dtype=dtype)).dtype == dtype


@pytest.mark.cuda_build
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("mode", ["float32", "preserve"])
def test_with_an_activation(fake, cuda_autocast, mode, layout):
    """functional.group_norm returns the dtype of F.group_norm, and saves X as it is."""
    gn_override.set_autocast(mode)
    X, gamma, beta = fakes(layout)

    def run() -> Tensor:
        with cuda_autocast():
            return gn_override.functional.group_norm(X, GROUPS, gamma, beta, activation="silu")

    Y, saved = saved_by(run)
    with cuda_autocast():
        assert Y.dtype == norm(X, gamma, beta).dtype
    assert Y.dtype == (torch.float32 if mode == "float32" else torch.float16)
    if layout == "channels_last":
        assert is_ours(Y) and is_channels_last(Y)
        assert [t.dtype for t in saved if t.numel() == X.numel()] == [X.dtype]


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    "dtypes, taken",
    [
        ((torch.float32, torch.float32), torch.float32),
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float16, torch.float16), torch.bfloat16),
        ((torch.bfloat16, torch.float32), torch.bfloat16),
        ((torch.float32, torch.float16), torch.bfloat16),
    ],
    ids=str,
)
def test_preserve_casts_weights_that_fit_no_kernel(fake, cuda_autocast, dtypes, taken):
    """As those of a norm without an activation; PyTorch's CUDA kernels refuse them otherwise."""
    gn_override.set_autocast("preserve")
    X = fakes(dtype=torch.bfloat16)[0]
    gamma, beta = (torch.empty(8, device="cuda", dtype=d, requires_grad=True) for d in dtypes)

    def run() -> Tensor:
        with cuda_autocast(torch.bfloat16):
            return op(X, GROUPS, gamma, beta, 1e-5, "silu")[0]

    Y, saved = saved_by(run)
    assert Y.dtype == torch.bfloat16
    assert [t.dtype for t in saved if t.shape == gamma.shape] == [taken, taken]


# --- the switch -------------------------------------------------------------------------------


def test_switch():
    assert gn_override.report().autocast == "float32"
    tag = torch.compiler.config.cache_key_tag
    gn_override.set_autocast("preserve")
    assert gn_override.report().autocast == "preserve"
    assert "half precision stays" in str(gn_override.report())
    # What is compiled differs, by whomever.
    assert torch.compiler.config.cache_key_tag not in (tag, "")
    gn_override.set_inductor(False)
    assert torch.compiler.config.cache_key_tag not in (tag, "")
    with gn_override.disabled():
        assert torch.compiler.config.cache_key_tag == ""
    gn_override.set_inductor(True)
    gn_override.set_autocast("float32")
    assert torch.compiler.config.cache_key_tag == tag
    assert "half precision stays" not in str(gn_override.report())
    for wrong in ("half", "", None, True):
        with pytest.raises(
            ValueError, match=r"set_autocast\(\) takes 'float32' or 'preserve', not"
        ):
            gn_override.set_autocast(wrong)
    assert gn_override.report().autocast == "float32"


def test_report_names_the_owner():
    owners = {owner.key: owner for owner in gn_override.report().owners if owner.op == "group_norm"}
    ours = "cuda" in _library.build_info()["backends"]
    assert owners["AutocastCUDA"].package == ("gn_override" if ours else "torch")


# --- who else looks on ------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Records what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A class of tensors with rules for PyTorch's operators alone."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        result = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        result.inner = inner
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func.namespace == "aten", func
        unwrapped = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return torch.utils._pytree.tree_map_only(Tensor, cls, func(*unwrapped, **(kwargs or {})))


@pytest.mark.cuda_build
@pytest.mark.parametrize("mode", ["float32", "preserve"])
def test_modes_and_classes_see_atens_operators(fake, cuda_autocast, mode):
    gn_override.set_autocast(mode)
    X, gamma, beta = fakes()
    kind = torch.float32 if mode == "float32" else torch.float16
    with cuda_autocast(), Watch() as watch:
        assert norm(X, gamma, beta).dtype == kind
    assert watch.seen and not any("gn_override" in name for name in watch.seen)
    with cuda_autocast(), torch.no_grad():
        Y = norm(Wrapper(X.detach()), gamma, beta)
        assert type(Y) is Wrapper and Y.dtype == kind
        Y = norm(X, Wrapper(gamma.detach()), beta)
        assert type(Y) is Wrapper and Y.dtype == kind


@pytest.mark.cuda_build
@pytest.mark.parametrize("mode", ["float32", "preserve"])
def test_vmap(fake, cuda_autocast, mode):
    """PyTorch's batching rule comes before autocast, so neither changes anything."""
    gn_override.set_autocast(mode)
    X, gamma, beta = (t.detach() for t in fakes())

    def batched() -> Tensor:
        return torch.func.vmap(norm, in_dims=(0, None, None))(torch.stack([X, X]), gamma, beta)

    with cuda_autocast():
        Y = batched()
        with gn_override.disabled():
            assert (Y.dtype, Y.shape) == (batched().dtype, (2, *X.shape))
    assert Y.dtype == batched().dtype


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["float32", "preserve"])
def test_transforms(mode):
    """Reverse and forward mode of torch.func, as stock's."""
    gn_override.set_autocast(mode)
    X, gamma, beta = (t.detach() for t in real(dtype=torch.float16))
    kind = torch.float32 if mode == "float32" else torch.float16

    tangent = torch.randn_like(X)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            Y = norm(x, gamma, beta)
        assert Y.dtype == (kind if gn_override.is_enabled() else torch.float32)
        return Y

    def transformed() -> list[Tensor]:
        gradient = torch.func.grad(lambda x: function(x).float().sin().sum())(X)
        return [gradient, torch.func.jvp(function, (X,), (tangent,))[1].float()]

    ours = transformed()
    with gn_override.disabled():
        theirs = transformed()
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.cuda_build
@pytest.mark.parametrize("mode", ["float32", "preserve"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traced_graphs_are_atens(cuda_autocast, mode, pre_dispatch):
    """make_fx, and so AOTAutograd: what is traced runs without this package."""
    gn_override.set_autocast(mode)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        X, gamma, beta = (t.detach() for t in fakes())

    def function(*tensors: Tensor) -> Tensor:
        with cuda_autocast():
            return norm(*tensors)

    graph = make_fx(function, tracing_mode="fake", pre_dispatch=pre_dispatch)(X, gamma, beta)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert any("group_norm" in str(target) for target in targets)
    assert not any("gn_override" in str(target) for target in targets)


class AutocastNorm(nn.Module):
    def __init__(self, autocast: Callable[[], Any]) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, 8, device="cuda")
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.norm(x)


@pytest.mark.cuda_build
@pytest.mark.parametrize("mode", ["float32", "preserve"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_programs_are_atens(cuda_autocast, mode, strict):
    gn_override.set_autocast(mode)
    with FakeTensorMode(shape_env=ShapeEnv()):
        X = fakes()[0].detach()
        module = AutocastNorm(lambda: torch.autocast("cuda", torch.float16))

    def codes() -> list[str]:
        torch._dynamo.reset()
        program = torch.export.export(module, (X,), strict=strict)
        both = program, program.run_decompositions()
        modules = [m for exported in both for m in exported.graph_module.modules()]
        return [m.code for m in modules if hasattr(m, "code")]

    ours = codes()
    with gn_override.disabled():
        theirs = codes()
    assert any("native_group_norm" in code for code in ours)
    assert not any("gn_override" in code for code in ours)
    if mode == "float32":
        assert ours == theirs
    else:
        assert not any("float32" in code for code in ours)
        assert any("float32" in code for code in theirs)


# --- the operator that runs, by its composite where there is no GPU -----------------------------


def wide(inputs: Inputs) -> Results:
    """group_norm_act with a float Y, and its gradients."""
    i = inputs
    X, gamma, beta = (
        None if t is None else t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)
    )
    Y = op(X, i.groups, gamma, beta, i.eps, "identity", torch.float32)[0]
    Y.backward(i.dY)
    return Results(
        Y.detach(), None, None, *(None if t is None else t.grad for t in (X, gamma, beta))
    )


def in_float(inputs: Inputs) -> Results:
    """What autocast makes of the call in stock: X cast, and dX cast back."""
    results = stock(inputs)
    for name, parameter in (("dgamma", inputs.gamma), ("dbeta", inputs.beta)):
        if parameter is None:
            setattr(results, name, None)
    return results


COMPARED = ("Y", "dX", "dgamma", "dbeta")
FEW = tuple(case for case in EDGE_CASES if case.name in ("d3", "c9", "volume", "ncl", "tiles"))
few_cases = pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)


@halves
@few_cases
@pytest.mark.parametrize("affine", ["both", "none", "weight", "bias"])
def test_operator(device, case, dtype, affine):
    """Values and gradients; on a CPU by the composite, which is counted as aten's."""
    inputs = make_inputs(case, device, dtype, torch.float32, torch.float32, affine=affine)
    ours = device == "cuda"
    results = wide(inputs)
    for name in CAST:
        assert calls(name, device) == ((1, 0) if ours else (0, 1))
    assert_parity(results, inputs, only=COMPARED, theirs=[in_float(inputs)])
    assert is_channels_last(results.Y) == ours


def test_operator_refuses_other_dtypes():
    X = torch.randn(2, 8, 3, 3)
    for dtype, out_dtype in (
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float64),
    ):
        with pytest.raises(ValueError, match="out_dtype must be the input's, or Float for a half"):
            op(X.to(dtype), GROUPS, out_dtype=out_dtype)


def test_beta_may_change_before_backward(device):
    """No gradient depends on it, so it is not saved, as in stock."""
    inputs = make_inputs(FEW[0], device, torch.float16, torch.float32, torch.float32)
    expected = wide(inputs)
    X, gamma, beta = (t.detach().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta))
    Y = op(X, inputs.groups, gamma, beta, inputs.eps, "identity", torch.float32)[0]
    with torch.no_grad():
        beta.zero_()
    gradients = torch.autograd.grad(Y, (X, gamma, beta), inputs.dY)
    for found, name in zip(gradients, COMPARED[1:], strict=True):
        assert torch.equal(found, getattr(expected, name)), name


@pytest.mark.parametrize("affine", ["both", "none", "weight", "bias"])
def test_operator_twice_differentiated(device, affine):
    """Second derivatives, as of the cast and the norm."""
    i = make_inputs(FEW[0], device, torch.bfloat16, torch.float32, affine=affine)

    def second(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta) if t is not None]
        operands = iter(leaves)
        X, gamma, beta = (None if t is None else next(operands) for t in (i.X, i.gamma, i.beta))
        first = torch.autograd.grad(function(X, gamma, beta).sin().sum(), leaves, create_graph=True)
        loss = sum(g.float().square().sum() for g in first)
        return list(torch.autograd.grad(loss, leaves))

    ours = second(
        lambda X, gamma, beta: op(X, i.groups, gamma, beta, i.eps, "identity", torch.float32)[0]
    )

    def cast_and_norm(X: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        # Ones: 2.13's second derivative fails with a bias alone.
        gamma = torch.ones(i.X.shape[1], device=device) if gamma is None else gamma
        return F.group_norm(X.float(), i.groups, gamma, beta, i.eps)

    with override_off():
        theirs = second(cast_and_norm)
    for found, wanted in zip(ours, theirs, strict=True):
        # Gradients of X are rounded to bfloat16 on the way.
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_opcheck(device, layout):
    i = make_inputs(FEW[0], device, torch.float16, torch.float32, layout=layout)
    leaves = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)]
    arguments = (leaves[0], i.groups, *leaves[1:], i.eps, "identity", torch.float32)
    torch.library.opcheck(op, arguments, rtol=0, atol=0)


# --- CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["float32", "preserve"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    ids=["float", "bfloat16", "mixed"],
)
def test_cpu_autocast_changes_nothing(mode, layout, dtypes):
    """Stock's leaves group_norm alone there, and so do we."""
    gn_override.set_autocast(mode)
    inputs = make_inputs(FEW[0], "cpu", *dtypes, layout=layout)
    expected = composite(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = composite(inputs)
        with override_off():
            assert composite(inputs).Y.dtype == actual.Y.dtype
    assert actual.Y.dtype == inputs.X.dtype
    for name in COMPARED:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


# --- torch.compile ----------------------------------------------------------------------------


@pytest.mark.cuda_build
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize(
    "mode, activation, made",
    [
        ("float32", None, ("identity", torch.float32)),
        ("float32", F.silu, ("silu", torch.float32)),
        ("preserve", None, ("identity", torch.float16)),
        ("preserve", F.silu, ("silu", torch.float16)),
    ],
)
def test_pass_on_what_is_recorded(fake, cuda_autocast, mode, activation, made, layout):
    """Inductor's pass makes of a norm under autocast what eager mode runs."""
    gn_override.set_autocast(mode)
    operands = fakes(layout)
    graph = torch.fx.Graph()

    def record(node: torch.fx.Node, value: Tensor) -> torch.fx.Node:
        node.meta["example_value"] = value
        return node

    X, gamma, beta = (record(graph.placeholder("t"), operand) for operand in operands)
    with cuda_autocast():
        Y = norm(*operands)
    node = record(graph.call_function(F.group_norm, (X, GROUPS, gamma, beta)), Y)
    if activation is not None:
        node = record(graph.call_function(activation, (node,)), activation(Y))
    graph.output(node)
    inductor_config.pre_grad_custom_pass(graph)
    graph.lint()
    calls = [node for node in graph.nodes if node.target is op.default]
    assert [call.args[5:] for call in calls] == ([made] if layout == "channels_last" else [])
    kept = activation is not None and layout == "nchw"
    assert any(node.target is activation for node in graph.nodes) == kept


@pytest.mark.cuda_build
@pytest.mark.parametrize(
    "mode, dtypes, inside, made",
    [
        ("float32", {"param_dtype": torch.float16}, True, [("identity", torch.float32)]),
        ("float32", {"param_dtype": torch.float16}, False, []),
        ("float32", {"dtype": torch.float32}, True, []),
        ("preserve", {"param_dtype": torch.float16}, True, []),
        ("preserve", {"param_dtype": torch.float16}, False, []),
    ],
    ids=["half parameters", "outside", "float32", "preserved", "preserved outside"],
)
def test_pass_takes_what_autocast_casts(fake, cuda_autocast, mode, dtypes, inside, made):
    gn_override.set_autocast(mode)
    operands = fakes(**dtypes)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("t") for _ in operands]
    with cuda_autocast() if inside else nullcontext():
        Y = norm(*operands)
    node = graph.call_function(F.group_norm, (nodes[0], GROUPS, *nodes[1:]))
    for recorded, value in zip((*nodes, node), (*operands, Y), strict=True):
        recorded.meta["example_value"] = value
    graph.output(node)
    inductor_config.pre_grad_custom_pass(graph)
    calls = [node for node in graph.nodes if node.target is op.default]
    assert [call.args[5:] for call in calls] == made


def test_compiled_operator(device):
    """Inductor calls it as it is, in training too."""
    i = make_inputs(FEW[0], device, torch.bfloat16, torch.float32, torch.float32)
    leaves = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)]

    def function(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return op(X, i.groups, gamma, beta, i.eps, "identity", torch.float32)[0]

    results = []
    for call in (function, torch.compile(function, fullgraph=True)):
        Y = call(*leaves)
        results.append([Y.detach(), *torch.autograd.grad(Y, leaves, i.dY)])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def autocast_norm(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return norm(X, gamma, beta)


def autocast_silu(X: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.silu(norm(X, gamma, beta))


def real(layout: str = "channels_last", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    i = make_inputs(Case("compiled", SHAPE, GROUPS), "cuda", dtype, torch.float32, layout=layout)
    return tuple(t.requires_grad_() for t in (i.X, i.gamma, i.beta))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "function, mode, fused",
    [
        (autocast_norm, "float32", ["identity"]),
        (autocast_silu, "float32", ["silu"]),
        (autocast_norm, "preserve", ["identity"]),
        (autocast_silu, "preserve", ["silu"]),
    ],
)
def test_pass(function, mode, fused):
    gn_override.set_autocast(mode)
    assert after_the_pass(function, *real()) == fused
    assert after_the_pass(function, *real("nchw")) == []


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
@pytest.mark.parametrize("mode", ["float32", "preserve"])
def test_compiled(mode, layout):
    """Training: the same kernels as in eager mode, on the half X, and its dtypes."""
    gn_override.set_autocast(mode)
    tensors = real(layout)
    dY = torch.randn(SHAPE, device="cuda")

    def train(function: Callable[..., Tensor]) -> list[Tensor]:
        Y = function(*tensors)
        return [Y.detach(), *torch.autograd.grad(Y, tensors, dY.to(Y.dtype))]

    expected = train(autocast_norm)
    ours = True if layout == "channels_last" else None
    with expect_calls("cuda", ours, ours, CAST if mode == "float32" else FUSED):
        actual = train(torch.compile(autocast_norm, fullgraph=True))
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


# --- values on a GPU --------------------------------------------------------------------------


def under_autocast(inputs: Inputs) -> Results:
    with torch.autocast("cuda", inputs.X.dtype):
        return composite(inputs)


def stock_under_autocast(inputs: Inputs) -> Results:
    """With ones for a missing gamma: stock fails to differentiate a norm with a bias alone."""
    gamma = inputs.gamma
    if gamma is None and inputs.beta is not None:
        inputs = dataclasses.replace(inputs, gamma=torch.ones_like(inputs.beta))
    with override_off():
        results = under_autocast(inputs)
    return dataclasses.replace(results, dgamma=None) if gamma is None else results


def autocast_inputs(
    case: Case, dtype: torch.dtype, param_dtype: torch.dtype | None = torch.float32, **kwargs: Any
) -> Inputs:
    return make_inputs(case, "cuda", dtype, param_dtype, torch.float32, **kwargs)


PARITY_CASES = [case for case in (*EDGE_CASES, *KERNEL_CASES[:4]) if not case.one_layout]


@pytest.mark.cuda
@pytest.mark.usefixtures("poison")
@halves
@pytest.mark.parametrize("case", PARITY_CASES, ids=lambda case: case.id)
def test_parity(case, dtype):
    inputs = autocast_inputs(case, dtype)
    with expect_calls("cuda", True, True, CAST):
        ours = under_autocast(inputs)
    assert ours.Y.dtype == torch.float32
    assert_parity(ours, inputs, only=COMPARED, theirs=[stock_under_autocast(inputs)])
    assert is_channels_last(ours.Y) and is_channels_last(ours.dX)


@pytest.mark.cuda
@pytest.mark.usefixtures("poison")
@halves
@few_cases
@pytest.mark.parametrize("dY_layout", ["channels_last", "unaligned", "nchw", "expanded"])
@pytest.mark.parametrize("layout", ["channels_last", "unaligned", "sliced"])
def test_parity_of_layouts(case, dtype, layout, dY_layout):
    """A sequence with gaps is no channels-last one; its cast, dense in the same order, is."""
    inputs = autocast_inputs(case, dtype, layout=layout, dY_layout=dY_layout)
    by_cast = layout == "sliced" and inputs.X.dim() == 3
    with expect_calls("cuda", True, True, ATEN if by_cast else CAST):
        ours = under_autocast(inputs)
    assert_parity(ours, inputs, only=COMPARED, theirs=[stock_under_autocast(inputs)])


@pytest.mark.cuda
@halves
@pytest.mark.parametrize("affine", ["both", "none", "weight", "bias"])
@pytest.mark.parametrize("param_dtype", [torch.float32, None], ids=["float", "same"])
def test_parity_of_parameters(dtype, param_dtype, affine):
    inputs = autocast_inputs(FEW[0], dtype, param_dtype, affine=affine)
    with expect_calls("cuda", True, True, CAST):
        ours = under_autocast(inputs)
    assert_parity(ours, inputs, only=COMPARED, theirs=[stock_under_autocast(inputs)])


@pytest.mark.cuda
@halves
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_an_activation_is_fused(dtype, activation):
    """The operator on the half X, whose values tests/test_activation.py compares."""
    i = autocast_inputs(FEW[0], dtype)
    leaves = [t.detach().requires_grad_() for t in (i.X, i.gamma, i.beta)]
    X, gamma, beta = leaves

    def train(function: Callable[..., Tensor], *arguments: Any) -> list[Tensor]:
        Y = function(X, i.groups, gamma, beta, i.eps, activation, *arguments)
        return [Y.detach(), *torch.autograd.grad(Y, leaves, i.dY)]

    expected = train(lambda *arguments: op(*arguments)[0], torch.float32)
    with expect_calls("cuda", True, True, CAST), torch.autocast("cuda", dtype):
        actual = train(gn_override.functional.group_norm)
    for found, wanted in zip(actual, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.cuda
@halves
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_masks(dtype, wanted):
    """Any part of the gradients."""
    inputs = autocast_inputs(FEW[0], dtype)
    names = ("dX", "dgamma", "dbeta")
    leaves = [t.detach() for t in (inputs.X, inputs.gamma, inputs.beta)]
    for index in wanted:
        leaves[index].requires_grad_()
    with expect_calls("cuda", True, True, CAST):
        with torch.autocast("cuda", dtype):
            Y = F.group_norm(leaves[0], inputs.groups, *leaves[1:], inputs.eps)
        Y.backward(inputs.dY)
    results = Results(Y.detach(), None, None, *(t.grad for t in leaves))
    theirs = stock_under_autocast(inputs)
    for index, name in enumerate(names):
        if index not in wanted:
            assert getattr(results, name) is None
            setattr(theirs, name, None)
    assert_parity(results, inputs, only=COMPARED, theirs=[theirs])


def rules(inputs: Inputs) -> set[str]:
    """The rules that take forward and backward under autocast."""
    i = inputs
    return {
        json.loads(
            torch.ops.gn_override.explain(
                i.X, i.gamma, i.beta, i.groups, backward, out_dtype=torch.float32
            )
        )["rule"]
        for backward in (False, True)
    }


@pytest.mark.cuda
@pytest.mark.usefixtures("poison")
@halves
@all_pins
@pytest.mark.parametrize("case", SCHEME_CASES, ids=lambda case: case.name)
def test_scheme(pin, dtype, case, pins):  # noqa: F811  (the fixture)
    inputs = autocast_inputs(case, dtype)
    pin(*pins)
    if rules(inputs) != {pins[0]}:
        pytest.skip(f"no {pins[0]} plan of such a geometry")
    with expect_calls("cuda", True, True, CAST):
        ours = under_autocast(inputs)
    assert_parity(ours, inputs, only=COMPARED, theirs=[stock_under_autocast(inputs)])
    again = under_autocast(inputs)
    for name in COMPARED:
        assert torch.equal(getattr(again, name), getattr(ours, name)), name


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", ["resident", "cooperative"])
def test_every_scheme_takes_most_shapes(pin, scheme):  # noqa: F811  (the fixture)
    """What test_scheme skips is not all there is."""
    for case in SCHEME_CASES:
        pin(scheme, 0, 0, 0)
        inputs = autocast_inputs(case, torch.bfloat16)
        assert (rules(inputs) == {scheme}) == fits(scheme, case, torch.bfloat16), case.name


@pytest.mark.cuda
@halves
@pytest.mark.parametrize("mean", [1e3, -3e3])
def test_large_mean(dtype, mean):
    """Y is float, so what cancels shows: nothing may be folded into the shift."""
    inputs = autocast_inputs(FEW[-1], dtype)
    inputs.X = (inputs.X.float() + mean).to(dtype)
    ours = under_autocast(inputs)
    assert_parity(ours, inputs, only=COMPARED, theirs=[stock_under_autocast(inputs)])


@pytest.mark.cuda
def test_graph_replay():
    inputs = autocast_inputs(FEW[0], torch.bfloat16)
    X, gamma, beta = (t.detach().requires_grad_() for t in (inputs.X, inputs.gamma, inputs.beta))

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            Y = F.group_norm(X, inputs.groups, gamma, beta, inputs.eps)
        return (Y, *torch.autograd.grad(Y, (X, gamma, beta), inputs.dY))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for tensor in captured:
                tensor.fill_(math.nan)
        graph.replay()
        for found, wanted in zip(captured, eager, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.cuda
def test_memory():
    """Forward leaves Y and little else: stock leaves a float copy of X besides."""
    X = lay_out(torch.randn(8, 64, 128, 128, device="cuda"), "channels_last").bfloat16()
    module = nn.GroupNorm(32, 64).cuda()
    X.requires_grad_()

    def left() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            Y = module(X)
        return torch.cuda.memory_allocated() - before - Y.nbytes

    left()
    assert left() < X.nbytes / 16
    with gn_override.disabled():
        assert left() >= 2 * X.nbytes


@pytest.mark.cuda
@halves
@pytest.mark.parametrize("layout", ["channels_last", "nchw"])
def test_preserve_values(dtype, layout):
    """Taken or not, the half result of the same norm."""
    gn_override.set_autocast("preserve")
    inputs = make_inputs(FEW[0], "cuda", dtype, torch.float32, layout=layout)
    ours = layout == "channels_last"
    with expect_calls("cuda", ours, ours, ATEN):
        results = under_autocast(inputs)
    assert results.Y.dtype == results.dX.dtype == dtype
    assert results.dgamma.dtype == results.dbeta.dtype == torch.float32
    if ours:
        assert_parity(results, inputs, only=COMPARED)
    else:  # stock's kernels, on weights that are rounded
        with override_off():
            halved = dataclasses.replace(
                inputs, gamma=inputs.gamma.to(dtype), beta=inputs.beta.to(dtype)
            )
            expected = composite(halved)
        for name in COMPARED:
            assert torch.equal(
                getattr(results, name), getattr(expected, name).to(getattr(results, name).dtype)
            ), name


@pytest.mark.cuda
def test_explain():
    """The question that autocast asks, and the traffic of both element types."""
    X, gamma, beta = (t.detach() for t in real())
    with torch.autocast("cuda", torch.bfloat16):
        forward = gn_override.explain(X, GROUPS, weight=gamma, bias=beta)
        backward = gn_override.explain(X, GROUPS, weight=gamma, bias=beta, backward=True)
        fused = gn_override.explain(X, GROUPS, weight=gamma, bias=beta, activation="silu")
    assert "bfloat16 to float32 with float32 parameters silu" in fused.problem
    assert "bfloat16 to float32 with float32 parameters" in forward.problem
    assert forward.minimum_bytes == 3 * X.nbytes  # X, and Y of twice its size
    assert backward.minimum_bytes == 4 * X.nbytes
    gn_override.set_autocast("preserve")
    with torch.autocast("cuda", torch.bfloat16):
        assert "to float32" not in gn_override.explain(X, GROUPS, weight=gamma, bias=beta).problem
