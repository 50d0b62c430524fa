"""fuse(): in a given model, a group norm and the activation that follows it become one kernel.

The modules stay as they are; what changes is who calls them. A module whose forward calls a norm
and then, on its result, an activation gets a subclass of its class, in whose forward run() does
both. run() looks at what it is given at each call, and fuses what may be fused then: hooks and
modules that are exchanged later are honoured.
"""

from __future__ import annotations

import functools
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

from gn_override import _activations, _calls, _forward
from gn_override.nn import GroupNorm

_Class = Any  # type[nn.Module], which mypy takes for unhashable


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

    A pair is fused where the source of the forward that calls both shows that nothing but the
    activation can see the norm's result. Norms are nn.GroupNorm and F.group_norm, activations
    nn.ReLU, nn.SiLU, nn.GELU and their functions and methods; nn.Identity may stand between. Every
    other norm is left as it is. Results change by rounding only.

    What is added to the input just before (diffusers' time embedding) becomes a part of the kernel
    where it is [N, C, 1, ...] on a CUDA device and no gradient is wanted.

    Modules, parameters and the keys of ``state_dict`` stay as they are; the class of a module that
    calls a pair becomes a subclass of its own, of the same name. The model can be copied and
    pickled. A forward that is patched on a class later counts from the next fuse() on.

    Args:
        model: any module. What is fused already stays so.

    Returns:
        The pairs that this call fused, and the norms that are not fused, with the reasons.

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
        before = _parts_of(type(caller))
        try:
            pairs = list(_pairs(caller))
            parts = frozenset(pair.part for pair in pairs if not pair.obstacle)
            if not parts <= before:
                _write_again(caller, parts | before)
        except _forward.Unreadable as why:
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
        SkippedNorm(name, reasons.get(norm, "no activation follows it at once"))
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
        pair = _activation_after(steps, first)
        y = None
        if pair is not None and _obstacle(steps[first : pair[0] + 1]) is None:
            last, activation = pair
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
    """A norm and an activation in the forward of a module."""

    part: _forward.Part
    norm: nn.Module
    norm_path: str  # from that module; empty for a call of F.group_norm
    activation: str  # path of a module, or a function
    is_module: bool
    kind: str
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
    """The pairs in a module's forward, fused or not. Raises Unreadable."""
    if "forward" in vars(caller):
        raise _forward.Unreadable("is replaced on the instance")
    forward = _unfused(_owner(type(caller))).forward
    if forward is nn.Sequential.forward:
        children = (_forward.Step(name, path=name) for name in caller._modules)
        runs = [_forward.Run(tuple(children), branches=())]
    else:
        runs = _forward.read(forward).runs
    for number, run in enumerate(runs):
        if run.is_left_out(caller):
            continue
        steps = [_resolve(caller, step) for step in run.steps]
        for first, norm in enumerate(steps):
            pair = _activation_after(steps, first)
            if pair is not None:
                last, kind = pair
                added = first > 0 and isinstance(steps[first - 1], _forward.Addition)
                yield _Pair(
                    part=(number, first - added, last),
                    norm=norm if isinstance(norm, nn.Module) else caller,
                    norm_path=run.steps[first].path,
                    activation=run.steps[last].path or run.steps[last].source,
                    is_module=bool(run.steps[last].path),
                    kind=kind,
                    obstacle=_obstacle(steps[first : last + 1]),
                )


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


def _activation_after(steps: Sequence[object], first: int) -> tuple[int, str] | None:
    """Where the activation is that follows the norm `first`, and its name, if these are there."""
    norms = normalization.GroupNorm, _forward.GroupNormCall
    if first == len(steps) or not isinstance(steps[first], norms):
        return None
    for last in range(first + 1, len(steps)):
        step = steps[last]
        if not _activations.is_identity(step):
            name = (
                step.activation()
                if isinstance(step, _forward.ActivationCall)
                else _activations.of_module(step)
            )
            return None if name is None else (last, name)
    return None


def _obstacle(steps: Sequence[object]) -> str | None:
    """Why a norm, the activation after it, and what is between them must be called one by one."""
    norm = steps[0]
    if isinstance(norm, nn.Module):
        if not _is_plain(norm):
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
            if "forward" in vars(module):
                return f"forward of {type(module).__name__} is replaced on the instance"
    return None


def _is_plain(norm: nn.Module) -> bool:
    """Whether a module is nn.GroupNorm, or computes the same."""
    kind = type(norm)
    if _activations.is_pytorchs(kind, normalization.GroupNorm):
        return True
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

    Each has _fused_from: that class; _fused_source: its forward, when it was fused; _fused_parts:
    the parts of that. No annotation says so here, as torch.jit.script would take it for the
    module's own.
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
    kind: _Class, parts: frozenset[_forward.Part], make: Callable[..., Any], *arguments: Any
) -> Any:
    """What `make` makes of a pickled module, fused as that was."""
    module = make(*arguments)
    if module.__class__ is kind:
        try:
            _become_fused(module, kind, parts)
        except _forward.Unreadable:
            pass  # the source is elsewhere
    return module


def _write_again(caller: nn.Module, parts: frozenset[_forward.Part]) -> None:
    """Gives a module the class in whose forward run() gets these parts. Raises Unreadable."""
    if is_parametrized(caller):  # to be undone, it must be the last subclass
        raise _forward.Unreadable("belongs to a module with parametrizations")
    if _is_made_by_us(_owner(type(caller))) and not _is_made_by_us(type(caller)):
        raise _forward.Unreadable("is fused in part, and another class is on top of it")
    _become_fused(caller, _unfused(type(caller)), parts)


def _become_fused(module: nn.Module, kind: _Class, parts: frozenset[_forward.Part]) -> None:
    """Gives a module of class `kind` the fused one. Raises Unreadable."""
    fused = _fused_class(kind, kind.forward, parts)
    object.__setattr__(module, "__class__", fused)  # whatever attributes the module takes


def _owner(kind: _Class) -> _Class:
    """The class that a class has its forward from: others may have put theirs on top of ours."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


def _unfused(kind: _Class) -> _Class:
    """What fuse() made a class from, or the class."""
    return vars(kind).get("_fused_from", kind)


def _parts_of(kind: _Class) -> frozenset[_forward.Part]:
    """What is fused in the forward of a class, as the class it was made from has it now."""
    owner = _owner(kind)
    current = _is_made_by_us(owner) and owner._fused_source is owner._fused_from.forward
    return owner._fused_parts if current else frozenset()


def _is_made_by_us(kind: _Class) -> bool:
    return "_fused_from" in vars(kind)


@functools.cache
def _fused_class(kind: _Class, source: Any, parts: frozenset[_forward.Part]) -> _Class:
    """The subclass in whose forward, made from `source`, run() gets these parts.

    Raises Unreadable.
    """
    forward: Any = _run_all
    if source is not nn.Sequential.forward:
        forward = _forward.read(source).joined(parts, run)
    body = {
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_fused_from": kind,
        "_fused_source": source,
        "_fused_parts": parts,
    }
    bases = (kind,) if issubclass(kind, _Fused) else (_Fused, kind)
    try:
        # Under a name of its own where the class has a register of subclasses.
        made = type(kind)(f"Fused{kind.__name__}", bases, body)
        made.__name__ = kind.__name__  # by which pipelines are saved
        return made
    except Exception:  # whatever __init_subclass__ or a metaclass raises
        raise _forward.Unreadable("belongs to a class that allows no subclass") from None


@functools.wraps(nn.Sequential.forward)
def _run_all(self: nn.Sequential, input: Tensor) -> Tensor:
    return run(input, *self)
