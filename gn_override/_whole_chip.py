"""Whether a kernel may ask for a whole GPU at once.

The fastest plans for large samples launch a block on every multiprocessor, or clusters of more than
eight blocks, all of which start together: when what is in their way has ended. A kernel that waits
for another process, as those of NCCL do, is in the way for as long as that process waits for
results which are behind the norm. Two processes in such a circle, stages of a pipeline for example,
would wait for ever, so in a process with peers there are other plans, whose blocks start one by one
or in clusters of at most eight: they need a part of the GPU.
"""

from __future__ import annotations

import functools
import os

import torch

VARIABLE = "GN_OVERRIDE_WHOLE_CHIP"


def allowed() -> bool:
    """Not in a process group of several, nor with GN_OVERRIDE_WHOLE_CHIP=0 in the environment."""
    if os.environ.get(VARIABLE) == "0":
        return False
    distributed = torch.distributed
    return not (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


@functools.cache  # torch takes it once, and gn_override may be reloaded
def install() -> torch.library.Library:
    """Answers gn_override::may_take_whole_chip, which calls on a GPU ask before such a launch."""
    library = torch.library.Library("gn_override", "IMPL")
    library.impl("may_take_whole_chip", allowed, "CompositeImplicitAutograd")
    return library
