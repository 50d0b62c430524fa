"""Inductor: norms of the same operands stay calls of their own.

Where gradients are traced, the graph of forward and backward loses nodes that are computed twice.
What the program returns is spared, since each result has to have its own memory, but only where a
node is one tensor, as those are that a norm is decomposed to: of a norm that stays a call, and
returns three, two results would be one tensor, which the backward may also take for its own.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from gn_override._inductor_pass import Pass

# Which argument of an operator is eps.
_EPS = {
    torch.ops.aten.native_group_norm.default: 7,
    torch.ops.gn_override.group_norm_act.default: 4,
}


class _Distinct(float):
    """A number that equals no other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


class DistinctCalls(Pass):
    """The pass, over the graph of forward and backward before it is cut in two."""

    files = (__file__,)

    def run(self, graph: Graph) -> None:
        for op, eps in _EPS.items():
            for norm in graph.find_nodes(op="call_function", target=op):
                if type(norm.args[eps]) is float:
                    norm.update_arg(eps, _Distinct(norm.args[eps]))
