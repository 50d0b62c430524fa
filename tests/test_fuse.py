"""Fused activations: functional.group_norm, nn.GroupNorm, and fuse() on whole modules."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import io
import linecache
import pickle
import sys
import textwrap
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import run_python
from reference import FUSED, calls, floor, is_channels_last, lay_out, override_off
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gn_override
from gn_override import FusedPair, Fusion, SkippedNorm, _activations, _calls, _forward, _fuse

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

FORWARD, BACKWARD = FUSED

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
}
NO_ACTIVATION = "no activation that can be fused is seen to follow it"


def followed_by(name: str) -> str:
    return f"{name} follows it, which is no activation that can be fused"


def image(device: str = "cpu", layout: str = "channels_last", C: int = 8) -> Tensor:
    return lay_out(torch.randn(2, C, 6, 5, device=device), layout)


def gradients(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of all tensors and of a module's parameters."""
    tensors = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    Y = function(*tensors)
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    return Y.detach(), *torch.autograd.grad(Y.cos().sum(), [*tensors, *weights])


def randomised(module: nn.Module) -> nn.Module:
    """Affine parameters that are not ones and zeros."""
    for child in module.modules():
        if isinstance(child, nn.GroupNorm) and child.affine:
            nn.init.normal_(child.weight)
            nn.init.normal_(child.bias)
    return module


def check_fused(
    model: nn.Module, *inputs: Tensor, pairs: int, calls_made: int
) -> gn_override.Fusion:
    """fuse() finds so many pairs, and results and gradients stay what they were."""
    device = inputs[0].device.type
    expected = gradients(model, *inputs)
    keys = list(model.state_dict())
    fusion = gn_override.fuse(model)
    assert len(fusion.fused) == pairs, str(fusion)
    assert list(model.state_dict()) == keys
    torch.ops.gn_override.reset_counters()
    actual = gradients(model, *inputs)
    assert calls(FORWARD, device) == calls(BACKWARD, device) == (calls_made, 0)
    for mine, theirs in zip(actual, expected, strict=True):
        # Norms of norms: an error is one of the largest value.
        atol = 1e-4 * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
    return fusion


def check_left(model: nn.Module, *inputs: Tensor) -> tuple[SkippedNorm, ...]:
    """fuse() changes nothing; why."""
    kinds = {name: type(module) for name, module in model.named_modules()}
    expected = gradients(model, *inputs)
    fusion = gn_override.fuse(model)
    assert fusion.fused == (), str(fusion)
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    torch.ops.gn_override.reset_counters()
    assert all(map(torch.equal, gradients(model, *inputs), expected))
    assert calls(FORWARD, "cpu") == (0, 0)
    return fusion.skipped


# --- functional and module --------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_functional(device: str, activation: str, dtype: torch.dtype) -> None:
    """Output and gradients are those of stock's norm and activation in float64."""
    X = image(device).to(dtype)
    gamma, beta = torch.randn(2, 8, device=device).to(dtype).unbind()

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gn_override.functional.group_norm(x, 4, weight, bias, 1e-3, activation)

    def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ACTIVATIONS[activation](F.group_norm(x, 4, weight, bias, 1e-3))

    torch.ops.gn_override.reset_counters()
    actual = gradients(ours, X, gamma, beta)
    if activation != "identity":
        assert calls(FORWARD, device) == calls(BACKWARD, device) == (1, 0)
    assert is_channels_last(actual[0]) and is_channels_last(actual[1])
    with override_off():
        expected = gradients(stock, X.double(), gamma.double(), beta.double())
    for mine, exact in zip(actual, expected, strict=True):
        assert mine.dtype == dtype
        # In float64 both are off by so much.
        few = (8 if dtype == torch.float64 else 4) * floor(float(exact.abs().max()), dtype)
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=few)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", ["dense", "channels", "rows", "permuted"])
def test_functional_nchw(device: str, activation: str, dtype: torch.dtype, view: str) -> None:
    """Stock's own results, and its layout."""
    dense = image(device, "nchw").to(dtype)
    views = {
        "dense": dense,
        "channels": dense[:, 4:],
        "rows": dense[:, :, 1:],
        "permuted": dense.transpose(2, 3),
    }
    X = views[view]
    assert X.is_contiguous() == (view == "dense")
    expected = gradients(lambda x: ACTIVATIONS[activation](F.group_norm(x, 4)), X)
    torch.ops.gn_override.reset_counters()
    actual = gradients(lambda x: gn_override.functional.group_norm(x, 4, activation=activation), X)
    assert all(map(torch.equal, actual, expected))
    assert actual[0].stride() == expected[0].stride()
    assert calls(FORWARD, device) == (0, 0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("affine", [True, False])
def test_module(activation: str, affine: bool) -> None:
    """A drop-in for nn.GroupNorm, in both directions."""
    stock = randomised(nn.GroupNorm(4, 8, 1e-3, affine))
    ours = gn_override.nn.GroupNorm(4, 8, 1e-3, affine, activation=activation)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    X = image()
    expected = gradients(nn.Sequential(stock, Activation(activation)), X)
    torch.testing.assert_close(gradients(ours, X), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(ours, nn.GroupNorm)
    assert repr(ours) == repr(stock)[:-1] + f", activation={activation})"
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert again.activation == activation
        assert torch.equal(again(X), ours(X))


class Activation(nn.Module):
    """An activation by name, of a class that fuse() does not know."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](x)


def test_module_takes_what_stocks_takes() -> None:
    module = gn_override.nn.GroupNorm(2, 4, dtype=torch.float64, device="meta")
    assert module.weight.dtype == torch.float64 and module.weight.is_meta
    try:
        expected = nn.GroupNorm(2, 4, bias=False)
    except TypeError:
        with pytest.raises(TypeError):
            gn_override.nn.GroupNorm(2, 4, bias=False)
    else:
        assert expected.bias is None
        assert gn_override.nn.GroupNorm(2, 4, bias=False).bias is None
    with pytest.raises(ValueError, match="divisible"):
        gn_override.nn.GroupNorm(3, 4)


def test_unknown_activation() -> None:
    """What the operator itself raises."""
    calls_with = (
        lambda name: torch.ops.gn_override.group_norm_act(image(), 4, activation=name),
        lambda name: gn_override.functional.group_norm(image(), 4, activation=name),
        lambda name: gn_override.nn.GroupNorm(4, 8, activation=name),
    )
    valid = "one of identity, relu, silu, gelu, gelu_tanh"
    for call in calls_with:
        with pytest.raises(
            ValueError, match=f'^gn_override: activation must be {valid}, got "mish"'
        ):
            call("mish")
    for call in calls_with[1:]:
        with pytest.raises(ValueError, match=f"must be {valid}, got"):
            call(["relu"])


def test_explain_knows_the_modules_activation() -> None:
    module = gn_override.nn.GroupNorm(4, 8, activation="silu")
    expected = gn_override.explain(
        image(), 4, weight=module.weight, bias=module.bias, activation="silu"
    )
    assert "silu" in str(expected)
    for activation in ("identity", "silu"):
        answer = gn_override.explain(module, input=image(), activation=activation)
        assert str(answer) == str(expected)
    with pytest.raises(ValueError, match="own activation is silu, not relu"):
        gn_override.explain(module, input=image(), activation="relu")
    for other in (nn.GroupNorm(4, 8), gn_override.nn.GroupNorm(4, 8)):
        answer = gn_override.explain(other, input=image(), activation="silu")
        assert str(answer) == str(expected)
    for any_norm in (module, other):
        with pytest.raises(ValueError, match="activation must be one of"):
            gn_override.explain(any_norm, input=image(), activation="bogus")


@pytest.mark.parametrize(
    "shape, groups, width",
    [
        ((8,), 4, 8),
        ((2, 8, 6, 5), 0, 8),
        ((2, 8, 6, 5), -1, 8),
        ((2, 8, 6, 5), 3, 8),
        ((2, 8, 6, 5), 4, 7),
        ((1, 4, 1, 1), 4, 4),
        ((1, 5, 1, 1), 3, 5),
    ],
)
def test_bad_input(shape: tuple[int, ...], groups: int, width: int) -> None:
    """Stock's own errors."""
    X = torch.randn(shape)
    if len(shape) > 2:
        X = lay_out(X, "channels_last")
    with pytest.raises(Exception) as expected, override_off():
        F.group_norm(X, groups, torch.ones(width))
    with pytest.raises(type(expected.value)) as actual:
        gn_override.functional.group_norm(X, groups, torch.ones(width), activation="silu")
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_groups": True},
        {"num_groups": 4.0},
        {"num_groups": "4"},
        {"num_groups": None},
        {"num_groups": 2**70},
        {"eps": None},
        {"eps": "a"},
        {"eps": 1j},
    ],
    ids=str,
)
def test_arguments_of_wrong_types(wrong: dict[str, Any]) -> None:
    """Stock's own errors."""
    arguments: Any = {"num_groups": 4} | wrong
    with pytest.raises(Exception) as expected, override_off():
        F.group_norm(image(), **arguments)
    with pytest.raises(type(expected.value)) as actual:
        gn_override.functional.group_norm(image(), **arguments, activation="silu")
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("num_groups", [4, np.int64(4)], ids=repr)
@pytest.mark.parametrize("eps", [1, True, np.float32(0.5)], ids=repr)
def test_arguments_of_other_types(num_groups: Any, eps: Any) -> None:
    """As stock takes them."""
    X = image()
    actual = gn_override.functional.group_norm(X, num_groups, eps=eps, activation="silu")
    torch.testing.assert_close(actual, F.silu(F.group_norm(X, num_groups, eps=eps)))


def test_inside_a_transform(device: str) -> None:
    """Stock's layouts."""
    X = image(device)

    def strides_of(norm: Callable[..., Tensor]) -> list[tuple[int, ...]]:
        strides = []

        def loss(x: Tensor) -> Tensor:
            Y = norm(x)
            strides.append(Y.stride())
            return Y.square().sum()

        dX = torch.func.grad(loss)(X)
        return [*strides, dX.stride()]

    ours = strides_of(lambda x: gn_override.functional.group_norm(x, 4, activation="silu"))
    with override_off():
        assert ours == strides_of(lambda x: F.silu(F.group_norm(x, 4)))


@pytest.mark.parametrize("batch", [0, 1])
def test_small_inputs(batch: int) -> None:
    X = lay_out(torch.randn(batch, 8, 2, 1), "channels_last")
    actual = gn_override.functional.group_norm(X, 4, activation="relu")
    torch.testing.assert_close(actual, F.relu(F.group_norm(X, 4)))


def test_autocast_as_stock(device: str) -> None:
    """The dtype that stock's norm and activation return."""
    X, norm = image(device).bfloat16(), nn.GroupNorm(4, 8).to(device)
    ours = gn_override.nn.GroupNorm(4, 8, activation="silu").to(device)
    with torch.autocast(device, torch.bfloat16):
        for x in (X, X.float()):
            expected = F.silu(norm(x))
            torch.testing.assert_close(ours(x), expected, rtol=2e-2, atol=2e-2)


def test_exported_without_our_operators() -> None:
    module, X = gn_override.nn.GroupNorm(4, 8, activation="silu"), image()
    fused = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    gn_override.fuse(fused)
    for exported in (module, fused):
        program = torch.export.export(exported, (X,))
        assert "gn_override" not in str(program.graph)
        torch.testing.assert_close(program.module()(X), exported(X))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_without_our_operators() -> None:
    module, X = gn_override.nn.GroupNorm(4, 8, activation="silu"), image()
    fused = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    gn_override.fuse(fused)
    for traced in (torch.jit.trace(module, X), torch.jit.trace(fused, X), torch.jit.script(fused)):
        assert "gn_override::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(X), module(X))
    for symbolic in map(torch.fx.symbolic_trace, (module, fused)):
        assert "gn_override" not in str(symbolic.graph)
        torch.testing.assert_close(symbolic(X), module(X))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("affine", [True, False])
def test_scripted_module(activation: str, affine: bool) -> None:
    module, X = gn_override.nn.GroupNorm(4, 8, affine=affine, activation=activation), image()
    scripted = torch.jit.script(randomised(module))
    assert "gn_override::" not in str(scripted.inlined_graph)
    torch.testing.assert_close(gradients(scripted, X), gradients(module, X))


class SiluIsSeven(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return args[0] * 0 + 7 if function is F.silu else function(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def test_modes_see_stocks_functions_and_operators() -> None:
    module, X = gn_override.nn.GroupNorm(4, 8, activation="silu"), image()
    fused = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    gn_override.fuse(fused)
    for model in (module, fused):
        with SiluIsSeven():
            assert model(X).eq(7).all()
        with Operators() as seen, torch.no_grad():
            model(X)
        assert seen.names == ["aten.native_group_norm.default", "aten.silu.default"]
        graph = make_fx(model)(X).graph
        assert "gn_override" not in str(graph)
        with torch.device("cpu"):
            assert takes(model) == 1


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_meta_tensors(layout: str) -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()).to("meta")
    expected = gradients(model, image("meta", layout))[0]
    gn_override.fuse(model)
    for grad in (torch.no_grad, torch.enable_grad):
        with grad():
            actual = model(image("meta", layout))
        assert actual.shape == expected.shape and actual.stride() == expected.stride()


class Tagged(torch.Tensor):
    """A class of tensors that PyTorch's operators keep."""


@pytest.mark.parametrize("which", ["input", "weight", "bias"])
def test_subclasses_of_tensors_get_stocks(which: str) -> None:
    tensors = {"input": image(), "weight": torch.randn(8), "bias": torch.randn(8)}
    norm = functools.partial(gn_override.functional.group_norm, num_groups=4, activation="silu")
    expected = norm(**tensors)
    torch.ops.gn_override.reset_counters()
    Y = norm(**tensors | {which: tensors[which].as_subclass(Tagged)})
    assert type(Y) is Tagged and calls(FORWARD, "cpu") == (0, 0)
    torch.testing.assert_close(Y.as_subclass(torch.Tensor), expected)


def test_fake_tensors() -> None:
    """They take the way of real ones, to the same strides."""
    expected = F.group_norm(image(), 4)
    with FakeTensorMode():
        X, norm = image(), nn.GroupNorm(4, 8)
        fake = _calls.group_norm_act(X, None, 4, norm.weight, norm.bias, norm.eps, "relu")
        model = nn.Sequential(norm, nn.ReLU())
        gn_override.fuse(model)
        for Y in (fake, model(X)):
            assert Y is not None and Y.stride() == expected.stride()


@pytest.mark.parametrize(
    "function, args, kwargs, name",
    [
        (F.relu, (True,), {}, "relu"),
        (F.relu, ("x",), {}, None),
        (F.relu, (True, True), {}, None),
        (F.silu, (), {"inplace": True}, "silu"),
        (F.silu, (), {"foo": True}, None),
        (F.gelu, (), {"approximate": "tanh"}, "gelu_tanh"),
        (F.gelu, ("tanh",), {}, None),
    ],
)
def test_arguments_of_activations(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
) -> None:
    """A call that PyTorch refuses is no activation."""
    assert _activations.of_call(function, *args, **kwargs) == name


@pytest.mark.parametrize("where", ["weights", "input"])
def test_tensors_on_two_devices(where: str) -> None:
    """Weights that are still on the meta device, say: stock's error."""
    module, X = gn_override.nn.GroupNorm(4, 8, activation="silu"), image()
    stock = nn.GroupNorm(4, 8)
    if where == "weights":
        module, stock = module.to("meta"), stock.to("meta")
    else:
        X = X.to("meta")
    with override_off(), pytest.raises(RuntimeError) as theirs:
        stock(X)
    with pytest.raises(RuntimeError) as ours:
        module(X)
    assert str(ours.value) == str(theirs.value)


# --- what is fused ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, [nn.GroupNorm(2, 4), nn.ReLU()]], ids=["None", "list"])
def test_fuse_takes_a_module(model: Any) -> None:
    with pytest.raises(TypeError, match=f"takes a torch.nn.Module, got {type(model).__name__}"):
        gn_override.fuse(model)


@pytest.mark.parametrize("activation", MODULES)
def test_sequential(device: str, activation: str) -> None:
    act = copy.deepcopy(MODULES[activation])
    # The activation is shared, and the second pair has something without effect in between.
    model = nn.Sequential(
        nn.Conv2d(8, 8, 1, bias=False),
        nn.GroupNorm(4, 8),
        act,
        nn.GroupNorm(2, 8, affine=False),
        nn.Identity(),
        act,
        nn.GroupNorm(8, 8),
    )
    model = randomised(model).to(device, memory_format=torch.channels_last)
    children = list(model)
    fusion = check_fused(model, image(device), pairs=2, calls_made=2)
    kind = activation.split()[0]
    assert fusion.fused == (FusedPair("1", "2", kind), FusedPair("3", "5", kind))
    assert fusion.skipped == (SkippedNorm("6", NO_ACTIVATION),)
    assert isinstance(model, nn.Sequential)
    assert all(map(lambda a, b: a is b, model, children))


class Functions(nn.Module):
    """Every way to write an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
        self.block = nn.ModuleDict({"norm": nn.GroupNorm(2, 8, affine=False)})

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(x))
        x = F.relu(self.norm(x), inplace=True)
        x = F.relu_(self.norm(x))
        x = torch.relu(self.norm(x))
        x = torch.relu_(self.norm(x))
        x = self.norm(x).relu()
        x = self.norm(x).relu_()
        x = torch.nn.functional.silu(self.norm(x), True)
        x = F.gelu(self.norm(x))
        x = F.gelu(self.norm(x), approximate="tanh")
        y = F.group_norm(x, 4, self.norm.weight, bias=self.norm.bias, eps=1e-3)
        return F.silu(y)


def test_functions() -> None:
    fusion = check_fused(randomised(Functions()), image(), pairs=10, calls_made=11)
    assert FusedPair("norm", "F.gelu", "gelu_tanh") in fusion.fused
    assert FusedPair("", "F.silu", "silu") in fusion.fused
    assert "norm + F.relu (relu)" in str(fusion)


aliased = F.group_norm


class WithoutModules(nn.Module):
    """Group norms, but no nn.GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(aliased(F.relu(F.group_norm(x, 4, self.w, self.b)), 2))


class Unreadable(WithoutModules):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 4, self.w, self.b))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_functions_without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that cannot have pairs are not read, and not reported."""
    pairs = (FusedPair("", "F.relu", "relu"), FusedPair("", "F.silu", "silu"))
    fusion = check_fused(WithoutModules(), image(), pairs=2, calls_made=2)
    assert fusion == gn_override.Fusion(pairs, ())
    assert "  the model itself + F.relu (relu)\n" in str(fusion)

    read: list[Any] = []
    stock = _forward.read
    monkeypatch.setattr(_forward, "read", lambda forward: read.append(forward) or stock(forward))
    script = torch.jit.script(nn.Sequential(nn.ReLU()))
    layer = nn.TransformerEncoderLayer(8, 2)
    others = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.ReLU(), script, layer, Unreadable()])
    assert gn_override.fuse(others) == gn_override.Fusion((), ())
    assert read == [Unreadable.forward] or not read


class Branches(nn.Module):
    """One activation for all; what runs hangs on attributes, arguments and values."""

    def __init__(self, mode: str = "default") -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, 8) for _ in range(3))
        self.act, self.drop, self.conv = nn.SiLU(), nn.Identity(), nn.Conv2d(8, 8, 1)
        self.mode = mode

    def forward(self, x: Tensor, shift: Tensor | None = None, *, times: int = 1) -> Tensor:
        """As ResNet blocks of diffusion models do.

        This line is indented.
        """
        h = self.norm1(x)
        h = self.act(h)
        if shift is not None:
            shift = self.act(shift)[:, :, None, None]
        if self.mode == "default":
            if shift is not None:
                h = h + shift
            h = self.norm2(h)
        elif self.mode == "scaled":
            h = self.norm2(h)
            h = h * 2
        else:
            h = self.norm2(h)
        h = self.act(h)
        h = self.drop(h)
        for _ in range(times):
            if h.sum() > 0:
                y = self.conv(h)
                h = self.norm3(y)
                h = self.drop(h)
                h = self.act(h)
            else:
                h = -self.norm3(h)
        return h


@pytest.mark.parametrize("mode", ["default", "scaled", "other"])
def test_branches(mode: str) -> None:
    """Every path keeps its results, also the ones that are taken by another call."""
    model = randomised(Branches(mode))
    stock = copy.deepcopy(model)
    fusion = gn_override.fuse(model)
    names = [pair.norm for pair in fusion.fused]
    assert names == (["norm1", "norm3"] if mode == "scaled" else ["norm1", "norm2", "norm3"])
    assert [norm.norm for norm in fusion.skipped] == (["norm2"] if mode == "scaled" else [])
    for x in (image(), -image().abs(), image().abs()):
        for shift in (None, torch.randn(2, 8)):
            for now in (mode, "default", "scaled", "other"):
                model.mode = stock.mode = now
                actual = model(x, shift, times=3)
                torch.testing.assert_close(actual, stock(x, shift, times=3), rtol=1e-4, atol=1e-4)


class Added(nn.Module):
    """Additions ahead of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, 8) for _ in range(3))
        self.act = nn.SiLU()
        self.one = 1

    def forward(self, x: Tensor, shift: Tensor | None) -> Tensor:
        h = x
        if shift is not None:
            h = h + shift
        h = self.act(self.norm1(h))
        h = self.norm2(h + self.one)
        h = F.relu(h)
        h = self.norm3(x + h)
        return self.act(h)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """What is added where run() asks for one kernel, and whether there is one."""
    asked = []
    original = _calls.group_norm_act

    def ask(input: Tensor, addend: object, *arguments: Any) -> Tensor | None:
        result = original(input, addend, *arguments)
        if addend is not None:
            asked.append((addend, result is not None))
        return result

    monkeypatch.setattr(_calls, "group_norm_act", ask)
    return asked


@pytest.mark.parametrize(
    "shape", [(2, 8, 1, 1), (1, 8, 1, 1), (8, 1, 1), (2, 8, 6, 5), ()], ids=str
)
def test_added(device: str, shape: tuple[int, ...], sums: list[tuple[Any, bool]]) -> None:
    model = randomised(Added()).to(device)
    X, shift = image(device), torch.randn(shape, device=device)
    with torch.no_grad():
        expected = model(X, shift), model(X, None)
    check_fused(model, X, shift, pairs=3, calls_made=3)
    assert [taken for _, taken in sums] == [False] * 3  # gradients are wanted
    sums.clear()
    torch.ops.gn_override.reset_counters()
    with torch.no_grad():
        actual = model(X, shift), model(X, None)
    assert calls(FORWARD, device) == (6, 0)
    per_channel = device == "cuda" and shape == (2, 8, 1, 1)
    assert [taken for _, taken in sums] == [per_channel, False, False, False, False]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_nothing_is_no_addend() -> None:
    """What PyTorch refuses to add, it still refuses."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

        def forward(self, x: Tensor, shift: Any) -> Tensor:
            h = self.norm(x + shift)
            return self.act(h)

    model = Net()
    assert len(gn_override.fuse(model).fused) == 1
    with pytest.raises(TypeError), torch.no_grad():
        model(image(), None)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["autocast", "off", "dtype", "nchw", "compiled"])
def test_added_elsewhere(mode: str, sums: list[tuple[Any, bool]]) -> None:
    """An addition and what comes after it."""
    model, X = randomised(Added()).to("cuda"), image("cuda")
    shift = torch.randn(2, 8, 1, 1, device="cuda")
    if mode == "dtype":
        shift = shift.half()
    if mode == "nchw":
        X = X.contiguous()
    off = override_off() if mode == "off" else contextlib.nullcontext()
    with torch.no_grad(), off, torch.autocast("cuda", enabled=mode == "autocast"):
        expected = model(X, shift)
        gn_override.fuse(model)
        called = torch.compile(model, backend="eager") if mode == "compiled" else model
        actual = called(X, shift)
    assert not any(taken for _, taken in sums)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_traceback() -> None:
    """A fused forward has the lines of its source."""
    model = Branches()
    gn_override.fuse(model)
    with pytest.raises(RuntimeError) as error:
        model(image(), torch.randn(3, 8))
    line = next(entry for entry in error.traceback if entry.name == "forward").statement
    assert str(line).strip() == "h = h + shift"
    assert str(inspect.signature(model.forward)) == str(inspect.signature(Branches().forward))


def test_two_variables() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            active = F.relu(normed)
            return x + self.conv(active)

    check_fused(Net(), image(), pairs=1, calls_made=1)


def test_annotated_variables() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = self.norm(x)
            active: Unknown = self.act(normed)  # type: ignore[name-defined] # noqa: F821
            rest: Tensor
            rest = self.norm(active)
            return rest

    check_fused(Net(), image(), pairs=1, calls_made=1)


class Selects(nn.Module):
    """A step decides what the next one is, and a norm's arguments read what it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))
        self.turn, self.conv = 0, self.convs[0]
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

    def select(self, x: Tensor) -> Tensor:
        self.conv = self.convs[self.turn]
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.select(x)
        h = self.conv(h)
        h = self.norm(h)
        h = self.act(h)
        h = self.conv(h)
        h = F.relu(F.group_norm(h, h.ndim))
        h = h + x
        h = F.group_norm(h, h.ndim)
        return F.relu(h)


def test_steps_keep_their_order() -> None:
    model, X = Selects(), image()
    stock = copy.deepcopy(model)
    assert len(gn_override.fuse(model).fused) == 2  # that of functions twice
    for turn in (0, 1, 0, 1):
        model.turn = stock.turn = turn
        torch.testing.assert_close(model(X), stock(X), rtol=1e-4, atol=1e-4)
    assert takes(model) == 3


class NormAct(nn.GroupNorm):
    """A norm with its activation, as timm has it."""

    def __init__(self, fast: bool = False) -> None:
        super().__init__(4, 8)
        self.drop, self.act, self.fast = nn.Identity(), nn.ReLU(inplace=True), fast

    def forward(self, x: Tensor) -> Tensor:
        if self.fast:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps) * 1.0
        else:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        x = self.act(x)
        return x


class Unchecked(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


def test_torch_group_norm_is_no_step() -> None:
    """It takes what F.group_norm refuses: one value for each channel."""
    model, X = Unchecked(4, 4), lay_out(torch.randn(1, 4, 1, 1), "channels_last")
    expected = model(X)
    assert not gn_override.fuse(model).fused
    assert torch.equal(model(X), expected)


def test_norm_with_an_activation_of_its_own() -> None:
    fusion = check_fused(nn.Sequential(NormAct()), image(), pairs=1, calls_made=1)
    assert fusion.fused == (FusedPair("0", "0.act", "relu"),)
    check_left(nn.Sequential(NormAct(fast=True)), image())


def test_our_norm_with_an_activation_has_it_already() -> None:
    """It is neither fused with another one nor reported as left."""
    for after in ((), (nn.ReLU(),)):
        norm = gn_override.nn.GroupNorm(4, 8, activation="silu")
        assert gn_override.fuse(nn.Sequential(norm, *after)) == Fusion((), ())


def test_our_norm_without_an_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(gn_override.nn.GroupNorm(4, 8), nn.ReLU())
    check_fused(model, image(), pairs=1, calls_made=1)
    monkeypatch.setattr(gn_override.nn.GroupNorm, "forward", lambda self, x: x + 1)
    assert takes(model) == 0


class Stem(nn.Module):
    """A forward that leaves the work to methods, as ResNets have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.norm3 = nn.GroupNorm(4, 8, affine=False)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x, times=2)

    def features(self, x: Tensor, *, times: int) -> Tensor:
        for _ in range(times):
            x = self.norm1(x)
            x = self.act(x)
        last = self.tail
        return last(x)

    def tail(self, x: Tensor) -> Tensor:
        return self.act(self.norm2(x)) + self.doubled(x)

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def unused(self, x: Tensor) -> Tensor:
        return self.act(self.norm3(x))


def test_methods() -> None:
    """Those of the same class that a forward uses, itself or by others, are read as well."""
    fusion = check_fused(randomised(Stem()), image(), pairs=2, calls_made=3)
    assert [pair.norm for pair in fusion.fused] == ["norm1", "norm2"]
    assert fusion.skipped == (SkippedNorm("norm3", NO_ACTIVATION),)


def test_fused_methods_are_copied_and_called_from_elsewhere() -> None:
    model, X = randomised(Stem()), image()
    expected = model(X), model.tail(X)
    gn_override.fuse(model)
    assert gn_override.fuse(model).fused == ()
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close((again(X), again.tail(X)), expected, rtol=1e-4, atol=1e-4)
        assert takes(again) == 3


class OtherTail(Stem):
    """Has the forward of its base, and not all methods."""

    def tail(self, x: Tensor) -> Tensor:
        return self.act(self.norm2(x)) * self.doubled(x)


class NoGradTail(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.features(x, times=1))

    @torch.no_grad()
    def tail(self, x: Tensor) -> Tensor:
        return self.act(self.norm2(x))


def test_methods_that_are_not_read() -> None:
    """Of other classes, decorated or replaced: they run as they are written."""
    X = image()
    replaced = randomised(Stem())
    replaced.tail = lambda x: replaced.act(replaced.norm2(x)) + 1  # type: ignore[method-assign]
    for model in (randomised(OtherTail()), randomised(NoGradTail()), replaced):
        expected = model(X)
        fusion = gn_override.fuse(model)
        fused = [] if isinstance(model, NoGradTail) else ["norm1"]
        assert [pair.norm for pair in fusion.fused] == fused
        assert SkippedNorm("norm2", NO_ACTIVATION) in fusion.skipped
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)


def test_patched_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is patched on a class counts from the next fuse() on."""
    model, X = Stem(), image()
    gn_override.fuse(model)
    monkeypatch.setattr(Stem, "tail", lambda self, x: x + 100)
    gn_override.fuse(model)
    assert takes(model) == 2
    assert model(X).mean() > 90
    stem = Stem()
    gn_override.fuse(stem)
    stem.tail = lambda x: x - 100  # type: ignore[method-assign]
    assert stem(X).mean() < -90


def test_inherited_forward() -> None:
    class Child(Functions):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return F.relu(self.block["norm"](y)) + F.relu(self.norm(y))

    check_fused(randomised(Child()), image(), pairs=1, calls_made=1)


# --- what is left, and why --------------------------------------------------------------------


class Calls(nn.Module):
    """A module that calls its norm and its activation in the way that a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout(0.0)


class SeenTwice(Calls):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        active = self.act(normed)
        return active + normed


class ChangedLater(Calls):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        active = self.act(normed)
        normed += 1
        return active


class SeenByAHandler(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h = x
        try:
            h = self.norm(h)
            h = self.act(h)
        except ValueError:
            return h
        return h


class Apart(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(x))
        return self.act(h)


class Capped(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.drop = nn.ReLU6(), nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.norm(x)))


class InALoop(Calls):
    def forward(self, x: Tensor) -> Tensor:
        for step in (self.norm, self.act):
            x = step(x)
        return x


class OtherContext(Calls):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.norm(x)
        return self.act(h)


class OtherFunction(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(torch.tanh(self.norm(x)))


class Shadowed(Calls):
    def forward(self, x: Tensor) -> Tensor:
        F = torch.special
        return F.expit(self.norm(x))


class BoundInside(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return sum(relu(self.norm(x)) for relu in (torch.tanh, torch.sin))


class Decorated(Calls):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class Private(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.__act(self.norm(x))

    def __act(self, x: Tensor) -> Tensor:
        return self.act(x)


relu = F.relu


class DefinesAClass(Calls):
    def forward(self, x: Tensor) -> Tensor:
        class Inner:
            relu = torch.tanh
            result = relu(self.norm(x))

        return Inner.result


def closure() -> nn.Module:
    factor = torch.tensor(2.0)

    class Closure(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x)) * factor

    return Closure()


class PrivateInside(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.__scales = (1.0, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(x))
        return torch.stack([h * self.__scales[i] for i in range(2)])


class Residual(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.act(h) + h
        return h


class ResidualAtTheEnd(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.act(h) + h


class Evaluates(Calls):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        h: Tensor = self.act(n)
        return h + eval("n")


class Executes(Calls):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        h: Tensor = self.act(n)
        exec("n.add_(1)")
        return h


class LooksAtVars(Calls):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        h: Tensor = self.act(n)
        return h + vars()["n"]


class LooksAtItsVariables(Calls):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        h: Tensor = self.act(n)
        return h + locals()["n"]


def wrapped() -> nn.Module:
    """A patch that says it is what it replaces."""

    class Wrapped(Calls):
        @functools.wraps(Calls.forward)
        def forward(self, x: Tensor) -> Tensor:
            return -self.act(self.norm(x))

    return Wrapped()


def without_source() -> nn.Module:
    names: dict[str, Any] = {"Calls": Calls}
    exec(
        "class NoSource(Calls):\n"
        "    def forward(self, x):\n"
        "        return self.act(self.norm(x))\n",
        names,
    )
    module: nn.Module = names["NoSource"]()
    return module


@pytest.mark.parametrize(
    "build, reason",
    [
        (SeenTwice, NO_ACTIVATION),
        (ChangedLater, NO_ACTIVATION),
        (SeenByAHandler, NO_ACTIVATION),
        (Apart, followed_by("Dropout")),
        (Capped, followed_by("ReLU6")),
        (InALoop, NO_ACTIVATION),
        (OtherContext, NO_ACTIVATION),
        (OtherFunction, NO_ACTIVATION),
        (Shadowed, NO_ACTIVATION),
        (BoundInside, NO_ACTIVATION),
        (Residual, NO_ACTIVATION),
        (ResidualAtTheEnd, NO_ACTIVATION),
        (Private, "Private.forward is not what its source says"),
        (PrivateInside, "PrivateInside.forward is not what its source says"),
        (LooksAtItsVariables, "LooksAtItsVariables.forward asks for its variables by name"),
        (Evaluates, "Evaluates.forward asks for its variables by name"),
        (Executes, "Executes.forward asks for its variables by name"),
        (LooksAtVars, "LooksAtVars.forward asks for its variables by name"),
        (wrapped, "Wrapped.forward is decorated, or no plain function"),
        (closure, "Closure.forward is a closure"),
        (DefinesAClass, "DefinesAClass.forward defines a class"),
        (without_source, "NoSource.forward has no source that can be read"),
    ],
)
def test_left(build: Callable[[], nn.Module], reason: str) -> None:
    assert check_left(build(), image()) == (SkippedNorm("norm", reason),)


class ActivatedNorm(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.act(self.norm(x))
        return h


class Scaled(Calls):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        h: Tensor = self.act(self.norm(x * by))
        return h


class InAContext(Calls):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h: Tensor = self.norm(x)
            h = self.act(h)
        return h


class InAnElif(Calls):
    def forward(self, x: Tensor, scale: int = 0) -> Tensor:
        if scale > 1:
            h = x * scale
        elif scale == 0:
            h = self.norm(x)
        else:
            h = -x
        h = self.act(h)
        return h


class SecondArgument(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.plus(x, self.act(self.norm(x)))

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class AnnotatedArgument(Calls):
    def forward(self, x: Missing) -> Tensor:
        h: Tensor = self.act(self.norm(x))
        return h


class AnnotatedResult(Calls):
    def forward(self, x: Tensor) -> Missing:
        return self.act(self.norm(x))


@pytest.mark.parametrize(
    "kind", [InAContext, InAnElif, SecondArgument, AnnotatedArgument, AnnotatedResult]
)
def test_taken(kind: type[Calls]) -> None:
    check_fused(kind(), image(), pairs=1, calls_made=1)


class CallsFunction(nn.Module):
    """A function kept as an attribute."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.norm, self.function = nn.GroupNorm(4, 8), function

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.function, str):
            return x
        h = self.norm(x)
        return self.function(h)


def test_functions_that_are_attributes() -> None:
    model, X = CallsFunction(F.silu), image()
    fusion = check_fused(model, X, pairs=1, calls_made=1)
    assert fusion.fused == (FusedPair("norm", "self.function", "silu"),)
    for function in (torch.tanh, lambda x: x * 2):
        model.function = function
        assert takes(model) == 0
        assert torch.equal(model(X), function(model.norm(X)))
    for left in (torch.tanh, "relu"):
        (skipped,) = gn_override.fuse(CallsFunction(left)).skipped
        assert skipped.reason == NO_ACTIVATION


def test_only_sums_are_added() -> None:
    check_fused(Scaled(), image(), torch.randn(2, 8, 1, 1), pairs=1, calls_made=1)


def test_pair_in_a_parameter() -> None:
    class Net(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.group_norm(x, 4, self.act(self.norm(x)).mean((0, 2, 3))))

    assert [pair.norm for pair in gn_override.fuse(Net()).fused] == ["norm"]


class Asks(Calls):
    asked = 0

    def ready(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def forward(self, x: Tensor) -> Tensor:
        if self.ready():
            h: Tensor = self.act(self.norm(x))
            return h
        return x


def test_methods_are_not_asked() -> None:
    """What a test calls may answer otherwise later, or change the module."""
    model = Asks()
    assert len(gn_override.fuse(model).fused) == 1
    assert model.asked == 0


def test_subclass_of_identity() -> None:
    class Doubles(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    check_left(nn.Sequential(nn.GroupNorm(4, 8), Doubles(), nn.ReLU()), image())


def test_reasons_of_a_norm_with_a_forward() -> None:
    class DecoratedNorm(NormAct):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    for model, reason in (
        (nn.Sequential(DecoratedNorm()), "forward is decorated, or no plain function"),
        (nn.Sequential(DecoratedNorm(), nn.ReLU()), "is a GroupNorm with a forward of its own"),
    ):
        (skipped,) = gn_override.fuse(model).skipped
        assert skipped.norm == "0" and skipped.reason.startswith("DecoratedNorm")
        assert skipped.reason.endswith(reason)


SOURCE = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, 8), nn.ReLU()
    def forward(self, x):
        return self.act(self.norm(x)) * 2
"""


def imported(name: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[nn.Module, Path]:
    """The model of SOURCE, in a file of that name."""
    patch.syspath_prepend(folder)
    path = folder / f"{name}.py"
    path.write_text(SOURCE)
    model: nn.Module = importlib.import_module(name).Net()
    return model, path


CELL = """
import torch.nn.functional as F
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)
    def forward(self, x: Unknown):
        return F.softplus(F.relu(self.norm(x)))
"""

CHANGES = [("2", "30"), ("2", "2.0"), ("x)", "y)"), ("* 2", "- 2"), ("return self", "return -self")]


@pytest.mark.parametrize("number, change", [*enumerate(CHANGES)])
def test_source_that_changes_on_disk(
    number: int, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is what was imported."""
    model, path = imported(f"edited{number}", tmp_path, monkeypatch)
    path.write_text(SOURCE.replace(*change))
    (skipped,) = check_left(model, image())
    assert skipped.reason == "Net.forward is not what its source says"


def test_loads_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused model, where the source of its class is not: it runs as it was written."""
    model, path = imported("gone", tmp_path, monkeypatch)
    gn_override.fuse(model)
    X, data = image(), pickle.dumps(model)
    expected = model(X)
    _forward.read.cache_clear()
    _fuse._made.clear()
    path.unlink()
    linecache.clearcache()
    again = pickle.loads(data)
    assert type(again) is sys.modules["gone"].Net
    torch.testing.assert_close(again(X), expected)


def test_other_edits_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the forward stays what it was, and its place, that does not matter."""
    model, path = imported("edited_elsewhere", tmp_path, monkeypatch)
    path.write_text(SOURCE.replace("nn.ReLU()", "nn.Tanh()") + "assert '\\.'\n")
    check_fused(model, image(), pairs=1, calls_made=1)


def test_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile each statement of a cell alone, and know the __future__ of earlier cells."""
    name, cell = "<a cell>", CELL
    monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(True), name))
    names: dict[str, Any] = {}
    flags = annotations.compiler_flag
    for statement in ast.parse(cell).body:
        module = ast.Module([statement], type_ignores=[])
        exec(compile(module, name, "exec", flags=flags, dont_inherit=True), names)
    check_fused(names["Net"](), image(), pairs=1, calls_made=1)


def test_decorated() -> None:
    fusion = gn_override.fuse(Decorated())
    assert fusion.skipped == (
        SkippedNorm("norm", "Decorated.forward is decorated, or no plain function"),
    )


def test_replaced_forward() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU())
    model.forward = model[0].forward
    (skipped,) = check_left(model, image())
    assert skipped.reason == "Sequential.forward is replaced on the instance"


def test_forwards_that_hooks_put_back() -> None:
    """As offloading does when it ends: the bound forward of the class stays on the instance."""

    def hook_and_unhook(module: Any) -> None:
        before = module.forward
        module.forward = lambda x: x
        module.forward = before

    model, X = TwoPairs(), image()
    for module in model.modules():
        hook_and_unhook(module)
    handle = model.second.register_forward_hook(lambda *_: None)
    assert [pair.norm for pair in gn_override.fuse(model).fused] == ["first"]
    handle.remove()
    assert takes(model) == 1
    hook_and_unhook(model)
    assert [pair.norm for pair in gn_override.fuse(model).fused] == ["second"]
    assert takes(model) == 2
    hook_and_unhook(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoPairs, "forward", lambda self, x: x + 100)
        gn_override.fuse(model)
        assert torch.equal(model(X), X + 100)
    other = TwoPairs()
    other.forward = model.forward  # of another module
    (first, _) = gn_override.fuse(other).skipped
    assert first.reason == "TwoPairs.forward is replaced on the instance"


def test_graph_modules() -> None:
    """They write their forward anew, in a class of their own."""
    stock = nn.Sequential(OrderedDict(norm=nn.GroupNorm(4, 8), act=nn.ReLU()))
    model, X = torch.fx.symbolic_trace(stock), image()
    (skipped,) = check_left(model, X)
    assert skipped.reason.endswith(".forward is generated by torch.fx")
    model.recompile()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(X), model(X))


class SuperOfItsClass(ActivatedNorm):
    def train(self, mode: bool = True) -> Any:
        return super(self.__class__, self).train(mode)


class SuperOfItsType(ActivatedNorm):
    @property
    def mode(self) -> str:
        return super(type(self), self).__repr__()


class SuperOfAVariable(ActivatedNorm):
    @torch.no_grad()
    def train(self, mode: bool = True) -> Any:
        kind = type(self)
        return super(kind, self).train(mode)


class CountsItsCalls(Calls):
    count = 0

    def note(self) -> None:
        self.__class__.count += 1


class InheritsACount(CountsItsCalls):
    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.act(self.norm(x))


class SetsOnItsClass(ActivatedNorm):
    def note(self) -> None:
        setattr(type(self), "noted", True)  # noqa: B010


class CountsInAClassMethod(ActivatedNorm):
    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1

    def train(self, mode: bool = True) -> Any:
        self.note()
        return super().train(mode)


class CountsWhatIsCached(ActivatedNorm):
    count = 0

    @functools.cached_property
    def mode(self) -> str:
        type(self).count += 1
        return "norm"


class CountsWhatIsRemembered(ActivatedNorm):
    count = 0

    @functools.cache  # noqa: B019
    def mode(self) -> str:
        type(self).count += 1
        return "norm"


class CountsWhatIsDeleted(ActivatedNorm):
    @property
    def mode(self) -> str:
        return "norm"

    @mode.deleter
    def mode(self) -> None:
        del type(self).count


class AnnotatesItsClass(ActivatedNorm):
    def note(self) -> None:
        kind: Any = type(self)
        kind.noted = True


class UnpacksItsClass(ActivatedNorm):
    def note(self) -> None:
        kind, value = type(self), True
        kind.noted = value


class NamesItsClassInATest(ActivatedNorm):
    def note(self) -> None:
        if kind := type(self):
            kind.noted = True


class IsExactly(ActivatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) if type(self) is IsExactly else x


class IsEqualTo(ActivatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        kind = self.__class__
        if kind == IsEqualTo:
            x = x + 1
        return self.act(self.norm(x))


class LooksItsClassUp(ActivatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) * {LooksItsClassUp: 2}[type(self)]


class ReadsItsOwnAttributes(ActivatedNorm):
    scale = 2

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) * type(self).__dict__["scale"]


class FindsThoseOfItsClass(ActivatedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) * isinstance(self.norm, type(self))


@pytest.mark.parametrize(
    "kind, method",
    [
        (SuperOfItsClass, "train"),
        (SuperOfItsType, "mode"),
        (SuperOfAVariable, "train"),
        (InheritsACount, "note"),
        (SetsOnItsClass, "note"),
        (CountsInAClassMethod, "note"),
        (CountsWhatIsCached, "mode"),
        (CountsWhatIsRemembered, "mode"),
        (CountsWhatIsDeleted, "mode"),
        (AnnotatesItsClass, "note"),
        (UnpacksItsClass, "note"),
        (NamesItsClassInATest, "note"),
        (IsExactly, "forward"),
        (IsEqualTo, "forward"),
        (LooksItsClassUp, "forward"),
        (ReadsItsOwnAttributes, "forward"),
        (FindsThoseOfItsClass, "forward"),
    ],
)
def test_classes_that_depend_on_the_class_of_self(kind: type[Calls], method: str) -> None:
    """In a subclass these would find themselves again, or leave values where none looks."""
    model = kind()
    (skipped,) = check_left(model, image())
    why = f"belongs to a class whose {method}() depends on the class of self"
    assert skipped.reason == f"{kind.__name__}.forward {why}"
    model.eval()


class AsksItsClass(ActivatedNorm):
    """In ways in which a subclass answers alike."""

    scale = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.is_itself = type(self) is AsksItsClass

    @classmethod
    def rescale(cls, scale: float) -> None:  # which no method calls
        cls.scale = scale

    @classmethod
    def made_of(cls) -> list[type]:
        return [cls]

    def extra_repr(self) -> str:
        kind = type(self)
        name = f"{kind} {kind.__name__} {hasattr(type(self), 'scale')} {len(self.made_of())}"
        return f"{name} {issubclass(self.__class__, nn.Module)} {super().extra_repr()}"

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError
        return self.act(self.norm(x)) * self.__class__.scale * getattr(type(self), "scale", 0)


def test_classes_that_ask_what_a_subclass_answers_alike() -> None:
    model = AsksItsClass()
    text = repr(model)
    check_fused(model, image(), pairs=1, calls_made=1)
    assert repr(model) == text


class Doubled(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_subclass() -> None:
    (skipped,) = check_left(nn.Sequential(Doubled(4, 8), nn.ReLU()), image())
    assert skipped == SkippedNorm("0", "Doubled is a GroupNorm with a forward of its own")


class CalledTwice(nn.GroupNorm):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(super().__call__(x))


def test_patches_of_pytorchs_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what is fused already."""
    model, X = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()), image()
    check_left(nn.Sequential(CalledTwice(4, 8), nn.SiLU()), X)
    gn_override.fuse(model)
    for kind in (nn.GroupNorm, nn.SiLU):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x: x + 1)
            assert takes(model) == 0
            assert gn_override.fuse(nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())).fused == ()
    assert takes(model) == 1


def test_patched_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is patched on a class counts from the next fuse() on."""

    class Patched(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x))

    def forward(self: Calls, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) + 100

    model, X = Patched(), image()
    gn_override.fuse(model)
    expected = model(X) + 100
    monkeypatch.setattr(Patched, "forward", forward)
    for patched in (model, Patched()):
        assert len(gn_override.fuse(patched).fused) == 1
        torch.testing.assert_close(patched(X), expected)
    assert takes(model) == 1


def test_forward_that_is_patched_to_one_without_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patched(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x))

    model, X = Patched(), image()
    gn_override.fuse(model)
    monkeypatch.setattr(Patched, "forward", lambda self, x: x + 100)
    assert gn_override.fuse(model).fused == ()
    assert torch.equal(model(X), X + 100)


def test_classes_go_with_their_modules() -> None:
    class Local(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x))

    model = Local()
    assert len(gn_override.fuse(model).fused) == 1
    kind = weakref.ref(Local)
    del Local, model
    _forward.read.cache_clear()  # which holds the last of them
    for _ in range(2):  # the fused class, then its base
        gc.collect()
    assert kind() is None


class Registered(Calls):
    """Known by name, as a library's classes may be."""

    by_name: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls) -> None:
        assert Registered.by_name.setdefault(cls.__name__, cls) is cls


class Known(Registered):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


def test_registered_subclass() -> None:
    model = Known()
    assert len(gn_override.fuse(model).fused) == 1
    assert type(model) is not Registered.by_name["Known"] is Known
    assert type(model).__name__ == "Known"


class NoSubclass(Calls):
    def __init_subclass__(cls) -> None:
        raise TypeError("no")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class Raises(Calls):
    @property
    def unready(self) -> nn.Module:
        raise RuntimeError("not yet")

    def forward(self, x: Tensor, now: bool = False) -> Tensor:
        if now:
            return self.unready(x)
        return self.act(self.norm(x))


def test_classes_that_refuse() -> None:
    (skipped,) = check_left(NoSubclass(), image())
    assert skipped.reason == "NoSubclass.forward belongs to a class that allows no subclass"
    check_fused(Raises(), image(), pairs=1, calls_made=1)


class NormedConv(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(8, 8, 1)
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias)
        return self.act(self.norm(x))


def test_parametrizations() -> None:
    """They come and go with a class on top of the module's."""
    model, X = NormedConv(), image()
    gn_override.fuse(model)
    nn.utils.parametrizations.weight_norm(model)
    kind, expected = type(model), model(X)
    assert gn_override.fuse(model) == gn_override.Fusion(fused=(), skipped=())
    assert type(model) is kind and torch.equal(model(X), expected) and takes(model) == 1
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    torch.testing.assert_close(model(X), expected)
    nn.utils.parametrizations.weight_norm(first := NormedConv())
    (skipped,) = check_left(first, X)
    assert skipped.reason == (
        "ParametrizedNormedConv.forward belongs to a module with parametrizations"
    )


def test_a_class_of_ones_own_on_top() -> None:
    model, X = NormedConv(), image()
    gn_override.fuse(model)

    class Mine(type(model)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x)) + 100

    model.__class__ = Mine
    expected = model(X)
    again = copy.deepcopy(model)
    assert type(again) is Mine and torch.equal(again(X), expected)
    assert len(gn_override.fuse(model).fused) == 1
    torch.testing.assert_close(model(X), expected)
    assert isinstance(model, Mine) and takes(model) == 1


def test_an_empty_class_on_top_is_copied() -> None:
    model, X = NormedConv(), image()
    gn_override.fuse(model)

    class Mine(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Mine
    again = copy.deepcopy(model)
    assert type(again) is Mine and torch.equal(again(X), model(X)) and takes(again) == 1


class Singleton(ActivatedNorm):
    def __reduce__(self) -> str:
        return "SINGLETON"


SINGLETON = Singleton()


def test_copies_of_what_is_no_copy() -> None:
    class Exports(ActivatedNorm):
        def __reduce__(self) -> Any:
            return nn.Identity, ()

    exports = Exports()
    for model in (SINGLETON, exports):
        assert len(gn_override.fuse(model).fused) == 1
    assert copy.deepcopy(SINGLETON) is SINGLETON
    assert type(copy.deepcopy(exports)) is nn.Identity


def test_fused_stays_fused() -> None:
    """Also where a hook stands in the way for the time of another fuse()."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 8), nn.ReLU()
            self.other, self.last = nn.GroupNorm(2, 8), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.other(self.act(self.norm(x))))

    model = Net()
    assert len(gn_override.fuse(model).fused) == 1
    handle = model.norm.register_forward_hook(lambda *_: None)
    assert "hooks on GroupNorm" in str(gn_override.fuse(model))
    model.last = nn.ReLU()  # type: ignore[assignment]
    assert len(gn_override.fuse(model).fused) == 1
    handle.remove()
    assert takes(model) == 2


def tripled(function: Any) -> Any:
    """A patch that passes for what it replaces."""

    @functools.wraps(function)
    def patch(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 3

    return patch


PATCHES = {
    "F.group_norm": (F, "group_norm"),
    "torch.group_norm": (torch, "group_norm"),
    "F.silu": (F, "silu"),
    "GroupNorm": (nn.GroupNorm, "forward"),
    "Identity": (nn.Identity, "forward"),
    "SiLU": (nn.SiLU, "forward"),
    "call": (nn.Module, "__call__"),
    "call_impl": (nn.Module, "_call_impl"),
}


@pytest.mark.parametrize("place", PATCHES.values(), ids=PATCHES)
def test_patches_of_pytorch(place: tuple[Any, str]) -> None:
    """Are honoured, whether they are there before fuse() or come after it, and when they go."""
    model, X = nn.Sequential(nn.GroupNorm(4, 8), nn.Identity(), nn.SiLU()), image()
    plain = model(X)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, tripled(getattr(*place)))
        patched = model(X)
        assert not torch.allclose(patched, plain)
        check_left(model, X)
    check_fused(model, X, pairs=1, calls_made=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, tripled(getattr(*place)))
        assert takes(model) == 0
        assert torch.equal(model(X), patched)
    assert takes(model) == 1


def test_patched_function() -> None:
    model, X = nn.Sequential(nn.GroupNorm(4, 8), nn.GELU()), image()
    gn_override.fuse(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "gelu", lambda x, **_: x + 7)
        assert takes(model) == 0
        assert torch.equal(model(X), model[0](X) + 7)


class CallsFunctions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 4))


class CallsFunctionsByName(CallsFunctions):
    def forward(self, x: Tensor) -> Tensor:
        groups = 4
        return F.silu(F.group_norm(x, locals()["groups"]))


def test_calls_of_functions_that_are_left_say_why() -> None:
    model = nn.Sequential(CallsFunctions(), CallsFunctionsByName(), nn.Tanh())
    by_name = SkippedNorm("1", "CallsFunctionsByName.forward asks for its variables by name")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "group_norm", tripled(torch.group_norm))
        replaced = SkippedNorm("0", "functions of PyTorch are replaced")
        assert gn_override.fuse(model) == Fusion(fused=(), skipped=(replaced, by_name))
    fused_call = FusedPair("0", "F.silu", "silu")
    assert gn_override.fuse(model) == Fusion(fused=(fused_call,), skipped=(by_name,))


@pytest.mark.parametrize(
    "patch",
    [
        "nn.ReLU = nn.LeakyReLU",
        "F.relu = F.leaky_relu",
        "F.relu = lambda x, inplace=False: x * 3",
        "nn.GroupNorm = functools.partial(nn.GroupNorm, eps=0.5)",
        "nn.ReLU.forward = nn.Hardswish.forward",
        "nn.modules.activation.ReLU = nn.ReLU = nn.LeakyReLU",
    ],
)
def test_patches_before_the_import(patch: str, tmp_path: Path) -> None:
    """The usual ways to change a network that somebody else wrote."""
    script = f"""
        import functools
        import torch, torch.nn as nn, torch.nn.functional as F
        {patch}
        import gn_override
        from gn_override import _activations
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.act = nn.GroupNorm(4, 8), nn.ReLU()
            def forward(self, x):
                return self.act(self.norm(x))
        class Functions(Net):
            def forward(self, x):
                return F.relu(F.group_norm(x, 4))
        X = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
        for model in (Net(), Functions()):
            expected = model(X)
            gn_override.fuse(model)
            torch.testing.assert_close(model(X), expected)
        for function in (F.relu, F.leaky_relu):
            kind = _activations.of_call(function)
            assert kind is None or torch.equal(function(X), torch.relu(X)), kind
    """
    file = tmp_path / "script.py"  # so that the classes in it have sources
    file.write_text(textwrap.dedent(script))
    run_python(file, cwd=tmp_path)


def test_tracing_with_fx() -> None:
    """It patches the calls of modules, and sees those of a fused model too."""
    model = nn.Sequential(nn.GroupNorm(4, 8, affine=False), nn.SiLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = model
            self.register_buffer("constant", image())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.act(self.norm(self.constant))

    net = Net()
    assert len(gn_override.fuse(net).fused) == 1
    targets = [node.target for node in torch.fx.symbolic_trace(net).graph.nodes]
    assert {"constant", "norm", "act"} <= set(targets), targets


class Lazy:
    """As the packages that are imported on use."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("is not installed")


lazy = Lazy()


class WithOptionalPackage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()
        self.fast = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fast:
            x = lazy.operators.fast(x)
        return self.act(self.norm(x))


class Frozen(nn.Sequential):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only")


def test_names_that_raise() -> None:
    check_fused(WithOptionalPackage(), image(), pairs=1, calls_made=1)


def test_modules_that_refuse_attributes() -> None:
    model = Frozen.__new__(Frozen)
    vars(model).update(vars(nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())))
    check_fused(model, image(), pairs=1, calls_made=1)
    copied = copy.deepcopy(model)
    assert takes(copied) == 1


class TwoPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.act(h)
        h = self.second(h)
        h = self.act(h)
        return h


def test_a_class_on_top_of_a_part() -> None:
    """What is fused below stays so, and is not said to be skipped."""
    model = TwoPairs()
    handle = model.second.register_forward_hook(lambda *_: None)
    assert len(gn_override.fuse(model).fused) == 1
    handle.remove()
    model.__class__ = type("Top", (type(model),), {})
    (skipped,) = gn_override.fuse(model).skipped
    assert skipped == SkippedNorm(
        "second", "Top.forward is fused in part, and another class is on top of it"
    )
    assert takes(model) == 1


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parametrized_norm(name: str) -> None:
    """Where a call computes a parameter, that happens once, before fuse() and after it."""
    looks = []

    class Positive(nn.Module):
        def forward(self, parameter: Tensor) -> Tensor:
            looks.append(parameter)
            return parameter.exp()

    norm = randomised(nn.GroupNorm(4, 8))
    nn.utils.parametrize.register_parametrization(norm, name, Positive())
    model = nn.Sequential(norm, nn.ReLU())
    (skipped,) = check_left(model, image())
    assert skipped.reason.startswith("parametrizations compute its weight or bias")
    nn.utils.parametrize.remove_parametrizations(norm, name)
    check_fused(model, image(), pairs=1, calls_made=1)
    nn.utils.parametrize.register_parametrization(norm, name, Positive())
    for X in (image(), image().contiguous()):
        looks.clear()
        model(X)
        assert len(looks) == 1


HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["norm", "between", "activation"])
def test_hooks(hook: str, which: int) -> None:
    """Hooks run, whether they are there before fuse() or come after it."""
    seen = []

    def note(module: nn.Module, *args: Any) -> None:
        seen.append(module)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.GroupNorm(4, 8), nn.Identity(), nn.SiLU())

    model = build()
    handle = getattr(model[which], f"register_{hook}")(note)
    (skipped,) = check_left(model, image())
    assert skipped.reason == f"hooks on {type(model[which]).__name__}"
    handle.remove()
    check_fused(model, image(), pairs=1, calls_made=1)
    getattr(model[which], f"register_{hook}")(note)
    seen.clear()
    torch.ops.gn_override.reset_counters()
    gradients(model, image())
    assert seen == [model[which]]
    assert calls(FORWARD, "cpu") == (0, 0)


def test_global_hooks() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module))
    )
    try:
        (skipped,) = check_left(model, image())
        assert nn.GroupNorm in seen
    finally:
        handle.remove()
    assert skipped.reason == "there are global hooks of modules"


# --- what a fused model is --------------------------------------------------------------------


def fused() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), Branches(), nn.GroupNorm(4, 8), nn.ReLU())
    randomised(model)
    gn_override.fuse(model)
    return model


def takes(model: nn.Module) -> int:
    """How many calls of fused kernels a forward makes."""
    torch.ops.gn_override.reset_counters()
    model(image())
    return calls(FORWARD, "cpu")[0]


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_copies(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, X = fused(), image()
    again = copied(model)
    assert type(again) is type(model) and type(again[1]) is type(model[1])
    assert torch.equal(again(X), model(X))
    assert takes(again) == takes(model) == 4


class Reduced(Calls):
    """Pickled in a way of its own, by its class."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))

    def __reduce__(self) -> Any:
        return type(self), (), vars(self)


class WithArguments(Calls):
    def __new__(cls, *names: str) -> WithArguments:
        return super().__new__(cls)

    def __init__(self, *names: str) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[str]:
        return ("name",)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


@pytest.mark.parametrize("kind", [Reduced, WithArguments])
def test_classes_with_a_pickle_of_their_own(kind: type[Calls]) -> None:
    model, X = randomised(kind()), image()
    gn_override.fuse(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is type(model) is not kind
        assert torch.equal(again(X), model(X))
        assert takes(again) == 1


class Counts(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(x.size(0))
        return self.act(self.norm(x))


Counts.__annotations__ = {"sizes": list[int]}  # no string, which torch.jit.script does not take


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_class_keeps_its_names() -> None:
    """By which pipelines save what they hold, and its annotations, by which it is scripted."""
    model, X = Counts(), image()
    gn_override.fuse(model)
    assert type(model) is not Counts
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), attribute) == getattr(Counts, attribute), attribute
    torch.testing.assert_close(torch.jit.script(model)(X), model(X))


def test_again() -> None:
    model = fused()
    kinds = [type(module) for module in model.modules()]
    fusion = gn_override.fuse(model)
    assert fusion == gn_override.Fusion(fused=(), skipped=())
    assert str(fusion) == "fused: 0\nskipped: 0"
    assert kinds == [type(module) for module in model.modules()]
    model.append(nn.GroupNorm(4, 8)).append(nn.GELU())
    assert gn_override.fuse(model).fused == (FusedPair("4", "5", "gelu"),)


def test_exchanged_modules() -> None:
    """What is put in later is what runs."""
    model, X = fused(), image()
    model[3] = nn.Tanh()
    model[1].norm1 = nn.BatchNorm2d(8)
    assert takes(model) == 2
    h = model[2](model[1](model[0](X)))
    torch.testing.assert_close(model(X), torch.tanh(h))


class InPlace(Calls):
    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.norm(x), inplace=True)
        return torch.relu_(self.norm(h)) + F.group_norm(h, 4).relu_() + h


def test_what_is_not_fused_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place where the source says so, and by what the source names by then."""
    model, X = InPlace(), image()
    stock = copy.deepcopy(model)
    assert len(gn_override.fuse(model).fused) == 3
    assert takes(model) == 3
    torch.testing.assert_close(model(X), stock(X))
    for replaced in (nn.Identity(), nn.GroupNorm(4, 8)):
        for either in (model, stock):
            either.norm = replaced
        x, y = X.clone(), X.clone()
        assert torch.equal(model(x.contiguous()), stock(y.contiguous()))
        torch.testing.assert_close(model(x), stock(y))
        assert torch.equal(x, y)
    monkeypatch.setitem(globals(), "relu", F.leaky_relu)
    assert takes(model) == 2
    torch.testing.assert_close(model(X), stock(X))
    for name in ("group_norm", "relu", "silu"):
        with monkeypatch.context() as patch:
            patch.setattr(F, name, lambda x, *_, **__: x + 7)
            assert takes(model) == 0
            assert torch.equal(model(X), stock(X))


def test_forwards_that_are_replaced_after_compiling() -> None:
    """As offloading hooks do: torch.compile sees it."""
    model, X = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU()), image()
    gn_override.fuse(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for module in model:
        assert torch.equal(compiled(X), model(X))
        module.forward = lambda x: x * 3
        assert torch.equal(compiled(X), model(X))
        del module.forward
    assert torch.equal(compiled(X), model(X))
    assert takes(model) == 1


def test_switch() -> None:
    """Off, a fused model gives what it gave before, bit for bit."""
    model, X = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()).bfloat16(), image().bfloat16()
    with gn_override.disabled():
        expected = gradients(model, X)
    gn_override.fuse(model)
    with gn_override.disabled():
        assert all(map(torch.equal, gradients(model, X), expected))
    assert calls(FORWARD, "cpu") == (0, 0)
    assert not torch.equal(model(X), expected[0])  # it is rounded once


def test_train_and_eval() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.Dropout(0.5))
    gn_override.fuse(model)
    X = image()
    assert torch.equal(model.eval()(X), F.relu(F.group_norm(X, 4)))
    assert (model.train()(X) == 0).float().mean() > 0.6


class Modes(Calls):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.act(self.norm(x))
        else:
            return self.act(self.norm(x + 1))


@pytest.mark.parametrize("training", [True, False])
def test_both_modes_are_fused(training: bool) -> None:
    """Whichever the model is in while it is fused."""
    model, X = Modes().train(training), image()
    expected = [model.train(mode)(X) for mode in (True, False)]
    gn_override.fuse(model.train(training))
    for mode, result in zip((True, False), expected, strict=True):
        torch.testing.assert_close(model.train(mode)(X), result)
        assert takes(model) == 1


COMPUTED: list[str] = []


def computed(name: str) -> int:
    COMPUTED.append(name)
    return len(COMPUTED)


class Defaults(Calls):
    def forward(self, x: Tensor, a: int = computed("a"), *, b: int = computed("b")) -> Tensor:
        return self.act(self.norm(x)) + a + b


def test_defaults_are_not_computed_again() -> None:
    """They are the values that the forward was defined with."""
    check_fused(Defaults(), image(), pairs=1, calls_made=1)
    assert COMPUTED == ["a", "b"]


def test_compiled() -> None:
    model, X = fused(), image()
    graph = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):  # Branches decides by a value
        graph(X)
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), NormAct())
    gn_override.fuse(model)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), model(X))


# --- models of other packages -----------------------------------------------------------------


def resnet_block(**options: Any) -> nn.Module:
    resnet = pytest.importorskip("diffusers.models.resnet")
    block: nn.Module = resnet.ResnetBlock2D(
        in_channels=32, groups=8, **{"temb_channels": 16, **options}
    )
    return randomised(block).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "options, pairs",
    [
        ({}, 2),
        ({"temb_channels": None}, 2),
        ({"time_embedding_norm": "scale_shift"}, 1),
        ({"skip_time_act": True}, 2),
        ({"up": True}, 2),
        ({"down": True}, 2),
        ({"non_linearity": "gelu", "out_channels": 64}, 2),
        ({"non_linearity": "mish"}, 0),
    ],
    ids=str,
)
def test_diffusers_block(options: dict[str, Any], pairs: int) -> None:
    block = resnet_block(**options)
    X = image(C=32)
    shift = () if block.time_emb_proj is None else (torch.randn(2, 16),)
    call = Embedded(block) if not shift else block
    if pairs:
        check_fused(call, X, *shift, pairs=pairs, calls_made=pairs)
    else:
        check_left(call, X, *shift)


class Embedded(nn.Module):
    """A block without a time embedding."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, None)


def test_diffusers_unet() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    model = randomised(model).to(memory_format=torch.channels_last).eval()
    X = lay_out(torch.randn(2, 4, 16, 16), "channels_last")
    inputs = (X, torch.tensor(7), torch.randn(2, 5, 16))
    with torch.no_grad():
        expected = model(*inputs).sample
        fusion = gn_override.fuse(model)
        blocks = sum(type(m).__mro__[2].__name__ == "ResnetBlock2D" for m in model.modules())
        assert len(fusion.fused) >= 2 * blocks > 0, str(fusion)
        torch.ops.gn_override.reset_counters()
        actual = model(*inputs).sample
    assert calls(FORWARD, "cpu") == (len(fusion.fused), 0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_diffusers_vae() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    model = randomised(model).to(memory_format=torch.channels_last).eval()
    X = lay_out(torch.randn(1, 4, 8, 8), "channels_last")
    with torch.no_grad():
        expected = model.decode(X).sample
        fusion = gn_override.fuse(model)
        # Left are the norms of the attention in the middle, which no activation follows.
        assert all("attentions" in norm.norm for norm in fusion.skipped), str(fusion)
        pairs = sum(pair.norm.startswith("decoder.") for pair in fusion.fused)
        torch.ops.gn_override.reset_counters()
        actual = model.decode(X).sample
    assert calls(FORWARD, "cpu") == (pairs, 0) and pairs > 0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["GroupNormAct", "GroupNorm1Act"])
def test_timm_norm(name: str) -> None:
    layers = pytest.importorskip("timm.layers")
    norm = getattr(layers, name)(64)
    fusion = check_fused(nn.Sequential(norm), image(C=64), pairs=1, calls_made=1)
    assert fusion.fused == (FusedPair("0", "0.act", "relu"),)
    check_left(nn.Sequential(getattr(layers, name)(64, apply_act=False)), image(C=64))


def test_timm_resnet() -> None:
    """Every norm but the last one of a block and of its shortcut has its activation."""
    timm = pytest.importorskip("timm")
    model = randomised(timm.create_model("resnet50_gn", num_classes=3)).eval()
    model = model.to(memory_format=torch.channels_last)
    X = lay_out(torch.randn(2, 3, 64, 64), "channels_last")
    with torch.no_grad():
        expected = model(X)
        fusion = gn_override.fuse(model)
        assert len(fusion.fused) == 1 + 2 * 16, str(fusion)
        torch.ops.gn_override.reset_counters()
        actual = model(X)
    assert calls(FORWARD, "cpu") == (33, 0)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
