"""The time that steps take on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(step: Callable[[], object], device_type: str, count: int = 1) -> float:
    """Mean time of `count` steps run back to back: by events on a GPU, else by the clock."""
    if device_type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count
