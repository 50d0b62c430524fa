"""Reach every CUDA kernel and row of the policy with small tensors: a program for a sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tools/reach_kernels.py

Every dtype and mix of dtypes goes through every scheme and cluster size, forward and backward, as
aten's operators (or as autocast's, which writes float) and with the activations in turn, of X
and of a sum, with vectors of every width, some gradients left out, and dY in another layout; the
whole chip also gets more than it keeps. It fails if a scheme was not reached for some dtype, or if
a result holds a NaN.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import results
import torch

sys.path.insert(0, str(results.ROOT / "tests"))
import reference
import shapes

import gn_override

# Vectors of 8, 2 and 1; more than one column tile; samples that waves and clusters share unevenly.
# Of clusters of 16 blocks not more than run at once: synccheck (CUDA 13.0) cannot run them then.
CASES = (
    shapes.Case("d10", (1, 40, 13, 11), 4),
    shapes.Case("vectors_of_two", (3, 6, 9, 31), 3),
    shapes.Case("odd", (3, 9, 7, 11), 3),
    shapes.Case("many_tiles", (2, 1040, 7, 5), 26),
)
# (scheme, blocks of a cluster or samples of a wave, threads), as tests/test_schemes.py has them.
PINS = (
    *(("registers", 0, threads) for threads in (64, 160, 640)),
    *(("resident", blocks, 0) for blocks in (1, 2, 4, 8, 16)),
    *(("cooperative", samples, 0) for samples in (0, 1, 2)),
    ("two_pass", 0, 0),
)
RUNS = (*itertools.product(CASES, PINS), (shapes.LARGER_THAN_CHIP, ("cooperative", 0, 0)))
# Of X, of gamma and beta, of Y and dY; None: of X.
DTYPES = (
    (torch.float32, None, None),
    (torch.float64, None, None),
    (torch.float16, None, None),
    (torch.bfloat16, None, None),
    (torch.float16, torch.float32, None),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
)


def run(inputs: reference.Inputs, mask: reference.Mask, activation: str) -> None:
    i = inputs
    if activation == "identity" and i.dY.dtype == i.X.dtype:
        ours = reference.native(i, mask)
        found = [t for t in vars(ours).values() if t is not None]
    else:
        ops = torch.ops.gn_override
        Y, mean, rstd = ops.group_norm_act(
            i.X, i.groups, i.gamma, i.beta, i.eps, activation, i.dY.dtype
        )
        grads = ops.group_norm_act_backward(
            i.dY, i.X, mean, rstd, i.gamma, i.beta, i.groups, activation, list(mask)
        )
        found = [Y, mean, rstd, *(t for t in grads if t is not None)]
        if activation != "identity" and i.dY.dtype == i.X.dtype:
            added = torch.randn(i.sizes[:2], dtype=i.X.dtype, device="cuda")
            found.append(
                ops.group_norm_act_inference(
                    i.X, added, i.groups, i.gamma, i.beta, i.eps, activation
                )
            )
    for tensor in found:
        assert not tensor.isnan().any(), f"NaN: {tuple(i.X.shape)} {i.X.dtype} {activation}"


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is visible")
    layouts = itertools.cycle(reference.GRAD_LAYOUTS)
    masks = itertools.cycle(reference.MASKS[1:])
    calls = 0
    activations = itertools.cycle(reference.ACTIVATIONS[1:])
    for dtypes in DTYPES:
        reached = set()
        for case, (scheme, splits, threads) in RUNS:
            torch.ops.gn_override.pin_plans(scheme, 0, splits, threads)
            for activation in ("identity", next(activations)):
                inputs = reference.make_inputs(case, "cuda", *dtypes, dY_layout=next(layouts))
                torch.ops.gn_override.reset_counters()
                run(inputs, next(masks), activation)
                taken = gn_override.report().calls
                calls += sum(taken.values())
                reached |= {key.rpartition(" ")[2] for key in taken}
        missing = {scheme for scheme, *_ in PINS} - reached
        if dtypes[0].itemsize > 2 or dtypes[1] is not None:
            missing.discard("registers")  # which are of one two-byte dtype alone
        assert not missing, f"{dtypes}: {missing} not reached"
    torch.ops.gn_override.pin_plans("", 0, 0, 0)
    torch.cuda.synchronize()
    print(f"{calls} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
