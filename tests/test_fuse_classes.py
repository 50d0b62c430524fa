"""fuse(): classes, patches and hooks that make it leave a module, or that it keeps."""

from __future__ import annotations

import copy
import functools
import gc
import textwrap
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from fusing import (
    FORWARD,
    ActivatedNorm,
    Calls,
    TwoPairs,
    check_fused,
    check_left,
    gradients,
    image,
    takes,
)
from processes import run_python
from reference import calls, randomised
from torch import Tensor, nn

import gn_override
from gn_override import FusedPair, Fusion, SkippedNorm, _forward


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
