"""The classes that fuse() gives to modules: subclasses of their own, with some methods anew.

They are made from the class and from what is fused in its methods, and go with the last module that
has them. What a class was made from is kept in it, so that it can be undone, pickled and checked.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gn_override import _forward, _fuse_run, _source

Class = Any  # type[nn.Module], which mypy takes for unhashable

# A part of a method: its name, and the part.
Part = tuple[str, _forward.Part]


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
        kind, parts = unfused(made), vars(made)["_fused_parts"]
        make, arguments, *rest = reduced
        make, *arguments = (kind if value is made else value for value in (make, *arguments))
        return _restore, (kind, parts, make, *arguments), *rest


def _restore(kind: Class, parts: frozenset[Part], make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` makes of a pickled module, fused as that was."""
    module = make(*arguments)
    if module.__class__ is kind:
        try:
            _become_fused(module, kind, parts)
        except _source.Unreadable:
            pass  # the source is elsewhere
    return module


def write_again(caller: nn.Module, parts: frozenset[Part]) -> None:
    """Gives a module the class in whose methods run() gets these parts. Raises Unreadable."""
    if is_parametrized(caller):  # to be undone, it must be the last subclass
        raise _source.Unreadable("belongs to a module with parametrizations")
    if _is_made_by_us(defining_class(type(caller))) and not _is_made_by_us(type(caller)):
        raise _source.Unreadable("is fused in part, and another class is on top of it")
    _become_fused(caller, unfused(type(caller)), parts)


def _become_fused(module: nn.Module, kind: Class, parts: frozenset[Part]) -> None:
    """Gives a module of class `kind` the fused one. Raises Unreadable."""
    _set_class(module, _fused_class(kind, parts))


def _set_class(module: nn.Module, kind: Class) -> None:
    if not _fuse_run.is_replaced(module):
        vars(module).pop("forward", None)  # that of the class it leaves
    object.__setattr__(module, "__class__", kind)  # whatever attributes the module takes


def undo_stale(module: nn.Module) -> None:
    """Gives a module its own class back where that has other methods than were fused."""
    kind = type(module)
    if _is_made_by_us(kind) and not _is_current(kind):
        _set_class(module, unfused(kind))


def defining_class(kind: Class, method: str = "forward") -> Class:
    """The class that a class has a method from: others may have put theirs on top of ours."""
    return next((base for base in kind.__mro__ if method in vars(base)), kind)


def unfused(kind: Class) -> Class:
    """What fuse() made a class from, or the class."""
    return vars(kind).get("_fused_from", kind)


def written(kind: Class, method: str) -> Any:
    """A method of a class as it was before fuse()."""
    return getattr(unfused(defining_class(kind, method)), method, None)


def parts_of(kind: Class) -> frozenset[Part]:
    """What is fused in the methods of a class, as the class it was made from has them now."""
    owner = defining_class(kind)
    current = _is_made_by_us(owner) and _is_current(owner)
    return owner._fused_parts if current else frozenset()


def _is_made_by_us(kind: Class) -> bool:
    return "_fused_from" in vars(kind)


def _is_current(made: Class) -> bool:
    """Whether the class that a fused one was made from still has the methods it had then."""
    now = made._fused_from
    return all(getattr(now, name, None) is method for name, method in made._fused_source.items())


# By what they are made from; they go with the last module that is one.
_made: weakref.WeakValueDictionary[Any, Class] = weakref.WeakValueDictionary()


def _fused_class(kind: Class, parts: frozenset[Part]) -> Class:
    """The subclass in whose methods, made from those of `kind`, run() gets these parts. Raises
    Unreadable."""
    names = sorted({"forward", *(name for name, _ in parts)})
    source = {name: getattr(kind, name, None) for name in names}
    key = kind, parts, *source.values()
    made = _made.get(key)
    if made is None:
        made = _made[key] = _make_fused_class(kind, parts, source)
    return made


def _make_fused_class(kind: Class, parts: frozenset[Part], source: dict[str, Any]) -> Class:
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
            body[name] = _forward.read(method).joined(inside, _fuse_run.run)
    bases = (kind,) if issubclass(kind, _Fused) else (_Fused, kind)
    try:
        # Under a name of its own where the class has a register of subclasses.
        made = type(kind)(f"Fused{kind.__name__}", bases, body)
        made.__name__ = kind.__name__  # by which pipelines are saved
        return made
    except Exception:  # whatever __init_subclass__ or a metaclass raises
        raise _source.Unreadable("belongs to a class that allows no subclass") from None


def _methods(kind: Class) -> Iterator[tuple[FunctionType, bool]]:
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
    return _fuse_run.run(input, *self)
