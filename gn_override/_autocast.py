"""The dtype that torch.autocast gives group normalisation on a GPU.

The kernels that autocast reaches are in native/binding/autocast.cpp. Autocast on a CPU leaves
group normalisation alone.
"""

from __future__ import annotations

import torch

from gn_override import _inductor

MODES = ("float32", "preserve")


def set_autocast(dtype: str) -> None:
    """Choose the dtype that F.group_norm returns inside ``torch.autocast("cuda")``.

    "float32", the default, is PyTorch's contract. A float16 or bfloat16 input is read as it is and
    saved so for backward; weight and bias are float32, cast from half precision by autocast.
    "preserve": float16 and bfloat16 inputs give their own dtype, whichever kernels run the call,
    as under apex. Statistics and what is summed are float32 all the same. Weight and bias are
    taken in float32 by the kernels of this package and cast to the input's dtype for PyTorch's.

    float32 and float64 inputs keep their dtype in either mode, and inside ``torch.func.vmap``,
    where PyTorch skips autocast, the choice has no effect. It is the process's and holds also while
    the override is switched off, when it has no effect either. What ``torch.compile`` has compiled
    is compiled again on its next call.

    Raises:
        ValueError: another dtype than these two.
        RuntimeError: inside torch.jit.trace or torch.export, which record no such change.
    """
    if dtype not in MODES:
        raise ValueError(f"set_autocast() takes {' or '.join(map(repr, MODES))}, not {dtype!r}")
    _inductor.turn(torch.ops.gn_override.set_autocast_preserves, dtype == "preserve")


def mode() -> str:
    """What set_autocast() was told last."""
    return MODES[torch.ops.gn_override.autocast_preserves()]
