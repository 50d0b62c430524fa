"""fuse(): what it takes, and what a fused model is."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import (
    FORWARD,
    NO_ACTIVATION,
    Calls,
    NormAct,
    check_fused,
    check_left,
    gradients,
    image,
    takes,
)
from reference import calls, lay_out, override_off, randomised
from torch import Tensor, nn

import gn_override
from gn_override import FusedPair, Fusion, SkippedNorm, _calls, _forward

MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
}


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


# --- what a fused model is --------------------------------------------------------------------


def fused() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), Branches(), nn.GroupNorm(4, 8), nn.ReLU())
    randomised(model)
    gn_override.fuse(model)
    return model


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


relu = F.relu


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
