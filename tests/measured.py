"""A shape and results for the tests of the tools."""

from __future__ import annotations

import results
from shapes import Case

MEASURED = results.RESULTS / "kernels-h200.json"
HEAD = {
    "gpu": "GPU-X",
    "driver": "1",
    "cuda": "13.0",
    "torch": "2.13.0",
    "commit": "abc",
    "date": "2026-01-01",
    "command": "python tools/bench.py",
}
SMALL = Case("small", (2, 8, 3, 5), 4, "float32")


def a_row(**fields):
    """1 Mi elements of bfloat16: 4.19 MB for a copy and a forward, 10.49 MB with the backward."""
    return {
        "name": "one",
        "shape": [4, 64, 64, 64],
        "groups": 32,
        "dtype": "bfloat16",
        "MB": 2.1,
        "copy": 4.0,
        "fwd": {"gn_override": 5.0, "stock_channels_last": 20.0, "stock_nchw": 15.0},
        "fwd_bwd": {"gn_override": 20.0, "stock_channels_last": 50.0, "stock_nchw": 60.0},
    } | fields
