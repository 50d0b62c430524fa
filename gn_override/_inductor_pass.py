"""A pass of ours over Inductor's graphs, which runs after those that a program has set itself.

This module loads Inductor's base class of passes; it is imported where Inductor is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

_Pass = Callable[[Graph], None]


class Pass(CustomGraphPass):
    """Of a setting that holds a custom pass, or several.

    Args:
        before: the setting as it was.
        active: whether there is anything to do now.
    """

    files: ClassVar[tuple[str, ...]]  # what the pass does depends on these

    def __init__(self, before: Any, active: Callable[[], bool]) -> None:
        self.before = before
        self.active = active

    @abstractmethod
    def run(self, graph: Graph) -> None:
        """What is ours."""

    def __call__(self, graph: Graph) -> None:
        for custom_pass in self._passes():
            custom_pass(graph)
        if self.active():
            self.run(graph)

    def __deepcopy__(self, memo: Any) -> Pass:
        return self  # each thread that reads the setting gets a copy

    def uuid(self) -> Any:
        """Of all passes together; None where one of them has none, so that nothing is cached.

        And of what ours does now: a thread may hold one of before the switch was turned.
        """
        state = str((self.active(), torch.ops.gn_override.autocast_preserves()))
        ours = get_hash_for_files((__file__, *self.files), state)
        others = [getattr(custom_pass, "uuid", lambda: None)() for custom_pass in self._passes()]
        return None if None in others else (ours, *others)

    def _passes(self) -> Sequence[_Pass]:
        if self.before is None:
            return ()
        return self.before if isinstance(self.before, (list, tuple)) else (self.before,)
