"""fuse(): forwards that it leaves as they are, and why."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import linecache
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from fusing import NO_ACTIVATION, Calls, NormAct, TwoPairs, check_fused, check_left, image, takes
from torch import Tensor, nn

import gn_override
from gn_override import FusedPair, SkippedNorm, _forward, _fuse_class

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]


def followed_by(name: str) -> str:
    return f"{name} follows it, which is no activation that can be fused"


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
    _fuse_class._made.clear()
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
