"""The fused activations by themselves: functional.group_norm and nn.GroupNorm."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fusing import BACKWARD, FORWARD, gradients, image, takes
from reference import calls, floor, is_channels_last, lay_out, override_off, randomised
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import gn_override
from gn_override import _activations, _calls

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


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
