"""What Linux says of this process's memory, area by area."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def areas(begin: int, end: int) -> Iterator[tuple[int, dict[str, str]]]:
    """The mapped areas that share addresses with [begin, end), from /proc/self/smaps.

    Of each, how many bytes it shares, and its fields: {"LazyFree": "0 kB", "VmFlags": "rd wr"}.
    """
    shared, fields = 0, dict[str, str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if shared > 0:
                yield shared, fields
            first, last = (int(address, 16) for address in area.groups())
            shared, fields = min(last, end) - max(first, begin), {}
        else:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    if shared > 0:
        yield shared, fields
