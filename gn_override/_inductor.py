"""torch.compile: Inductor calls our kernels, and compiles the other group norms as ever.

Inductor decomposes both native ops while a model is traced, so that what is registered in the
dispatcher is never reached. While the switch is on, its table holds a decomposition that declines
the calls that our kernels take, which leaves them in the graph, and runs Inductor's own for all
others (NCHW inputs, say, and what `scan` repeats in training). A lowering of its own keeps such a
call's tensors in channels-last: the one that Inductor makes up for an operator without a
decomposition leaves the layout of a forward open and makes that of a backward contiguous.

A norm and the activation after it become one call before all that: see _inductor_fuse. Calls that
are left in a graph are not merged there: see _keep_apart().

AOTInductor always decomposes: what it packages runs where this package is not imported. So does
what is compiled with torch._dynamo.config.caching_precompile, which other processes load as it is.
Up to PyTorch 2.13 these and torch.export trace norms with PyTorch's own layouts, too, of which a
later view may have need.

Inductor is slow to import and most programs never do. So an import hook waits for the module that
holds its lowerings, which is loaded before anything can be compiled, and is gone after that.

Compiled code that is cached on disk is looked up by the graph before decomposition, so code of
another side of the switch, or of a process without this package, would be found. Therefore
torch.compiler.config.cache_key_tag ends in a tag of ours while the override is on, and tells
whether Inductor leaves calls to us and autocast is told to preserve dtypes. A program that sets the
tag itself should do so before it imports this package. So should one that sets
pre_grad_custom_pass: set later, it takes the place of ours, and no activation is fused.

That tag and the pass are settings of PyTorch's, which belong to a thread since 2.13.
What we do to them holds for all threads but others that have set them too: see _amend().
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch._guards import CompileContext
from torch.utils._config_module import _UNSET_SENTINEL

from gn_override import _library, _meta

_LOWERINGS = "torch._inductor.lowering"

_OURS: dict[torch._ops.OpOverload, Callable[..., bool]] = {
    torch.ops.aten.native_group_norm.default: _meta.takes_forward,
    torch.ops.aten.native_group_norm_backward.default: _meta.takes_backward,
}

# What the lowering serves besides: what _inductor_fuse makes, and the programs that call it.
_FUSED = (
    torch.ops.gn_override.group_norm_act.default,
    torch.ops.gn_override.group_norm_act_backward.default,
)
_BACKWARD = (torch.ops.aten.native_group_norm_backward.default, _FUSED[1])

# What is compiled depends on these, and only on these besides the graph.
_CACHE_TAG = "-".join(
    ("gn_override", _library.build_info()["version"], *_library.build_info()["backends"])
)

_LAYOUTS_TAG = "-".join((_CACHE_TAG, "layouts"))
_PRESERVE_TAG = "-autocast-preserve"

_turning = threading.RLock()
_wanted = True

# The setters of what was changed inside a compile and not changed back there: older graphs remain.
_left_changed: set[Callable[[bool], bool]] = set()


@functools.cache  # gn_override may be reloaded
def install() -> torch.library.Library:
    """Makes Inductor follow the switch from the first turn() on."""
    if _LOWERINGS in sys.modules:
        _inductor_loaded()
    else:
        sys.meta_path.insert(0, _Hook())
    library = torch.library.Library("gn_override", "IMPL")
    for question in (traces_for_elsewhere, traces_alone):
        library.impl(question.__name__, question, "CompositeImplicitAutograd")
    os.register_at_fork(after_in_child=_forked)
    return library


@_library.unseen()
def _forked() -> None:
    """Ends the turn that another thread was in: the child of a fork has no such thread."""
    global _turning
    if _turning.acquire(blocking=False):
        _turning.release()
        return
    _turning = threading.RLock()
    setter, on = _latest
    setter(on)
    _meta.follow()
    _follow()


def is_active() -> bool:
    """Whether Inductor leaves calls to our kernels: switched on, and wanted."""
    return _wanted and torch.ops.gn_override.is_enabled()


def traces_for_elsewhere() -> bool:
    """Whether what is traced or compiled now may run in a process without this package."""
    if torch.compiler.is_exporting():
        return True
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is not None and virtualized.V.aot_compilation:
        return True
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and dynamo.config.caching_precompile


def traces_alone() -> bool:
    """Whether make_fx or AOTAutograd traces without torch.compile: for whom, nobody knows."""
    keys = torch._C._TorchDispatchModeKey
    return torch._guards.TracingContext.try_get() is None and any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL)
    )


def leaves_calls() -> bool:
    """Whether Inductor leaves calls to our kernels in what is traced or compiled now."""
    return is_active() and not traces_for_elsewhere() and not _compiles_in_a_child()


def _trains_a_scan() -> bool:
    """Whether what `scan` repeats is traced with its backward.

    That reads each step's X from a stack, in another layout than the one that the forward saved,
    and has to return gradients in the first one. Decomposed together, they do.
    """
    return any(True for _ in _library.callers("scan_autograd"))


def _compiles_in_a_child() -> bool:
    """Whether graphs are lowered by processes that may not have imported this package."""
    from torch._inductor import compile_fx

    return compile_fx.fx_compile_mode == compile_fx.FxCompileMode.SUBPROCESS


def set_inductor(enabled: bool) -> None:
    """Choose who runs group normalisation in models compiled by torch.compile.

    True, the default: the kernels of this package run the calls that they would run in eager
    mode, with the activation that follows where that is one of theirs, and Inductor compiles the
    others. False: Inductor compiles all of them, which lets it fuse them with their neighbours.
    AOTInductor always compiles all. Eager mode and other backends are not affected.

    The choice is the process's and is kept while the override is off, when it has no effect. If it
    changes, all that torch.compile has made is dropped, and compiled again on its next call.

    Raises:
        TypeError: not a bool.
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"set_inductor() takes True or False, not {enabled!r}")
    turn(_set_wanted, enabled)


def _set_wanted(enabled: bool) -> bool:
    global _wanted
    before, _wanted = _wanted, enabled
    return before


_latest: tuple[Callable[[bool], bool], bool] = (_set_wanted, True)  # turn(), of these


def turn(setter: Callable[[bool], bool], on: bool) -> bool:
    """Sets what tracing follows, and makes it follow if that changes; returns what was before.

    One thread at a time does so. Graphs that torch.compile made before are dropped: who runs a
    call, and layouts that hold on one side of the switch only, are built into them. In a function
    that is compiled itself, a change breaks the graph.

    Code that a compile runs, a backend for example, may turn too, but no graph can be dropped
    there. Unless such a change is undone in a compile, older graphs are dropped at the next turn
    outside, even one that changes nothing. Until then they run as they are.

    Args:
        setter: of the switch, of set_inductor() or of set_autocast(); returns what was before.
        on: what it is given.

    Raises:
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        raise RuntimeError(
            "gn_override's settings are the process's and no part of a traced or exported model: "
            "change them outside of it"
        )
    if "torch._dynamo" not in sys.modules:
        return _turn(setter, on)
    before: bool = torch._dynamo.disable(_turn)(setter, on)
    return before


@_library.unseen()
def _turn(setter: Callable[[bool], bool], on: bool) -> bool:
    global _latest
    compiling = CompileContext.try_get() is not None
    with _turning:
        _latest = (setter, on)
        before = setter(on)
        if before != on:
            try:
                _meta.follow()
                _follow()
            except BaseException:
                setter(before)
                raise
            _left_changed.symmetric_difference_update({setter})
        drops = not compiling and (before != on or bool(_left_changed))
        if drops:
            _left_changed.clear()
    # Not under our lock: this takes Dynamo's, and code that Dynamo runs under it may turn.
    if drops and "torch._dynamo" in sys.modules:
        # It raises while a backward is compiled without Dynamo or by another thread, when it has
        # dropped the graphs.
        with contextlib.suppress(AssertionError):
            torch._dynamo.reset()
    return before


def _follow() -> None:
    """Makes Inductor follow the switch."""
    active = is_active()
    # Layouts are ours also where Inductor compiles all.
    on = torch.ops.gn_override.is_enabled()
    tag = _CACHE_TAG if active else _LAYOUTS_TAG if on else ""
    if on and torch.ops.gn_override.autocast_preserves():
        tag += _PRESERVE_TAG

    def with_tag(before: str) -> str:
        for ours in (_PRESERVE_TAG, _CACHE_TAG, _LAYOUTS_TAG):
            before = before.removesuffix(ours)
        return before + tag

    _amend(torch.compiler.config, "cache_key_tag", with_tag)
    if _LOWERINGS in sys.modules:
        _change_inductor(active)


def _amend(config: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Changes a setting of PyTorch's for all threads.

    That is what it is where a thread has not set it; what the calling thread has set is changed
    too. Another thread that has set it keeps its own.
    """
    entry = config._config[name]
    for otherwise in ("default", "env_value_default", "env_value_force"):
        value = getattr(entry, otherwise)
        if value is not _UNSET_SENTINEL:
            setattr(entry, otherwise, change(value))
    own = entry.user_override
    if isinstance(own, ContextVar):  # since 2.13
        own = own.get()
    if own is not _UNSET_SENTINEL:
        setattr(config, name, change(own))


class _Decomposition:
    """Inductor's decomposition of an operator, but not of calls that our kernels take."""

    def __init__(self, inductors: Callable[..., Any], ours: Callable[..., bool]) -> None:
        self.inductors = inductors
        self.ours = ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if leaves_calls() and not _trains_a_scan() and self.ours(*args, **kwargs):
            return NotImplemented  # which leaves the call in the graph
        return self.inductors(*args, **kwargs)


def _change_inductor(active: bool) -> None:
    """Has Inductor leave calls to our kernels, or undoes that."""
    _set_decompositions(active)
    _keep_apart(active)
    _set_pass(active)


def _set_decompositions(active: bool) -> None:
    """Puts ours around Inductor's decompositions, or puts back what was there."""
    from torch._inductor import decomposition

    tables = [decomposition.decompositions]
    if decomposition.fast_random_decomps.cache_info().currsize:  # a copy, made on first use
        tables.append(decomposition.fast_random_decomps())
    for table in tables:
        for op, ours in _OURS.items():
            entry = table.get(op)
            if entry is None:
                continue
            inductors = entry.inductors if isinstance(entry, _Decomposition) else entry
            table[op] = _Decomposition(inductors, ours) if active else inductors


def _keep_apart(active: bool) -> None:
    """Has norms of the same operands stay calls of their own, or undoes that.

    Where gradients are traced, the graph of forward and backward loses nodes that are computed
    twice. What the program returns is spared, since each result has to have its own memory, but
    only where a node is one tensor: of a norm that stays a call, and returns three, two results
    would be one tensor, which the backward may also take for its own. Random operators are spared
    in any case.
    """
    from torch._functorch import compile_utils

    for norm in (torch.ops.aten.native_group_norm, torch.ops.gn_override.group_norm_act):
        if norm in compile_utils.rand_ops:
            compile_utils.rand_ops.remove(norm)
        if active:
            compile_utils.rand_ops.append(norm)


def _set_pass(active: bool) -> None:
    """Puts ours after the custom passes of a program, or takes it away."""
    from torch._inductor import config

    from gn_override._inductor_fuse import FuseActivations

    def with_ours(current: Any) -> Any:
        others = current.before if isinstance(current, FuseActivations) else current
        return FuseActivations(others, leaves_calls) if active else others

    _amend(config, "pre_grad_custom_pass", with_ours)


@_library.unseen()
def _inductor_loaded() -> None:
    """Registers the lowerings, which are reached by calls that were not decomposed only."""
    from torch._inductor.lowering import make_fallback

    for op in (*_OURS, *_FUSED):
        make_fallback(op, layout_constraint=_like_input, warn=False, override_decomp=True)
    _change_inductor(is_active())


def _like_input(node: torch.fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Layout constraint: X is ordered in memory as it was traced, and so is dY.

    dY's own order does not matter to the results; a conversion is then part of the code that
    computes dY, not of our call.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    traced = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else None for arg in node.args]
    X: torch.Tensor = traced[1 if node.target in _BACKWARD else 0]  # type: ignore[assignment]
    order = ir.get_stride_order(X.stride(), V.graph.sizevars.shape_env)
    constrained = (
        ir.ExternKernel.require_stride_order(arg, order)
        if isinstance(fake, torch.Tensor) and fake.ndim == X.ndim
        else arg
        for arg, fake in zip(args, traced, strict=True)
    )
    return tuple(constrained), kwargs


class _Hook:
    """Finder that calls _inductor_loaded() when the module with the lowerings is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _LOWERINGS:
            return None
        others = (
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")  # import skips others, too
        )
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # a program may have put another list there
                sys.meta_path.remove(self)
            _inductor_loaded()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
