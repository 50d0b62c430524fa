"""fuse(): in a given model, a group norm and the activation that follows it become one kernel.

The modules stay as they are; what changes is who calls them. A module whose forward calls a norm
and then, on its result, an activation gets a subclass of its class, in whose forward run() does
both. run() looks at what it is given at each call, and fuses what may be fused then: hooks and
modules that are exchanged later are honoured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import normalization

from gn_override import _forward, _fuse_class, _fuse_run, _source
from gn_override._fuse_class import Class, Part
from gn_override.nn import GroupNorm

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
        _fuse_class.undo_stale(caller)
        before = _fuse_class.parts_of(type(caller))
        try:
            pairs = list(_pairs(caller))
            parts = frozenset(pair.part for pair in pairs if not pair.obstacle)
            if not parts <= before:
                _fuse_class.write_again(caller, parts | before)
        except _source.Unreadable as why:
            reason = f"{_fuse_class.unfused(type(caller)).__name__}.forward {why}"
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


@dataclass(frozen=True)
class _Pair:
    """A norm and what follows it, in a method of a module."""

    part: Part
    norm: nn.Module
    norm_path: str  # from that module; empty for a call of F.group_norm
    activation: str  # path of a module, or a function as it is written
    is_module: bool
    kind: str  # of the activation; empty where another module follows
    obstacle: str | None


def _names_group_norm(kind: Class) -> bool:
    """Whether the forward of a class may call F.group_norm, without a look at its source."""
    forward = _fuse_class.written(kind, "forward")
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
    if _fuse_run.is_replaced(caller):
        raise _source.Unreadable("is replaced on the instance")
    for method, number, run in _runs(caller):
        if run.is_left_out(caller):
            continue
        steps = [_resolve(caller, step) for step in run.steps]
        for first, norm in enumerate(steps):
            last, kind = _fuse_run.after(steps, first)
            is_module = isinstance(steps[last], nn.Module)
            if kind is not None:
                obstacle = _fuse_run.obstacle(steps[first : last + 1])
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
    forward = _fuse_class.written(kind, "forward")
    if forward is nn.Sequential.forward:
        children = (_forward.Step(name, path=name) for name in caller._modules)
        yield "forward", 0, _forward.Run(tuple(children), branches=())
        return
    read = {"forward": _forward.read(forward)}
    original = _fuse_class.unfused(_fuse_class.defining_class(kind))
    defined = vars(_fuse_class.defining_class(original))
    names = [*read["forward"].attributes]
    for name in names:  # which grows
        method = defined.get(name)
        if not isinstance(method, FunctionType) or name in read or name in vars(caller):
            continue
        if _fuse_class.written(kind, name) is not method:
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


def _is_norm(module: nn.Module, has_reason: bool) -> bool:
    """Whether a module is to be reported where it is not fused: a norm without an activation of its
    own, or a caller of F.group_norm that something keeps from being fused."""
    if isinstance(module, normalization.GroupNorm):
        return not isinstance(module, GroupNorm) or module.activation == "identity"
    return has_reason and _names_group_norm(type(module))
