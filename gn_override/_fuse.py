"""fuse(): in a given model, a group norm and the activation that follows it become one kernel.

The modules stay as they are; what changes is who calls them. A module whose forward calls a norm
and then, on its result, an activation gets a subclass of its class, in whose forward run() does
both. run() looks at what it is given at each call, and fuses what may be fused then: hooks and
modules that are exchanged later are honoured.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import normalization
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import is_parametrized

from gn_override import _activations, _calls, _forward, _source
from gn_override.nn import GroupNorm

_Class = Any  # type[nn.Module], which mypy takes for unhashable

# A part of a method: its name, and the part.
_Part = tuple[str, _forward.Part]

_OUR_FORWARD = GroupNorm.forward

_NOTHING_SEEN = "no activation that can be fused is seen to follow it"


@dataclass(frozen=True)
class FusedPair:
    """A norm and the activation that follows it."""

    norm: str  # qualified name of the module; of the caller, where that calls F.group_norm
    activation: str  # qualified name of the module, or the function as it is written
    kind: str  # "relu", "silu", "gelu" or "gelu_tanh"


@dataclass(frozen=True)
class SkippedNorm:
    """A norm that is not fused."""

    norm: str  # qualified name of the module; of the caller, where that calls F.group_norm
    reason: str


@dataclass(frozen=True)
class Fusion:
    """What fuse() did. ``str()`` of it is meant for people."""

    fused: tuple[FusedPair, ...]
    skipped: tuple[SkippedNorm, ...]

    def __str__(self) -> str:
        lines = [f"fused: {len(self.fused)}"]
        lines += [
            f"  {pair.norm or 'the model itself'} + {pair.activation} ({pair.kind})"
            for pair in self.fused
        ]
        lines.append(f"skipped: {len(self.skipped)}")
        lines += [f"  {norm.norm or 'the model itself'}: {norm.reason}" for norm in self.skipped]
        return "\n".join(lines)


def fuse(model: nn.Module) -> Fusion:
    """Fuse group norms with the activations that follow them, in place.

    A pair is fused where the source of the forward that calls both, or of a method of its class
    that it uses, shows that nothing but the activation can see the norm's result. Norms are
    nn.GroupNorm and F.group_norm, activations nn.ReLU, nn.SiLU, nn.GELU and their functions and
    methods; nn.Identity may stand between. Every other norm is left as it is. Results change by
    rounding only.

    What is added to the input just before (diffusers' time embedding) becomes a part of the kernel
    where it is [N, C, 1, ...] on a CUDA device and no gradient is wanted.

    Modules, parameters and the keys of ``state_dict`` stay as they are; the class of a module that
    calls a pair becomes a subclass of its own, of the same name. The model can be copied and
    pickled. A method that is patched on a class later counts from the next fuse() on.

    Args:
        model: any module. What is fused already stays so.

    Returns:
        The pairs that this call fused, and the nn.GroupNorm modules that are not fused, with the
        reasons. A norm that is called in several places is fused if it is so in one of them.

    Raises:
        TypeError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fuse() takes a torch.nn.Module, got {type(model).__name__}; "
            "of a pipeline, pass each model (pipe.unet, pipe.vae)"
        )
    names = dict(model.named_modules())
    fused: list[FusedPair] = []
    done: set[nn.Module] = set()
    reasons: dict[nn.Module, str] = {}
    for name, caller in names.items():
        below = any(isinstance(child, normalization.GroupNorm) for child in caller.modules())
        if not below and not _names_group_norm(type(caller)):
            continue
        pairs: list[_Pair] = []
        _undo_stale(caller)
        before = _parts_of(type(caller))
        try:
            pairs = list(_pairs(caller))
            parts = frozenset(pair.part for pair in pairs if not pair.obstacle)
            if not parts <= before:
                _write_again(caller, parts | before)
        except _source.Unreadable as why:
            reason = f"{_unfused(type(caller)).__name__}.forward {why}"
            for norm in (caller, *caller.children()):
                reasons.setdefault(norm, reason)
            pairs = [pair for pair in pairs if pair.part in before]
        for pair in pairs:
            if pair.obstacle:
                reasons[pair.norm] = pair.obstacle
                continue
            done.add(pair.norm)
            if pair.part not in before:
                prefix = f"{name}." if name else ""
                norm = prefix + pair.norm_path if pair.norm_path else name
                activation = prefix + pair.activation if pair.is_module else pair.activation
                fused.append(FusedPair(norm, activation, pair.kind))
    skipped = [
        SkippedNorm(name, reasons.get(norm, _NOTHING_SEEN))
        for name, norm in names.items()
        if norm not in done and _is_norm(norm, norm in reasons)
    ]
    return Fusion(tuple(dict.fromkeys(fused)), tuple(skipped))


def run(x: Tensor, *steps: Callable[[Tensor], Tensor]) -> Tensor:
    """What the steps return one after another, norms fused with the activations that follow them.

    Args:
        x: what the first step takes: [N, C, *spatial] where that is a norm.
        steps: modules and other callables. Those that are not fused are called.
    """
    if torch.compiler.is_compiling():  # which fuses what it records
        for step in steps:
            x = step(x)
        return x
    position = 0
    while position < len(steps):
        step = steps[position]
        first, addend = position, None
        if isinstance(step, _forward.Addition) and step.addend is not None:
            first, addend = position + 1, step.addend
        last, activation = _after(steps, first)
        y = None
        if activation is not None and _obstacle(steps[first : last + 1]) is None:
            norm: Any = steps[first]
            weights = norm.weight, norm.bias
            y = _calls.group_norm_act(x, addend, norm.num_groups, *weights, norm.eps, activation)
        if y is None:
            x = step(x)
            position += 1
        else:
            x = y
            position = last + 1
    return x


@dataclass(frozen=True)
class _Pair:
    """A norm and what follows it, in a method of a module."""

    part: _Part
    norm: nn.Module
    norm_path: str  # from that module; empty for a call of F.group_norm
    activation: str  # path of a module, or a function as it is written
    is_module: bool
    kind: str  # of the activation; empty where another module follows
    obstacle: str | None


def _names_group_norm(kind: _Class) -> bool:
    """Whether the forward of a class may call F.group_norm, without a look at its source."""
    forward = getattr(_unfused(_owner(kind)), "forward", None)
    if not isinstance(forward, FunctionType):
        return False
    return any(
        name == "group_norm" or forward.__globals__.get(name) is F.group_norm
        for name in forward.__code__.co_names
    )


def _pairs(caller: nn.Module) -> Iterator[_Pair]:
    """The pairs in a module's forward and in the methods it uses, fused or not, and the norms that
    another module follows. Raises Unreadable."""
    if isinstance(caller, torch.fx.GraphModule):  # which make a class and its source anew
        raise _source.Unreadable("is generated by torch.fx")
    if _is_replaced(caller):
        raise _source.Unreadable("is replaced on the instance")
    for method, number, run in _runs(caller):
        if run.is_left_out(caller):
            continue
        steps = [_resolve(caller, step) for step in run.steps]
        for first, norm in enumerate(steps):
            last, kind = _after(steps, first)
            is_module = isinstance(steps[last], nn.Module)
            if kind is not None:
                obstacle = _obstacle(steps[first : last + 1])
            elif last > first and is_module and isinstance(norm, nn.Module):
                name = type(steps[last]).__name__
                obstacle = f"{name} follows it, which is no activation that can be fused"
            else:
                continue
            added = first > 0 and isinstance(steps[first - 1], _forward.Addition)
            yield _Pair(
                part=(method, (number, first - added, last)),
                norm=norm if isinstance(norm, nn.Module) else caller,
                norm_path=run.steps[first].path,
                activation=run.steps[last].path if is_module else run.steps[last].source,
                is_module=is_module,
                kind=kind or "",
                obstacle=obstacle,
            )


def _runs(caller: nn.Module) -> Iterator[tuple[str, int, _forward.Run]]:
    """The runs in a module's forward and in the methods that it uses, of the same class: the name
    of the method, the run's number, and the run. Raises Unreadable for the forward."""
    kind = type(caller)
    forward = _written(kind, "forward")
    if forward is nn.Sequential.forward:
        children = (_forward.Step(name, path=name) for name in caller._modules)
        yield "forward", 0, _forward.Run(tuple(children), branches=())
        return
    read = {"forward": _forward.read(forward)}
    defined = vars(_owner(_unfused(_owner(kind))))
    names = [*read["forward"].attributes]
    for name in names:  # which grows
        method = defined.get(name)
        if not isinstance(method, FunctionType) or name in read or name in vars(caller):
            continue
        if _written(kind, name) is not method:
            continue
        try:
            read[name] = _forward.read(method)
        except _source.Unreadable:
            continue
        names += read[name].attributes
    for name, source in read.items():
        for number, run in enumerate(source.runs):
            yield name, number, run


def _resolve(caller: nn.Module, step: _forward.Step) -> Any:
    """A step as run() gets it; None if there is no such module."""
    if step.call:
        return step.call
    if step.source == "+":
        return _forward.Addition()
    if not step.path:
        return _forward.GroupNormCall(F.group_norm, num_groups=1)
    value: Any = caller
    try:
        for name in step.path.split("."):
            value = getattr(value, name)
    except Exception:  # whatever a property raises
        return None
    return value


def _after(steps: Sequence[object], first: int) -> tuple[int, str | None]:
    """Where the step is that follows the norm `first`, and the activation that it computes, if any.

    Where no norm is there, or nothing follows it, that is `first` itself.
    """
    norms = normalization.GroupNorm, _forward.GroupNormCall
    if first < len(steps) and isinstance(steps[first], norms):
        for last in range(first + 1, len(steps)):
            step = steps[last]
            if not _activations.is_identity(step):
                return last, _activation(step)
    return first, None


def _activation(step: object) -> str | None:
    """The name of what a step computes, if that is an activation."""
    if isinstance(step, _forward.ActivationCall):
        return step.activation()
    if isinstance(step, nn.Module):
        return _activations.of_module(step)
    return _activations.of_call(step) if callable(step) else None


def _obstacle(steps: Sequence[object]) -> str | None:
    """Why a norm, the activation after it, and what is between them must be called one by one."""
    norm = steps[0]
    if isinstance(norm, nn.Module):
        if not _computes_group_norm(norm):
            return f"{type(norm).__name__} is a GroupNorm with a forward of its own"
        if hasattr(type(norm), "weight") or hasattr(type(norm), "bias"):
            return "parametrizations compute its weight or bias, each time that one looks"
    elif isinstance(norm, _forward.GroupNormCall) and norm.function is not F.group_norm:
        return "what the source calls is not F.group_norm any more"
    if not _activations.are_functions_unpatched():
        return "functions of PyTorch are replaced"
    if _has_any_global_hook():
        return "there are global hooks of modules"
    for module in steps:
        if isinstance(module, nn.Module):
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                return f"hooks on {type(module).__name__}"
            if _is_replaced(module):
                return f"forward of {type(module).__name__} is replaced on the instance"
    return None


def _is_replaced(module: nn.Module) -> bool:
    """Whether a module has a forward of its own: not that of its class, which some hooks leave."""
    if "forward" not in vars(module):
        return False
    forward = vars(module)["forward"]
    own = getattr(forward, "__self__", None) is module
    return not own or getattr(forward, "__func__", None) is not type(module).forward


def _computes_group_norm(norm: nn.Module) -> bool:
    """Whether a module is nn.GroupNorm, or computes the same."""
    kind = type(norm)
    if _activations.is_pytorchs(kind, normalization.GroupNorm):
        return True
    if isinstance(norm, GroupNorm) and norm.activation == "identity":
        return kind.forward is _OUR_FORWARD and _activations.is_call_unpatched(kind)
    if kind.__module__ == "timm.layers.norm" and kind.__name__ in ("GroupNorm", "GroupNorm1"):
        written_in = getattr(kind.forward, "__globals__", {}).get("__name__")
        return (
            written_in == kind.__module__
            and _activations.is_call_unpatched(kind)
            and not getattr(norm, "_fast_norm", True)  # the other kind has rules of its own
        )
    return False


def _is_norm(module: nn.Module, has_reason: bool) -> bool:
    """Whether a module is to be reported where it is not fused: a norm without an activation of its
    own, or a caller of F.group_norm that something keeps from being fused."""
    if isinstance(module, normalization.GroupNorm):
        return not isinstance(module, GroupNorm) or module.activation == "identity"
    return has_reason and _names_group_norm(type(module))


class _Fused:
    """Mixed into the classes that fuse() makes, which are found again by what they come from.

    Each has _fused_from: that class; _fused_source: its forward and the other methods with parts,
    by name, as they were then; _fused_parts: the parts. No annotation says so here, as
    torch.jit.script would take it for the module's own.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = type(self)
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        if not _is_made_by_us(made) or not isinstance(reduced, tuple):
            return reduced
        kind, parts = _unfused(made), vars(made)["_fused_parts"]
        make, arguments, *rest = reduced
        make, *arguments = (kind if value is made else value for value in (make, *arguments))
        return _restore, (kind, parts, make, *arguments), *rest


def _restore(
    kind: _Class, parts: frozenset[_Part], make: Callable[..., Any], *arguments: Any
) -> Any:
    """What `make` makes of a pickled module, fused as that was."""
    module = make(*arguments)
    if module.__class__ is kind:
        try:
            _become_fused(module, kind, parts)
        except _source.Unreadable:
            pass  # the source is elsewhere
    return module


def _write_again(caller: nn.Module, parts: frozenset[_Part]) -> None:
    """Gives a module the class in whose methods run() gets these parts. Raises Unreadable."""
    if is_parametrized(caller):  # to be undone, it must be the last subclass
        raise _source.Unreadable("belongs to a module with parametrizations")
    if _is_made_by_us(_owner(type(caller))) and not _is_made_by_us(type(caller)):
        raise _source.Unreadable("is fused in part, and another class is on top of it")
    _become_fused(caller, _unfused(type(caller)), parts)


def _become_fused(module: nn.Module, kind: _Class, parts: frozenset[_Part]) -> None:
    """Gives a module of class `kind` the fused one. Raises Unreadable."""
    _set_class(module, _fused_class(kind, parts))


def _set_class(module: nn.Module, kind: _Class) -> None:
    if not _is_replaced(module):
        vars(module).pop("forward", None)  # that of the class it leaves
    object.__setattr__(module, "__class__", kind)  # whatever attributes the module takes


def _undo_stale(module: nn.Module) -> None:
    """Gives a module its own class back where that has other methods than were fused."""
    kind = type(module)
    if _is_made_by_us(kind) and not _is_current(kind):
        _set_class(module, _unfused(kind))


def _owner(kind: _Class, method: str = "forward") -> _Class:
    """The class that a class has a method from: others may have put theirs on top of ours."""
    return next((base for base in kind.__mro__ if method in vars(base)), kind)


def _unfused(kind: _Class) -> _Class:
    """What fuse() made a class from, or the class."""
    return vars(kind).get("_fused_from", kind)


def _written(kind: _Class, method: str) -> Any:
    """A method of a class as it was before fuse()."""
    return getattr(_unfused(_owner(kind, method)), method, None)


def _parts_of(kind: _Class) -> frozenset[_Part]:
    """What is fused in the methods of a class, as the class it was made from has them now."""
    owner = _owner(kind)
    current = _is_made_by_us(owner) and _is_current(owner)
    return owner._fused_parts if current else frozenset()


def _is_made_by_us(kind: _Class) -> bool:
    return "_fused_from" in vars(kind)


def _is_current(made: _Class) -> bool:
    """Whether the class that a fused one was made from still has the methods it had then."""
    now = made._fused_from
    return all(getattr(now, name, None) is method for name, method in made._fused_source.items())


# By what they are made from; they go with the last module that is one.
_made: weakref.WeakValueDictionary[Any, _Class] = weakref.WeakValueDictionary()


def _fused_class(kind: _Class, parts: frozenset[_Part]) -> _Class:
    """The subclass in whose methods, made from those of `kind`, run() gets these parts. Raises
    Unreadable."""
    names = sorted({"forward", *(name for name, _ in parts)})
    source = {name: getattr(kind, name, None) for name in names}
    key = kind, parts, *source.values()
    made = _made.get(key)
    if made is None:
        made = _made[key] = _make_fused_class(kind, parts, source)
    return made


def _make_fused_class(kind: _Class, parts: frozenset[_Part], source: dict[str, Any]) -> _Class:
    for method, is_class_method in _methods(kind):
        if _source.depends_on_class(method, is_class_method):
            raise _source.Unreadable(
                f"belongs to a class whose {method.__name__}() depends on the class of self"
            )
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_fused_from": kind,
        "_fused_source": source,
        "_fused_parts": parts,
    }
    for name, method in source.items():
        body[name] = _run_all
        if method is not nn.Sequential.forward:
            inside = [part for where, part in parts if where == name]
            body[name] = _forward.read(method).joined(inside, run)
    bases = (kind,) if issubclass(kind, _Fused) else (_Fused, kind)
    try:
        # Under a name of its own where the class has a register of subclasses.
        made = type(kind)(f"Fused{kind.__name__}", bases, body)
        made.__name__ = kind.__name__  # by which pipelines are saved
        return made
    except Exception:  # whatever __init_subclass__ or a metaclass raises
        raise _source.Unreadable("belongs to a class that allows no subclass") from None


def _methods(kind: _Class) -> Iterator[tuple[FunctionType, bool]]:
    """The methods of a class, and of its bases that are not PyTorch's, that its objects may still
    run, and whether they are class methods: of these the ones that a method names."""
    methods: list[FunctionType] = []
    class_methods: list[tuple[str, FunctionType]] = []
    for base in kind.__mro__:
        if base is _Fused or base.__module__.split(".")[0] == "torch":
            continue
        for name, value in vars(base).items():
            for function in _functions(value):
                if name in _MAKERS or not isinstance(function, (FunctionType, _Cached)):
                    continue
                unwrapped: Any = inspect.unwrap(function)
                if not isinstance(unwrapped, FunctionType):
                    continue
                if isinstance(value, classmethod):
                    class_methods.append((name, unwrapped))
                else:
                    methods.append(unwrapped)
    named = {name for method in methods for name in _source.names(method.__code__)}
    yield from ((method, False) for method in methods)
    yield from ((method, True) for name, method in class_methods if name in named)


# They run when a class or an object is made; of a fused one, _Fused makes copies.
_MAKERS = {"__init__", "__init_subclass__", "__new__", "__reduce__", "__reduce_ex__"}
_Cached = type(functools.cache(len))


def _functions(attribute: Any) -> tuple[Any, ...]:
    """What runs where an attribute of a class is called, read, set or deleted."""
    if isinstance(attribute, property):
        return attribute.fget, attribute.fset, attribute.fdel
    if isinstance(attribute, functools.cached_property):
        return (attribute.func,)
    return (attribute.__func__ if isinstance(attribute, classmethod) else attribute,)


@functools.wraps(nn.Sequential.forward)
def _run_all(self: nn.Sequential, input: Tensor) -> Tensor:
    return run(input, *self)
