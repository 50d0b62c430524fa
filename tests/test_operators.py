"""What comes after a norm: PyTorch's operators, on channels-last tensors and on NCHW ones.

On a GPU up to torch 2.14, and of a sequence on any device, PyTorch's norm hands on NCHW tensors and
ours channels-last ones. That must change no result of what takes them, but for OTHERWISE.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from reference import lay_out
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import gn_override  # noqa: F401  (loads the extension and switches on)

# The README says of the first two what a user may meet.
ORDER = "draws random numbers in the order of memory"
STRIDES = "is of strides, not of values"
OTHERWISE = {
    **dict.fromkeys(
        (
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "nn.functional.scaled_dot_product_attention",  # its dropout
            "normal",
            "uniform",
        ),
        ORDER,
    ),
    **dict.fromkeys(("new_empty", "new_empty_strided", "resize_", "view", "view_as"), STRIDES),
    "nn.functional.nll_loss": "its backward takes no channels-last input",
    "_batch_norm_with_update": "takes no channels-last sequence",
    **dict.fromkeys(
        (
            "torch.ops.aten._efficient_attention_forward",
            "torch.ops.aten._flash_attention_forward",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        ),
        "is private: scaled_dot_product_attention lays out what it takes",
    ),
}
SAMPLES = 10  # of an operator
RANKS = {3, 4, 5}  # that channels-last is a layout of


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def laid_out(value: Any, layout: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    held = value.detach()
    held = lay_out(held, layout) if held.dim() in RANKS else held.contiguous()
    return held.requires_grad_(value.requires_grad)


def results(op: Any, operands: Any, layout: str) -> list[Tensor | None]:
    """Outputs, and gradients of what wants one, from operands and gradients in the layout."""
    X, args, kwargs = pytree.tree_map(lambda leaf: laid_out(leaf, layout), operands)
    torch.manual_seed(0)
    outputs = tensors(op(X, *args, **kwargs))
    recorded = [Y for Y in outputs if Y.requires_grad]
    leaves = [leaf for leaf in tensors((X, args, kwargs)) if leaf.requires_grad]
    if not (recorded and leaves):
        return outputs
    gradients = [laid_out(torch.randn(Y.shape).to(Y), layout) for Y in recorded]
    return [*outputs, *torch.autograd.grad(recorded, leaves, gradients, allow_unused=True)]


def agree(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> bool:
    def alike(mine: Tensor | None, theirs: Tensor | None) -> bool:
        if mine is None or theirs is None:
            return mine is theirs
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        if not (mine.dtype.is_floating_point or mine.dtype.is_complex) or not mine.numel():
            return torch.equal(mine, theirs)
        wide = torch.complex128 if mine.dtype.is_complex else torch.float64
        mine, theirs = mine.detach().to(wide), theirs.detach().to(wide)
        largest = float(theirs.abs().nan_to_num(0, 0, 0).max())
        return torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4 * largest, equal_nan=True)

    return all(alike(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("op", op_db, ids=lambda op: op.full_name)
def test_layout_changes_no_result(device, op):
    if torch.float32 not in op.supported_dtypes(device):
        pytest.skip("takes no float32")
    compared = 0
    for sample in op.sample_inputs(device, torch.float32, requires_grad=op.supports_autograd):
        operands = (sample.input, sample.args, sample.kwargs)
        if RANKS.isdisjoint(tensor.dim() for tensor in tensors(operands)):
            continue
        try:
            expected, again = (results(op, operands, "nchw") for _ in range(2))
        except Exception:
            continue  # it is no operator of this device, or has no backward
        if not agree(expected, again):
            continue
        try:
            same = agree(results(op, operands, "channels_last"), expected)
        except RuntimeError:
            if op.name not in OTHERWISE:
                raise
            same = False
        if not same and op.name in OTHERWISE:
            pytest.xfail(OTHERWISE[op.name])
        assert same, sample
        compared += 1
        if compared == SAMPLES:
            break
    if not compared:
        pytest.skip("has no samples of sequences, images or volumes")
