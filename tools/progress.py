"""How far a benchmark is: a bar where stderr is a terminal, elsewhere one line a step."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType

WIDTH = 24


def bar(done: int, total: int, text: str, columns: int) -> str:
    """[######......] 12/24 text, cut off at `columns` characters."""
    filled = WIDTH * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total} {text}"[:columns]


class Progress:
    """Announces `total` steps one by one, used as a context manager."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.begun = 0

    def step(self, text: str) -> None:
        """Say that the next step begins."""
        self.begun += 1
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns - 1
            line = "\r\x1b[K" + bar(self.begun - 1, self.total, text, columns)
        else:
            line = f"[{self.begun}/{self.total}] {text}\n"
        print(line, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
