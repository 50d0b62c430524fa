"""Inductor: a norm and the activation after it become one call of ours, and so does a norm of half
precision inside autocast.

This happens before gradients are traced, on what Dynamo recorded, where an activation is still one
node. The fused operator brings its own backward, so training needs no pattern of its own. Calls
that our kernels do not take stay what they are, and so does what runs without this package.

This module loads Inductor's base class of passes; it is imported where Inductor is.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from gn_override import _activations, _calls, _library, _meta

_Pass = Callable[[Graph], None]
_Aliases = dict[int, list[Node]]

_NORMS = (F.group_norm, torch.group_norm)
_FUSED = torch.ops.gn_override.group_norm_act.default


class FuseActivations(CustomGraphPass):
    """The pass, over what Dynamo recorded. It runs after those that a program has set itself.

    Args:
        before: the setting as it was: a custom pass, several or None.
        active: whether there is anything to do now.
    """

    def __init__(self, before: Any, active: Callable[[], bool]) -> None:
        self.before = before
        self.active = active

    def __call__(self, graph: Graph) -> None:
        for custom_pass in self._others():
            custom_pass(graph)
        if self.active():
            modules = _around(graph)
            if not _needs_pytorchs(modules):
                _fuse(graph, modules)

    def __deepcopy__(self, memo: Any) -> FuseActivations:
        return self  # each thread that reads the setting gets a copy

    def uuid(self) -> Any:
        """Of all passes together; None where one of them has none, so that nothing is cached.

        And of what ours does now: a thread may hold one of before the switch was turned.
        """
        state = str((self.active(), torch.ops.gn_override.autocast_preserves()))
        ours = get_hash_for_files((__file__, _activations.__file__), state)
        others = [getattr(custom_pass, "uuid", lambda: None)() for custom_pass in self._others()]
        return None if None in others else (ours, *others)

    def _others(self) -> Sequence[_Pass]:
        if self.before is None:
            return ()
        return self.before if isinstance(self.before, (list, tuple)) else (self.before,)


def _around(graph: Graph) -> list[GraphModule]:
    """The graph's module and those of the graphs that it is a subgraph of, the innermost first.

    Inductor's passes are at all of them, and are done with the innermost first. Called by others,
    with a graph that is no module's, there is none.
    """
    found = [frame.f_locals["gm"] for frame in _library.callers("_recursive_pre_grad_passes")]
    own: GraphModule | None = graph.owning_module
    return found or ([] if own is None else [own])


def _needs_pytorchs(modules: Sequence[GraphModule]) -> bool:
    """Whether PyTorch's operators are needed as they are: where a graph, or one around it, is
    checkpointed by a policy, which decides on them, or is what `scan` repeats. Its backward stacks
    what was saved, in another layout, and asks for gradients in the first one; PyTorch's norm is
    then decomposed, ours could not be.
    """
    return any("_checkpoint_context_fn" in module.meta for module in modules) or any(
        _scans(outer, inner) for inner, outer in itertools.pairwise(modules)
    )


def _scans(outer: GraphModule, inner: GraphModule) -> bool:
    return any(
        getattr(outer, node.target, None) is inner
        for scan in outer.graph.nodes
        if str(scan.target) == "scan"
        for node in scan.all_input_nodes
        if node.op == "get_attr"
    )


def _aliases(graphs: Iterable[Graph]) -> _Aliases:
    """Which nodes of some graphs return a tensor of a storage."""
    found: _Aliases = {}
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        for storage in _storages(_value(node)):
            found.setdefault(storage, []).append(node)
    return found


def _fuse(graph: Graph, modules: Sequence[GraphModule]) -> None:
    """Fuses in a graph, given what _around() says of it."""
    finds = (graph.find_nodes(op="call_function", target=target) for target in _NORMS)
    norms = list(itertools.chain.from_iterable(finds))
    if not norms:
        return
    program = modules[-1].modules() if modules else ()
    graphs = {module.graph for module in program if isinstance(module, GraphModule)}
    aliases = _aliases(graphs | {graph})
    for norm in norms:
        arguments = _arguments(*norm.args, **norm.kwargs)
        out_dtype = _autocast_dtype(norm, arguments[0], *arguments[2:4])
        activation, name = _activation(norm)
        if (
            (name == "identity" and out_dtype is None)
            or not _taken(norm, out_dtype, *arguments)
            or _changes(arguments[3], aliases)
        ):
            continue
        with graph.inserting_before(norm):
            fused = graph.call_function(_FUSED, (*arguments, name, out_dtype))
            output = graph.call_function(operator.getitem, (fused, 0))
        # Where it is from, and what the program has noted: on which stream it runs, say.
        fused.meta = {key: norm.meta[key] for key in norm.meta.keys() - {"example_value"}}
        output.meta = activation.meta.copy()
        activation.replace_all_uses_with(output)
        graph.erase_node(activation)
        if activation is not norm:
            graph.erase_node(norm)


def _arguments(
    input: Any,
    num_groups: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enabled: Any = None,
) -> tuple[Any, ...]:
    """The arguments of F.group_norm and torch.group_norm, without what has no effect."""
    return input, num_groups, weight, bias, eps


def _autocast_dtype(norm: Node, input: Any, weight: Any, bias: Any) -> torch.dtype | None:
    """The dtype that autocast gives a norm of half precision on a GPU; None without autocast, or
    where it has no part in the result."""
    X, Y = _value(input), _value(norm)
    if not (
        isinstance(X, Tensor) and isinstance(Y, Tensor) and X.is_cuda and X.dtype.itemsize == 2
    ):
        return None
    if Y.dtype != X.dtype:
        return Y.dtype
    parameters = [t for t in map(_value, (weight, bias)) if isinstance(t, Tensor)]
    cast = any(parameter.dtype != X.dtype for parameter in parameters)
    return Y.dtype if cast and torch.ops.gn_override.autocast_preserves() else None


def _activation(norm: Node) -> tuple[Node, str]:
    """The activation that alone sees the norm's result, and its name; or the norm, "identity"."""
    if len(norm.users) == 1:
        (activation,) = norm.users
        name = _name(norm, activation)
        if name is not None and _together(norm, activation):
            return activation, name
    return norm, "identity"


def _name(norm: Node, activation: Node) -> str | None:
    """What a node computes of the norm's result, if it is an activation."""
    if activation.op not in ("call_function", "call_method") or activation.args[:1] != (norm,):
        return None
    return _activations.of_call(activation.target, *activation.args[1:], **activation.kwargs)


def _taken(
    norm: Node,
    out_dtype: torch.dtype | None,
    input: Any,
    num_groups: Any,
    weight: Any,
    bias: Any,
    eps: Any,
) -> bool:
    """Whether our kernels take the norm."""
    X, gamma, beta = (_value(argument) for argument in (input, weight, bias))
    known = _is_known_tensor(X) and isinstance(num_groups, int) and isinstance(eps, float)
    # Of plain operands too a transform makes tensors of its own.
    known = known and _is_known_tensor(_value(norm))
    for argument, value in ((weight, gamma), (bias, beta)):
        known = known and (argument is None or _is_known_tensor(value))
    if not known:
        return False
    if out_dtype == torch.float32:  # autocast casts them
        gamma, beta = (t if t is None else t.float() for t in (gamma, beta))
    return _meta.takes_act(X, num_groups, gamma, beta, out_dtype)


def _changes(bias: Any, aliases: _Aliases) -> bool:
    """Whether the program may change the bias in place, as Dynamo has run it on fake tensors.

    PyTorch's own norm lets it, before backward as well; ours, with an activation, keeps the bias.
    A change of its `.data` has no version: so of what has another use than as an operand of norms,
    or shares its memory with what has another than to be read.
    """
    beta = _value(bias)
    if beta is None or beta.is_inference():
        return False
    if beta._version > 0 or any(user.target not in (*_NORMS, _FUSED) for user in bias.users):
        return True
    (storage,) = _storages(beta)
    made_here = {node for node in aliases[storage] if node.op.startswith("call")} - {bias}
    users = {user for node in aliases[storage] for user in node.users if user.target != _FUSED}
    return any(not _converts(node) for node in made_here) or any(
        not (_reads(user, storage) or _converts(user)) for user in users
    )


def _converts(node: Node) -> bool:
    """Whether a node returns its operand itself only where that has a certain type or layout."""
    return node.op == "call_method" and node.target in ("to", "float", "contiguous")


def _reads(node: Node, storage: int) -> bool:
    """Whether a node at most reads a storage: it returns something, and nothing of the storage."""
    value = _value(node)
    return value is not None and storage not in _storages(value)


def _storages(value: Any) -> set[int]:
    """Whose memory the plain tensors of a value are."""
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if _is_known_tensor(leaf)}


def _is_known_tensor(value: Any) -> bool:
    """Whether a value is a tensor that knows our operators: of no other class and no transform."""
    return type(value) in _calls.KNOWN and not is_functorch_wrapped_tensor(value)


def _together(norm: Node, activation: Node) -> bool:
    """Whether only values are computed between two nodes: no change of autocast, of grad mode or
    of what the program notes of its nodes, their stream for one."""
    if norm.meta.get("custom") != activation.meta.get("custom"):
        return False
    node = norm.next
    while node is not activation:
        if node.op.startswith("call") and _value(node) is None:
            return False
        node = node.next
    return True


def _value(argument: Any) -> Any:
    """What Dynamo recorded for a node: a fake tensor, a size, ..."""
    return argument.meta.get("example_value") if isinstance(argument, Node) else None
