"""What the GPU benchmarks time, and how: one timing function, the same steps for every provider.

A step is captured in a CUDA graph and replayed with a cold L2 cache (triton.testing.do_bench);
its figure is the median, in microseconds of GPU time. The functions are those of
`python -m gn_override bench`, on the operands of the test suite.
"""

from __future__ import annotations

import sys

import results
import torch
from torch import Tensor

sys.path.insert(0, str(results.ROOT / "tests"))
import reference

from gn_override import _bench
from gn_override._bench import Norm, Step, microseconds

__all__ = ["Norm", "Step", "difference", "gpu_lost", "microseconds", "steps"]


def steps(norm: Norm, inputs: reference.Inputs, layout: str) -> dict[str, Step]:
    """_bench.steps() of the operands, laid out anew."""
    assert inputs.gamma is not None and inputs.beta is not None
    X, dY = (reference.lay_out(t, layout) for t in (inputs.X, inputs.dY))
    return _bench.steps(norm, X, dY, inputs.gamma.clone(), inputs.beta.clone(), inputs.groups)


def difference(what: str, found: tuple[Tensor, ...], stock: reference.Results) -> str:
    """_bench.difference() to stock's results."""
    return _bench.difference(what, found, [getattr(stock, name) for name in _bench.RESULTS[what]])


def gpu_lost() -> bool:
    """Whether an error before has broken the CUDA context, so that nothing more can run."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
