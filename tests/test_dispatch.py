"""Where calls go: the dispatcher's tables, autograd, transforms, fake tensors and tracing.

What the kernels compute is in test_parity.py and test_cases.py; here the numbers only have to be
stock's up to rounding, and the call has to reach our kernels, in the layout it came in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_compiler
from processes import run_python
from reference import (
    ATEN,
    BACKWARD,
    FORWARD,
    FUSED,
    TORCH,
    calls,
    is_channels_last,
    lay_out,
    override_off,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode

import gn_override
from gn_override import _library, _meta

sys.path.append(str(Path(__file__).parent.parent))  # after what is installed
conditions = importlib.import_module("codegen.conditions")
model = importlib.import_module("codegen.model")

aten = torch.ops.aten

CONDITIONS = conditions.evaluate()
BACKENDS = _library.build_info()["backends"]

# One of each rank that the kernels serve.
SHAPES = [(2, 6, 7), (2, 6, 3, 5), (2, 6, 2, 3, 4)]
RANKS = pytest.mark.parametrize("shape", SHAPES, ids=["NLC", "NHWC", "NDHWC"])
AFFINE = pytest.mark.parametrize("affine", ["both", "none", "weight", "bias"])
GROUPS = 3

Operands = tuple[Tensor, Tensor | None, Tensor | None]


def operands(
    shape: tuple[int, ...],
    device: str = "cpu",
    dtype: torch.dtype = torch.double,
    affine: str = "both",
    layout: str = "channels_last",
    requires_grad: bool = True,
) -> Operands:
    """X, gamma, beta; what `affine` leaves out is None."""
    X = lay_out(torch.randn(shape, dtype=dtype, device=device), layout)
    gamma, beta = torch.randn(2, shape[1], dtype=dtype, device=device).unbind()
    return tuple(
        t.detach().requires_grad_(requires_grad) if wanted else None
        for t, wanted in (
            (X, True),
            (gamma.clone(), affine in ("both", "weight")),
            (beta.clone(), affine in ("both", "bias")),
        )
    )  # type: ignore[return-value]


def norm(X: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    return F.group_norm(X, GROUPS, gamma, beta)


def norm_silu(X: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    return gn_override.functional.group_norm(X, GROUPS, gamma, beta, activation="silu")


FUNCTIONS = pytest.mark.parametrize("function", [norm, norm_silu])


def given(tensors: Operands) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def norm_of(tensors: Operands) -> Callable[..., Tensor]:
    """group_norm as a function of the operands that are given."""

    def function(*present: Tensor) -> Tensor:
        rest = iter(present)
        return norm(*(None if t is None else next(rest) for t in tensors))

    return function


def stock_on_nchw(function: Callable[..., Any], tensors: Operands) -> Any:
    """What stock makes of the function on NCHW copies of the operands."""
    copies = [t.detach().contiguous().requires_grad_(t.requires_grad) for t in given(tensors)]
    with override_off():
        return function(*copies)


@contextlib.contextmanager
def stock_limits(call: Callable[[], Any]) -> Iterator[None]:
    """Expected failure, with stock's text, where the call inside fails and stock's does too."""
    try:
        yield
    except RuntimeError as error:
        with override_off():
            try:
                call()
            except RuntimeError as stock_error:
                if str(error) == str(stock_error):
                    pytest.xfail(f"stock cannot do it either: {error}")
        raise


def taken(device: str) -> tuple[int, int]:
    """Calls (forward, backward) that our kernels took; fails if aten got one."""
    (forward, declined), (backward, also_declined) = calls(FORWARD, device), calls(BACKWARD, device)
    assert (declined, also_declined) == (0, 0), torch.ops.gn_override.counters()
    return forward, backward


# --- the dispatcher's tables ------------------------------------------------------------------


def overrides() -> list[Any]:
    """What codegen/group_norm.yaml says of this build on this torch."""
    return [
        override
        for override in model.load().overrides
        if (override.build == "any" or override.build in BACKENDS)
        and (override.when is None or CONDITIONS[override.when])
    ]


@pytest.mark.parametrize("op", sorted({str(o.schema.name) for o in model.load().overrides}))
def test_tables(op: str) -> None:
    """We are on top exactly where the YAML file says so."""
    dump = torch._C._dispatch_dump(f"aten::{op}")
    ours = set()
    for line in dump.splitlines():
        key, _, where = line.partition(": ")
        if "native/binding/generated/register.cpp" in where:
            ours.add(key.removesuffix("[alias]"))
    assert ours == {o.key for o in overrides() if str(o.schema.name) == op}, dump


def test_build_has_the_conditions_of_this_torch() -> None:
    assert _library.build_info()["conditions"] == CONDITIONS
    assert CONDITIONS["STOCK_DROPS_LAYOUT"] == (TORCH < (2, 14))


@pytest.mark.parametrize("switch", ["0", "1"])
def test_nothing_is_printed(switch: str, tmp_path: Path) -> None:
    """Neither by the import nor, through the C++ warning handler, by the registration."""
    code = (
        "import gn_override, torch\n"
        "x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)\n"
        "torch.nn.functional.group_norm(x, 2)\n"
    )
    done = run_python("-W", "default", "-c", code, cwd=tmp_path, GN_OVERRIDE=switch)
    assert (done.stdout, done.stderr) == ("", "")


def test_warnings_come_through_after_the_import(tmp_path: Path) -> None:
    """The registration's silence ends with it."""
    code = "import gn_override, torch; torch._C._warn()"
    done = run_python("-W", "default", "-c", code, cwd=tmp_path)
    assert "UserWarning" in done.stderr


# --- the switch -------------------------------------------------------------------------------

# Runs stock, or the override, over layouts and prints every result as bits and strides.
DIGEST = """
import json, sys, torch
import torch.nn.functional as F
{prepare}
torch.manual_seed(0)
torch.set_num_threads(1)

def lay_out(t):
    yield t
    yield t.movedim(1, -1).contiguous().movedim(-1, 1)
    yield t.movedim(0, -1).contiguous().movedim(-1, 0)

def bits(t):
    return None if t is None else [
        list(t.stride()), str(t.dtype),
        t.detach().contiguous().view(torch.uint8).flatten().tolist(),
    ]

results = []
for shape in [(2, 6, 7), (2, 6, 3, 5), (2, 6, 2, 3, 4), (2, 6)]:
    for dtype in (torch.float, torch.bfloat16):
        gamma, beta = torch.randn(2, 6, dtype=dtype).unbind()
        X, dY = torch.randn(2, *shape).to(dtype).unbind()
        for X, dY in zip(lay_out(X), lay_out(dY)):
            leaves = [t.detach().requires_grad_() for t in (X, gamma, beta)]
            Y = F.group_norm(leaves[0], 3, *leaves[1:])
            Y.backward(dY)
            results += [bits(t) for t in (Y, *(leaf.grad for leaf in leaves))]
            sizes = (2, 6, X.numel() // 12, 3)
            try:
                outputs = torch.native_group_norm(X, gamma, beta, *sizes, 1e-5)
                results += [bits(t) for t in outputs]
            except RuntimeError as error:  # 2.13 does not take every layout here
                results.append(str(error))
print(json.dumps(results))
"""


def test_off_is_stock_bit_for_bit(tmp_path: Path) -> None:
    """Values, dtypes and strides are those of a process that never imported the package."""

    def digest(prepare: str, **environ: str) -> str:
        return run_python("-c", DIGEST.format(prepare=prepare), cwd=tmp_path, **environ).stdout

    without = digest("")
    never_on = digest("import gn_override", GN_OVERRIDE="0")
    turned_off = digest(
        "import gn_override\n"
        "x = torch.randn(2, 7, 6).transpose(1, 2).requires_grad_()\n"
        "F.group_norm(x, 3).sum().backward()\n"  # which leaves nothing behind
        "gn_override.disable()"
    )
    on = digest("import gn_override")
    assert without == never_on == turned_off
    # The digest sees the difference where there is one: (N, C, L) keeps its layout.
    assert without != on


def test_switch_acts_on_the_next_call(device: str) -> None:
    X = operands((2, 6, 3, 5), device, torch.float, requires_grad=False)[0]
    ours = norm(X)
    with gn_override.disabled():
        stock = norm(X)
        with gn_override.enabled():
            again = norm(X)
        assert torch.equal(norm(X), stock)
    assert taken(device) == (2, 0)
    assert torch.equal(ours, again)


class SwitchesOff(TorchDispatchMode):
    """The switch goes off between a call and its operators, as another thread may do it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with gn_override.disabled():
            return function(*args, **(kwargs or {}))


@RANKS
@pytest.mark.parametrize("dY_layout", ["channels_last", "nchw"])
def test_switched_off_during_a_call(device: str, shape: tuple[int, ...], dY_layout: str) -> None:
    """The results are right, whatever layout stock's kernels take."""
    tensors = operands(shape, device)
    dY = lay_out(torch.randn(shape, dtype=torch.double, device=device), dY_layout)

    def train(*tensors: Tensor) -> tuple[Tensor, ...]:
        Y = norm(*tensors)
        return Y, *torch.autograd.grad(Y, tensors, dY)

    with SwitchesOff():
        results = train(*tensors)
    assert calls(FORWARD, device)[0] == calls(BACKWARD, device)[0] == 0
    torch.testing.assert_close(results, stock_on_nchw(train, tensors))


# --- autograd ---------------------------------------------------------------------------------


@RANKS
@AFFINE
def test_gradcheck(device: str, shape: tuple[int, ...], affine: str) -> None:
    tensors = operands(shape, device, affine=affine)
    assert gradcheck(norm_of(tensors), given(tensors))
    forward, backward = taken(device)
    assert forward > 0 and backward > 0


@RANKS
@AFFINE
def test_gradgradcheck(device: str, shape: tuple[int, ...], affine: str) -> None:
    tensors = operands((1, *shape[1:]), device, affine=affine)
    with stock_limits(lambda: gradgradcheck(norm_of(tensors), given(tensors))):
        assert gradgradcheck(norm_of(tensors), given(tensors))


@pytest.mark.parametrize("which", range(7))
def test_gradgradcheck_of_some_operands(device: str, which: int) -> None:
    """Only some operands need a gradient: every mask but the empty one."""
    tensors = operands((1, 6, 2, 3), device, requires_grad=False)
    for bit, tensor in enumerate(given(tensors)):
        tensor.requires_grad_(bool((which + 1) >> bit & 1))
    assert gradcheck(norm_of(tensors), given(tensors))
    assert gradgradcheck(norm_of(tensors), given(tensors))


@pytest.mark.parametrize("fused", [False, True], ids=["norm", "silu"])
def test_second_derivatives_of_another_eps(device: str, fused: bool) -> None:
    """gradgradcheck asks whether they are those of the first ones, not whether both are right."""

    def function(X: Tensor, *parameters: Tensor) -> Tensor:
        if fused:
            activated = {"eps": 0.5, "activation": "silu"}
            return gn_override.functional.group_norm(X, GROUPS, *parameters, **activated)
        return F.group_norm(X, GROUPS, *parameters, eps=0.5)

    def second(*tensors: Tensor) -> Any:
        first = torch.autograd.grad(function(*tensors).cos().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), tensors)

    tensors = operands((2, 6, 3, 5), device)
    torch.testing.assert_close(second(*given(tensors)), stock_on_nchw(second, tensors))


@RANKS
@pytest.mark.parametrize("activation", ["identity", "relu", "silu"])
def test_second_derivatives_in_stocks_layout_and_memory(
    device: str, shape: tuple[int, ...], activation: str
) -> None:
    """With create_graph gradients are of PyTorch's own operators, in their layouts."""
    leaves = given(operands(shape, device, torch.float))
    dY = torch.randn_like(leaves[0], requires_grad=True)

    def strides_and_bytes() -> Any:
        memory = {}  # that is saved, but for the operands

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            X, *parameters = leaves
            Y = gn_override.functional.group_norm(X, GROUPS, *parameters, activation=activation)
            first = torch.autograd.grad(Y, leaves, dY, create_graph=True)
            loss = sum(t.square().sum() for t in first)
        second = torch.autograd.grad(loss, [*leaves, dY], allow_unused=True)
        for t in (*leaves, dY):
            memory.pop(t.data_ptr(), None)
        strides = [None if t is None else t.stride() for t in (*first, *second)]
        return strides, sum(memory.values())

    ours = strides_and_bytes()
    assert calls(FORWARD if activation == "identity" else "group_norm_act", device)[0] > 0
    with gn_override.disabled():
        stock = strides_and_bytes()
    if device == "cuda" and CONDITIONS["STOCK_DROPS_LAYOUT"]:
        # Stock's of X is NCHW or not, by how many nodes the thread has made that called.
        del ours[0][3], stock[0][3]
    assert ours[0] == stock[0]
    # Mean and rstd, but no copy of X; a fused norm makes one of (N, C, L), which since 2.14 PyTorch
    # makes in its kernel.
    copies = activation != "identity" and len(shape) == 3 and not CONDITIONS["STOCK_DROPS_LAYOUT"]
    assert ours[1] < stock[1] + (copies + 0.5) * leaves[0].nbytes


@pytest.mark.parametrize("shape", SHAPES[1:], ids=["NHWC", "NDHWC"])
@pytest.mark.parametrize("samples", [1, 2])
def test_double_backward_normalises_on_our_kernels(
    device: str, samples: int, shape: tuple[int, ...]
) -> None:
    """On a CPU, and from 2.14 on: elsewhere stock's formula takes no other layout than NCHW."""
    tensors = operands((samples, *shape[1:]), device)
    Y = gn_override.functional.group_norm(tensors[0], GROUPS, *tensors[1:], activation="silu")
    torch.ops.gn_override.reset_counters()
    torch.autograd.grad(Y, tensors, torch.ones_like(Y), create_graph=True)
    keeps = device == "cpu" or not CONDITIONS["STOCK_DROPS_LAYOUT"]
    assert calls(FORWARD, device) == ((1, 0) if keeps else (0, 1))


@pytest.mark.skipif(not CONDITIONS["STOCK_DROPS_LAYOUT"], reason="autograd is stock's")
def test_second_derivatives_of_half_with_float_parameters() -> None:
    """On a CPU, whose stock kernels take them."""

    def second(*tensors: Tensor) -> Any:
        loss = norm(*tensors).double().cos().sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        return torch.autograd.grad(sum(t.double().square().sum() for t in first), tensors)

    X, *parameters = given(operands((2, 6, 3, 5), "cpu", torch.bfloat16))
    tensors = [X, *(t.detach().float().requires_grad_() for t in parameters)]
    exact = second(*(t.detach().double().requires_grad_() for t in tensors))
    for mine, want, operand in zip(second(*tensors), exact, tensors, strict=True):
        assert mine.dtype == operand.dtype
        assert (mine - want).abs().max() < 0.1 * want.abs().max()


def test_double_backward_where_one_operand_comes_from_another(device: str) -> None:
    """The gradient for X must not run through gamma twice."""

    def function(X: Tensor) -> Tensor:
        return norm(X, X.mean((0, 2, 3)), X.sum((0, 2, 3)))

    X = operands((1, 6, 2, 3), device)[0]
    assert gradcheck(function, X)
    assert gradgradcheck(function, X)


@RANKS
def test_gradients_are_channels_last(device: str, shape: tuple[int, ...]) -> None:
    X, gamma, beta = operands(shape, device)
    Y = norm(X, gamma, beta)
    Y.sum().backward()
    assert is_channels_last(Y) and is_channels_last(X.grad)
    assert taken(device) == (1, 1)


def test_six_dimensions_are_stocks(device: str) -> None:
    X = torch.randn(2, 3, 2, 2, 2, 6, device=device).movedim(-1, 1)
    Y = norm(X)
    assert calls(FORWARD, device)[0] == 0
    with override_off():
        assert Y.stride() == norm(X).stride()


@pytest.mark.parametrize("which", ["mean", "rstd"])
def test_statistics_that_are_not_contiguous(device: str, which: str) -> None:
    X, dY = (operands((2, 6, 3, 5), device)[0].detach() for _ in range(2))
    _, *statistics = aten.native_group_norm(X, None, None, 2, 6, 15, GROUPS, 1e-5)

    def backward() -> tuple[Tensor, ...]:
        mask = [True] * 3
        return aten.native_group_norm_backward(dY, X, *statistics, None, 2, 6, 15, GROUPS, mask)

    expected = backward()
    index = ["mean", "rstd"].index(which)
    statistics[index] = statistics[index].t().contiguous().t()
    torch.testing.assert_close(backward(), expected, rtol=0, atol=0)
    assert taken(device) == (1, 2)


@pytest.mark.skipif(not CONDITIONS["STOCK_DROPS_LAYOUT"], reason="autograd is stock's")
@pytest.mark.parametrize("which", range(3), ids=["X", "weight", "bias"])
def test_one_operand_is_enough_to_be_recorded(device: str, which: int) -> None:
    tensors = operands((2, 6, 3, 5), device, requires_grad=False)
    tensors[which].requires_grad_()
    assert "ChannelsLastNorm" in norm(*tensors).grad_fn.name()


@RANKS
def test_gradients_of_mean_and_rstd(device: str, shape: tuple[int, ...]) -> None:
    """The native op is called directly, and all of its outputs are differentiated."""

    def function(*tensors: Tensor) -> list[Tensor]:
        X = tensors[0]
        sizes = (X.shape[0], X.shape[1], X[0, 0].numel(), GROUPS)
        outputs = torch.native_group_norm(*tensors, *sizes, 1e-5)
        loss = sum((output * output.detach().cos()).sum() for output in outputs)
        return list(torch.autograd.grad(loss, tensors))

    tensors = operands(shape, device)
    torch.testing.assert_close(function(*tensors), stock_on_nchw(function, tensors))


def test_parameter_changed_before_backward(device: str) -> None:
    """As in stock: beta may be changed in place, since no gradient depends on it; X may not."""
    X, gamma, beta = operands((2, 6, 3, 5), device)
    Y = norm(X * 1, gamma, beta)
    with torch.no_grad():
        beta.zero_()
    Y.sum().backward()
    copy = X.detach() * 1
    Y = norm(copy.requires_grad_(), gamma, beta)
    with torch.no_grad():
        copy.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.sum().backward()


def gradients(tensors: Operands) -> list[Tensor | None]:
    return [None if tensor is None else tensor.grad for tensor in tensors]


class Stop(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, Y: Tensor) -> Tensor:
        return Y.clone()

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> None:
        return None


@FUNCTIONS
def test_no_gradient_is_none(device: str, function: Callable[..., Tensor]) -> None:
    tensors = operands((2, 6, 3, 5), device)
    Stop.apply(function(*tensors)).sum().backward()  # type: ignore[no-untyped-call]
    assert gradients(tensors) == [None, None, None]


@FUNCTIONS
@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {1, 2}, {0, 1, 2}], ids=str)
@pytest.mark.filterwarnings("ignore:Using backward.*create_graph:UserWarning")
def test_operand_frozen_after_the_forward(
    device: str, function: Callable[..., Tensor], frozen: set[int]
) -> None:
    """Its gradient is dropped, also where the others are differentiated again."""
    found = []
    tensors = operands((2, 6, 3, 5), device)
    for switch in (override_off, contextlib.nullcontext):
        leaves = tuple(t.detach().clone().requires_grad_() for t in given(tensors))
        with switch():
            Y = function(*leaves)
            for i in frozen:
                leaves[i].requires_grad_(False)
            Y.cos().sum().backward(create_graph=True)
            first = gradients(leaves)
            again = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
            if isinstance(again, Tensor):
                again.backward()
            found.append((*first, *gradients(leaves)))
    for actual, expected in zip(*found[::-1], strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected)


@FUNCTIONS
@pytest.mark.parametrize("which", ["X", "gamma"])
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (2, 6, 7)], ids=["NHWC", "NLC"])
def test_view_changed_before_backward(
    device: str, function: Callable[..., Tensor], which: str, shape: tuple[int, ...]
) -> None:
    """Until 2.13 stock makes a copy of what is not dense, and may therefore lose the original."""
    X, gamma, beta = operands(shape, device)
    wide = operands((2, 12, *shape[2:]), device, requires_grad=False)[0]
    original = wide if which == "X" else wide[0].flatten()[:12]

    def differentiate(*tensors: Tensor) -> tuple[Tensor, ...]:
        loss = function(*tensors).cos().sum()
        return torch.autograd.grad(loss, [t for t in tensors if t.requires_grad])

    def with_view(of: Tensor) -> Operands:
        return (of[:, :6], gamma, beta) if which == "X" else (X, of[::2], beta)

    def lose() -> tuple[Tensor, ...]:
        base = original.clone()
        fixed = with_view(base)
        loss = function(*fixed).cos().sum()
        base.zero_()
        return torch.autograd.grad(loss, [t for t in given(fixed) if t.requires_grad])

    expected = stock_on_nchw(differentiate, with_view(original))
    with stock_limits(lose):
        torch.testing.assert_close(lose(), expected)


@FUNCTIONS
@pytest.mark.parametrize("how", ["whole", "slice"])
@pytest.mark.parametrize("shape", SHAPES, ids=["NLC", "NHWC", "NDHWC"])
def test_training_on_what_inference_mode_made(
    device: str, function: Callable[..., Tensor], how: str, shape: tuple[int, ...]
) -> None:
    """Frozen features: wherever stock has copies to save, as until 2.13, or more often."""
    with torch.inference_mode():
        features = operands((2, 12, *shape[2:]), device, requires_grad=False)[0]
        X = features[:, :6]
        if how == "whole":
            X = X.clone(memory_format=torch.preserve_format)
        assert X.is_inference() and (how == "slice" or is_channels_last(X))
    _, gamma, beta = operands(shape, device)

    def differentiate(X: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(X, *parameters).cos().sum(), parameters)

    expected = stock_on_nchw(differentiate, (X.clone(), gamma, beta))
    with stock_limits(lambda: differentiate(X, gamma, beta)):
        torch.testing.assert_close(differentiate(X, gamma, beta), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=["NLC", "NHWC", "NDHWC"])
def test_nothing_but_what_inference_mode_made(device: str, shape: tuple[int, ...]) -> None:
    """It has no autograd key, so nothing is recorded; where stock copies X, it cannot be saved."""

    def outcome() -> bool | str:
        with torch.inference_mode():
            tensors = operands(shape, device)
        try:
            return norm(*tensors).requires_grad
        except RuntimeError as error:
            return str(error)

    with override_off():
        theirs = outcome()
    assert outcome() == theirs


def test_saved_tensor_hooks_and_checkpoint(device: str) -> None:
    tensors = operands((2, 6, 3, 5), device)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*tensors).cos().sum(), given(tensors))

    expected = gradients(norm)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        Y = norm(*tensors)
    assert len(packed) >= 4  # X, gamma, mean, rstd
    torch.testing.assert_close(
        torch.autograd.grad(Y.cos().sum(), given(tensors)), expected, rtol=0, atol=0
    )
    checkpointed = gradients(
        lambda *args: torch.utils.checkpoint.checkpoint(norm, *args, use_reentrant=False)
    )
    torch.testing.assert_close(checkpointed, expected, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("autocast", [False, True], ids=["wide", "autocast"])
def test_checkpoint_whose_inputs_are_on_the_cpu(
    device: str, autocast: bool, activation: str
) -> None:
    """It hands them back in their layout, so that the norm saves the same tensors again."""
    dtype = torch.bfloat16 if autocast else torch.float
    X, *parameters = operands((2, 6, 3, 5), device, torch.float)
    X = X.detach().to(dtype).requires_grad_()

    def function(X: Tensor) -> Tensor:
        return gn_override.functional.group_norm(X, GROUPS, *parameters, activation=activation)

    def gradients(compute: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            Y = compute(X)
        return torch.autograd.grad(Y.cos().sum(), (X, *parameters))

    expected = gradients(function)
    with torch.autograd.graph.save_on_cpu():
        checkpointed = gradients(
            lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
        )
    torch.testing.assert_close(checkpointed, expected, rtol=0, atol=0)


def test_inference_mode(device: str) -> None:
    X, gamma, beta = operands((2, 6, 3, 5), device, requires_grad=False)
    with torch.inference_mode():
        for operand in (X, X.clone(memory_format=torch.channels_last)):
            Y = norm(operand, gamma, beta)
            assert Y.is_inference() and is_channels_last(Y)
    assert taken(device) == (2, 0)
    torch.testing.assert_close(Y.clone(), stock_on_nchw(norm, (X, gamma, beta)))


# --- forward-mode AD and functorch ------------------------------------------------------------


@RANKS
@AFFINE
def test_forward_mode(device: str, shape: tuple[int, ...], affine: str) -> None:
    tensors = operands(shape, device, affine=affine, requires_grad=False)
    tangents = [torch.randn_like(t) for t in given(tensors)]
    assert gradcheck(
        norm_of(tensors),
        [t.clone().requires_grad_() for t in given(tensors)],
        check_forward_ad=True,
        check_backward_ad=False,
    )
    for which in range(len(tangents)):  # one operand carries a tangent
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(t, tangent) if i == which else t
                for i, (t, tangent) in enumerate(zip(given(tensors), tangents, strict=True))
            ]
            primal, tangent = forward_ad.unpack_dual(norm_of(tensors)(*duals))
        with override_off(), forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(t.contiguous(), tangent.contiguous()) if i == which else t
                for i, (t, tangent) in enumerate(zip(given(tensors), tangents, strict=True))
            ]
            duals[0] = duals[0].contiguous()
            expected = forward_ad.unpack_dual(norm_of(tensors)(*duals))
        torch.testing.assert_close((primal, tangent), tuple(expected))


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(lambda *t: f(*t).cos().sum(), argnums=(0, 1, 2)),
    "grad of grad": lambda f: torch.func.grad(
        lambda *t: torch.func.grad(lambda *s: f(*s).cos().sum())(*t).sin().sum()
    ),
    "vjp": lambda f: lambda *t: torch.func.vjp(f, *t)[1](t[0].cos()),
    "jvp": lambda f: lambda *t: torch.func.jvp(f, t, tuple(s.cos() for s in t)),
    "jacrev": lambda f: torch.func.jacrev(f, argnums=1),
    "jacfwd": lambda f: torch.func.jacfwd(f, argnums=1),
    "hessian": lambda f: torch.func.hessian(lambda *t: f(*t).cos().sum(), argnums=2),
    "vmap": lambda f: (
        lambda X, *params: torch.func.vmap(lambda x: f(x, *params))(
            torch.stack([X, X.cos(), X.sin()])
        )
    ),
    "vmap of grad": lambda f: (
        lambda X, *params: torch.func.vmap(torch.func.grad(lambda x: f(x, *params).cos().sum()))(
            torch.stack([X, X.cos()])
        )
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@RANKS
def test_functorch(device: str, transform: str, shape: tuple[int, ...]) -> None:
    tensors = operands((1, *shape[1:]), device, requires_grad=False)
    function = TRANSFORMS[transform](norm)
    expected = stock_on_nchw(function, tensors)
    with stock_limits(lambda: function(*tensors)):
        torch.testing.assert_close(function(*tensors), expected)


@pytest.mark.parametrize("transform", ["grad", "grad of grad", "vjp", "jacrev"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=["NHWC", "NDHWC"])
def test_layouts_inside_functorch(device: str, transform: str, shape: tuple[int, ...]) -> None:
    """A result may be viewed inside a transform, so it has the layout that stock's has there.

    Of [N, C, L], stock's is contiguous anywhere.
    """
    tensors = operands((1, *shape[1:]), device, requires_grad=False)
    seen: list[tuple[int, ...]] = []

    def watched(*operands: Tensor) -> Tensor:
        Y = norm(*operands)
        seen.append(Y.stride())
        return Y

    def strides() -> list[tuple[int, ...]]:
        seen.clear()
        results = TRANSFORMS[transform](watched)(*tensors)
        return seen + [t.stride() for t in torch.utils._pytree.tree_leaves(results)]

    ours = strides()
    with override_off():
        assert ours == strides()


@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_forwards_inside_functorch_are_served(device: str, transform: str) -> None:
    """Up to 2.13 where stock, which runs there, has kernels that keep the layout."""
    tensors = operands((2, 6, 3, 5), device, requires_grad=False)
    torch.ops.gn_override.reset_counters()
    TRANSFORMS[transform](norm)(*tensors)
    served = device == "cpu" or TORCH >= (2, 14)
    assert calls(FORWARD, device) == ((1, 0) if served else (0, 1))


def test_fast_path_survives_functorch(device: str) -> None:
    """functorch leaves traces in the thread; they must not switch the kernels off."""
    tensors = operands((2, 6, 3, 5), device)
    TRANSFORMS["grad"](norm)(*[t.detach() for t in given(tensors)])
    torch.ops.gn_override.reset_counters()
    norm(*tensors).sum().backward()
    assert taken(device) == (1, 1)


# --- tracing ----------------------------------------------------------------------------------


class Block(nn.Module):
    """conv, norm, in-place ReLU: what networks do with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)
        self.norm = nn.GroupNorm(GROUPS, 6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


def block(device: str) -> tuple[Block, Tensor]:
    module = Block().to(device, memory_format=torch.channels_last)
    return module, lay_out(torch.randn(2, 4, 5, 7, device=device), "channels_last")


def test_jit_trace(device: str) -> None:
    module, x = block(device)
    traced = torch.jit.trace(module, x)
    expected = module(x)
    torch.ops.gn_override.reset_counters()
    actual = traced(x)
    assert taken(device) == (1, 0)
    assert is_channels_last(actual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grads = [
        torch.autograd.grad(y.cos().sum(), list(module.parameters())) for y in (expected, actual)
    ]
    torch.testing.assert_close(*grads)


def test_jit_script(device: str) -> None:
    module, x = block(device)
    scripted = torch.jit.script(module)
    expected = module(x)
    torch.ops.gn_override.reset_counters()
    for _ in range(3):  # the third run is of the optimised graph
        actual = scripted(x)
        assert is_channels_last(actual)
        torch.testing.assert_close(actual, expected)
    assert taken(device) == (3, 0)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(device: str, mode: str) -> None:
    """Forward and backward in one graph, on our kernels where stock's take its layout."""
    layout_is_stocks = device == "cpu" or not CONDITIONS["STOCK_DROPS_LAYOUT"]
    tensors = operands((2, 6, 3, 5), device, torch.float)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        Y = norm(*tensors)
        return Y, *torch.autograd.grad(Y.cos().sum(), tensors)

    graph = make_fx(step, tracing_mode=mode)(*tensors)
    targets = [node.target for node in graph.graph.nodes]
    assert aten.native_group_norm.default in targets
    assert aten.native_group_norm_backward.default in targets
    torch.ops.gn_override.reset_counters()
    actual = graph(*tensors)
    assert [calls(op, device) for op in ATEN] == [(1, 0) if layout_is_stocks else (0, 1)] * 2
    torch.testing.assert_close(actual, step(*tensors))
    for t in actual[:2]:
        assert is_channels_last(t) == layout_is_stocks


STRIDED = {
    "tokens": lambda: torch.randn(2, 5, 8).transpose(1, 2),
    "image": lambda: torch.randn(5, 7, 8).permute(2, 0, 1).unsqueeze(0),
    "slice": lambda: lay_out(torch.randn(2, 9, 5, 7), "channels_last")[:, 1:],
}


@pytest.mark.parametrize("record", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic", "aot_function"])
@pytest.mark.parametrize("layout", STRIDED)
def test_traced_graphs_run_without_the_override(
    device: str, layout: str, mode: str, record: bool
) -> None:
    """They copy what stock's kernels do not take."""
    X = STRIDED[layout]().to(device).requires_grad_(record)

    def step(X: Tensor) -> tuple[Tensor, ...]:
        Y = group_norm(X)
        return (Y, *torch.autograd.grad(Y.cos().sum(), X)) if record else (Y,)

    group_norm = functools.partial(F.group_norm, num_groups=4)
    expected = step(X)
    if mode == "aot_function":
        group_norm = aot_function(group_norm, make_boxed_compiler(lambda graph, inputs: graph))
        graph = step
        graph(X)
    else:
        graph = make_fx(step, tracing_mode=mode)(X)
    for scope in (contextlib.nullcontext, gn_override.disabled):
        with scope():
            torch.testing.assert_close(graph(X), expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@RANKS
def test_compile_aot_eager(device: str, dynamic: bool, shape: tuple[int, ...]) -> None:
    """Dynamo and AOTAutograd: training graphs call our kernels; sizes stay dynamic."""
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(norm, backend=backend, dynamic=dynamic)
    # Sizes that are all different: equal ones may share a symbol.
    sizes = [(11, *shape[1:]), (17, shape[1], *(s + 9 for s in shape[2:]))] if dynamic else [shape]
    for size in sizes:
        tensors = operands(size, device, torch.float)
        Y = compiled(*tensors)
        assert is_channels_last(Y)
        gradients = torch.autograd.grad(Y.cos().sum(), given(tensors))
        expected = norm(*tensors)
        torch.testing.assert_close(Y, expected)
        torch.testing.assert_close(
            gradients, torch.autograd.grad(expected.cos().sum(), given(tensors))
        )
    assert graphs == 1, "recompiled: a size was taken for a constant"
    assert taken(device) == (2 * len(sizes), 2 * len(sizes))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compile_slice_of_a_sequence(device: str, training: bool) -> None:
    """Of [N, C, L], whose samples are further apart than C L elements."""
    torch._dynamo.reset()
    X = torch.randn(4, 7, 12, device=device).transpose(1, 2)[:, :, :5].requires_grad_(training)
    Y = torch.compile(norm, backend="aot_eager", dynamic=True)(X)
    torch.testing.assert_close(Y, norm(X))
    if training:
        compiled, eager = (torch.autograd.grad(y.cos().sum(), X) for y in (Y, norm(X)))
        torch.testing.assert_close(compiled, eager)


@RANKS
def test_compile_follows_the_switch(device: str, shape: tuple[int, ...]) -> None:
    """What was compiled on one side of the switch is compiled again on the other."""
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager")
    tensors = operands(shape, device, torch.float)

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        Y = function(*tensors)
        return Y, *torch.autograd.grad(Y.cos().sum(), given(tensors))

    ours = run(compiled)
    with gn_override.disabled():
        torch.ops.gn_override.reset_counters()
        torch.testing.assert_close(run(compiled), run(norm), rtol=0, atol=0)
        assert torch.ops.gn_override.counters() == {}
    torch.testing.assert_close(run(compiled), ours, rtol=0, atol=0)
    assert taken(device) == (1, 1)


@FUNCTIONS
def test_compiled_autograd(device: str, function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    tensors = operands((2, 6, 3, 5), device, torch.float)
    expected = torch.autograd.grad(function(*tensors).cos().sum(), given(tensors))
    torch.ops.gn_override.reset_counters()
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        function(*tensors).cos().sum().backward()
    torch.testing.assert_close([t.grad for t in given(tensors)], list(expected))
    for op in ATEN if function is norm else FUSED:
        assert calls(op, device) == (1, 0)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_export(device: str, dynamic: bool) -> None:
    module, x = block(device)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        module, (x,), dynamic_shapes={"x": {0: batch}} if dynamic else None
    )
    lowered = program.run_decompositions()
    if dynamic:
        x = torch.cat([x, x.cos()])
    with gn_override.disabled():
        expected = module(x)
    for exported in (program, lowered):
        torch.ops.gn_override.reset_counters()
        with torch.no_grad():
            actual = exported.module()(x)
        assert calls(FORWARD, device) == (1, 0)
        torch.testing.assert_close(actual, expected)


# --- fake tensors -----------------------------------------------------------------------------

DTYPES = [(torch.float, torch.float), (torch.bfloat16, torch.bfloat16), (torch.half, torch.float)]


def facts(outputs: Any) -> list[Any]:
    """Sizes, strides, dtypes of the tensors among the outputs."""
    return [
        None if t is None else (tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype)
        for t in outputs
    ]


@pytest.mark.parametrize("which", ["six dimensions", "float bias alone"])
def test_fake_results_on_a_cpu(which):
    if which == "six dimensions":
        if TORCH < (2, 14):
            pytest.skip("stock raises an error: its native operator takes no such strides")
        if TORCH == (2, 14):
            pytest.skip("stock's fake dX has X's strides, its real dX is contiguous")
        X = torch.randn(2, 3, 2, 2, 2, 6).movedim(-1, 1)
        sizes, beta = (2, 6, 24, 3), None
    else:
        X = lay_out(torch.randn(2, 6, 3, 5).bfloat16(), "channels_last")
        sizes, beta = (2, 6, 15, 3), torch.randn(6)
    mask = [True, False, True]
    real = aten.native_group_norm(X, None, beta, *sizes, 1e-5)
    real += aten.native_group_norm_backward(X, X, *real[1:], None, *sizes, mask)
    mode = FakeTensorMode()
    x, b, *stats = (t if t is None else mode.from_tensor(t) for t in (X, beta, *real[1:3]))
    with mode:
        fake = aten.native_group_norm(x, None, b, *sizes, 1e-5)
        fake += aten.native_group_norm_backward(x, x, *stats, None, *sizes, mask)
    assert facts(fake) == facts(real)


def served_layouts(shape: tuple[int, ...]) -> list[str]:
    return ["channels_last", "unaligned"] + (["sliced"] if len(shape) > 3 else [])


def to_fake(mode: FakeTensorMode, tensor: Tensor | None, dynamic: bool) -> Tensor | None:
    """The tensor's fake, on its device; dynamic: every size but C is symbolic."""
    if tensor is None or not dynamic:
        return tensor if tensor is None else mode.from_tensor(tensor)
    sizes = [
        DimDynamic.STATIC if d == 1 or tensor.ndim == 1 else DimDynamic.DYNAMIC
        for d in range(tensor.ndim)
    ]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))


def fake_cuda(mode: FakeTensorMode, tensor: Tensor | None) -> Tensor | None:
    """A fake CUDA tensor of the same sizes and strides; needs no GPU."""
    if tensor is None:
        return None
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


FAKES = [
    pytest.param(shape, layout, dtypes, id=f"{len(shape)}d-{layout}-{str(dtypes[0])[6:]}")
    for shape in SHAPES
    for layout in served_layouts(shape)
    for dtypes in DTYPES
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape, layout, dtypes", FAKES)
def test_fake_equals_real(
    device: str, shape: tuple[int, ...], layout: str, dtypes: tuple, dynamic: bool
) -> None:
    """Sizes, strides and dtypes, forward and backward, for every layout of dY and every mask."""
    dtype, param_dtype = dtypes
    X = lay_out(torch.randn(shape, dtype=dtype, device=device), layout)
    sizes = (shape[0], shape[1], X[0, 0].numel(), GROUPS)
    for affine in (True, False):
        gamma = torch.randn(shape[1], dtype=param_dtype, device=device) if affine else None
        real = aten.native_group_norm(X, gamma, gamma, *sizes, 1e-5)
        mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
        fake_X, fake_gamma = (to_fake(mode, t, dynamic) for t in (X, gamma))
        pixels = 1
        for size in fake_X.shape[2:]:
            pixels = pixels * size
        fake_sizes = (fake_X.shape[0], shape[1], pixels, GROUPS)
        with mode:
            fake = aten.native_group_norm(fake_X, fake_gamma, fake_gamma, *fake_sizes, 1e-5)
        if dynamic:
            assert all(isinstance(fake[0].shape[d], torch.SymInt) for d in (0, 2))
            assert not mode.shape_env.replacements, "a size was taken for a constant"
        assert facts(fake) == facts(real)
        for dY_layout, mask in (
            ("channels_last", [True, True, True]),
            ("nchw", [True, True, False]),
            ("permuted", [True, False, True]),
            ("expanded", [True, False, False]),
            ("nchw", [False, True, True]),
        ):
            dY = lay_out(torch.randn(shape, device=device).to(dtype), dY_layout)
            real_grads = aten.native_group_norm_backward(dY, X, *real[1:], gamma, *sizes, mask)
            fake_stats = [to_fake(mode, t, False) for t in real[1:]]
            fake_dY = to_fake(mode, dY, False)
            with mode:
                fake_grads = aten.native_group_norm_backward(
                    fake_dY, fake_X, *fake_stats, fake_gamma, *fake_sizes, mask
                )
            assert facts(fake_grads) == facts(real_grads)
    assert calls(FORWARD, device)[1] == calls(BACKWARD, device)[1] == 0


@pytest.mark.cuda_build
@pytest.mark.parametrize("shape, layout, dtypes", FAKES)
def test_fake_cuda(shape: tuple[int, ...], layout: str, dtypes: tuple) -> None:
    """What the CUDA kernels will return, told without a GPU: X's layout, dense."""
    dtype, param_dtype = dtypes
    X = lay_out(torch.randn(shape).to(dtype), layout)
    sizes = (shape[0], shape[1], X[0, 0].numel(), GROUPS)
    dense = lay_out(X, "channels_last").stride()
    gamma = torch.randn(shape[1]).to(param_dtype)
    mode = FakeTensorMode()
    fake_X, fake_gamma = fake_cuda(mode, X), fake_cuda(mode, gamma)
    with mode:
        Y, mean, rstd = aten.native_group_norm(fake_X, fake_gamma, None, *sizes, 1e-5)
        for dY_layout in ("channels_last", "nchw"):
            dY = fake_cuda(mode, lay_out(torch.randn(shape).to(dtype), dY_layout))
            dX, dgamma, dbeta = aten.native_group_norm_backward(
                dY, fake_X, mean, rstd, fake_gamma, *sizes, [True, True, True]
            )
            assert (dX.stride(), dX.dtype) == (dense, dtype)
            assert dgamma.dtype == dbeta.dtype == param_dtype
        composite = norm(fake_X, fake_gamma)
    assert Y.stride() == composite.stride() == dense
    assert mean.dtype == rstd.dtype == param_dtype
    assert Y.device.type == mean.device.type == "cuda"


@pytest.mark.cuda_build
@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 1), (4, 8, 1, 1)], ids=str)
def test_fake_cuda_half_of_one_layout(shape: tuple[int, ...]) -> None:
    """Half X with float parameters, both layouts at once: ours on CUDA, where stock refuses it."""
    X = torch.randn(shape, dtype=torch.half)
    mode = FakeTensorMode()
    fake_X, gamma = fake_cuda(mode, X), fake_cuda(mode, torch.randn(8))
    with mode:
        Y, mean, rstd = aten.native_group_norm(fake_X, gamma, gamma, 4, 8, 1, 2, 1e-5)
    assert Y.is_contiguous() and Y.dtype == torch.half
    assert mean.dtype == rstd.dtype == torch.float


# Fake outputs for the layouts that we serve and for others, of CPU, CUDA and meta tensors.
FAKE_FACTS = """
import itertools, json, torch
from torch._subclasses.fake_tensor import FakeTensorMode
{prepare}
aten = torch.ops.aten
results = []
for device, shape in itertools.product(
    {devices}, [(2, 6, 7), (2, 6, 3, 5), (2, 6, 2, 3, 4), (2, 6, 1, 1), (2, 6)]
):
    for moves in ([], [(1, -1)], [(0, -1)]):
        with FakeTensorMode():
            X = torch.empty(shape, device=device)
            for source, to in moves:
                X = X.movedim(source, to).contiguous().movedim(to, source)
            gamma = torch.empty(6, device=device)
            sizes = (2, 6, X.numel() // 12, 3)
            try:
                Y, mean, rstd = aten.native_group_norm(X, gamma, gamma, *sizes, 1e-5)
                outputs = [Y, mean, rstd] + list(
                    aten.native_group_norm_backward(
                        Y, X, mean, rstd, gamma, *sizes, [True, True, True]
                    )
                )
                facts = [[list(t.stride()), str(t.dtype), str(t.device)] for t in outputs]
            except Exception as error:
                facts = [type(error).__name__, str(error)]
            results.append([device, shape, moves, facts])
print(json.dumps(results))
"""


def test_fake_tensors_follow_the_switch(tmp_path: Path) -> None:
    """Off: what a process without the package gets. On: nothing changes but for served layouts."""
    devices = ["cpu", "meta"] + (["cuda"] if torch.backends.cuda.is_built() else [])

    def facts(prepare: str) -> list[Any]:
        code = FAKE_FACTS.format(prepare=prepare, devices=devices)
        return json.loads(run_python("-c", code, cwd=tmp_path).stdout)

    without = facts("")
    off = facts(
        "import gn_override\n"
        "with FakeTensorMode():\n"  # fills the dispatch cache with our strides
        "    x = torch.empty(2, 3, 5, 6).permute(0, 3, 1, 2)\n"
        "    aten = torch.ops.aten\n"
        "    aten.native_group_norm(x, None, None, 2, 6, 15, 3, 1e-5)\n"
        "gn_override.disable()"
    )
    assert off == without
    for ours, stock in zip(facts("import gn_override"), without, strict=True):
        device, shape, moves, _ = ours
        served = (
            device in BACKENDS and moves == [[1, -1]] and len(shape) > 2 and shape[2:] != [1, 1]
        )
        if not served:
            assert ours == stock


@RANKS
def test_fake_training(shape: tuple[int, ...]) -> None:
    """group_norm and its backward on fake tensors, strides as on real ones."""
    tensors = operands(shape, dtype=torch.float)
    Y = norm(*tensors)
    Y.sum().backward()
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in given(tensors)]
    fakes = [t.detach().requires_grad_() for t in fakes]
    with mode:
        fake_Y = norm(*fakes)
        fake_Y.sum().backward()
    assert facts([fake_Y, *(t.grad for t in fakes)]) == facts(
        [Y, *(t.grad for t in given(tensors))]
    )


@pytest.mark.parametrize("groups", [0, 4])
def test_fake_errors_are_stock(groups: int) -> None:
    """A call that real kernels refuse is refused as it is without us."""
    raised = []
    for on in (True, False):
        with gn_override._switched(on), FakeTensorMode():
            X = torch.empty(2, 3, 5, 6).permute(0, 3, 1, 2)
            with pytest.raises(Exception) as caught:
                aten.native_group_norm(X, None, None, 2, 6, 15, groups, 1e-5)
            raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


def with_kernels(**changed: Any) -> dict[str, Any]:
    """Arguments of a forward that our kernels take, but for what is changed."""
    X = lay_out(torch.ones(2, 6, 3, 5, dtype=changed.pop("dtype", torch.float)), "channels_last")
    arguments = {"input": X, "weight": None, "bias": None}
    return arguments | {"N": 2, "C": 6, "HxW": 15, "group": GROUPS, "eps": 1e-5} | changed


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="accepted"),
        pytest.param({"weight": torch.ones(6).double()}, id="double weight"),
        pytest.param({"weight": torch.ones(6), "bias": torch.ones(6).double()}, id="double bias"),
        pytest.param({"weight": torch.ones(7)}, id="long weight"),
        pytest.param({"weight": torch.ones(1, 6)}, id="weight of rank 2"),
        pytest.param({"dtype": torch.bfloat16, "weight": torch.ones(6).half()}, id="two halves"),
        pytest.param({"dtype": torch.int32}, id="integers"),
        pytest.param({"N": 1, "HxW": 30}, id="N"),
        pytest.param({"C": 3, "HxW": 30}, id="C"),
        pytest.param({"HxW": 14}, id="HxW"),
        pytest.param({"group": 4}, id="groups"),
    ],
)
def test_what_is_told_to_be_taken_is_taken(changed: dict[str, Any]) -> None:
    """The rules of fake tensors are the binding's, for calls that stock's kernels can stand too."""
    arguments = with_kernels(**changed).values()
    assert _meta.takes_forward(*arguments) is (not changed)
    with contextlib.suppress(RuntimeError):
        aten.native_group_norm(*arguments)
    assert calls(FORWARD, "cpu")[0] == (not changed)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="accepted"),
        pytest.param({"grad_out": torch.ones(2, 6, 5, 3)}, id="transposed gradient"),
        pytest.param({"grad_out": torch.ones(2, 6, 3, 5).double()}, id="double gradient"),
        pytest.param({"rstd": torch.ones(2, GROUPS).double()}, id="double rstd"),
        pytest.param({"mean": torch.ones(2, GROUPS + 1)}, id="long mean"),
        pytest.param({"weight": torch.ones(7)}, id="long weight"),
    ],
)
def test_what_is_told_to_be_taken_backward_is_taken(changed: dict[str, Any]) -> None:
    """As above."""
    input, _, _, *sizes, _ = with_kernels().values()
    mean, rstd = torch.ones(2, 2, GROUPS)
    tensors = {"grad_out": input, "input": input, "mean": mean, "rstd": rstd, "weight": None}
    arguments = (*(tensors | changed).values(), *sizes, [True, True, True])
    assert _meta.takes_backward(*arguments) is (not changed)
    with contextlib.suppress(RuntimeError):
        aten.native_group_norm_backward(*arguments)
    assert calls(BACKWARD, "cpu")[0] == (not changed)
