"""Fake tensors: outputs get the strides that our kernels return.

PyTorch's fake outputs disagree with these for some channels-last inputs, for which and how depends
on the version: (N, C, L) with strides (C*L, 1, C) is contiguous to all of them, and 2.14 takes
every CUDA output for contiguous. So FakeTensorMode asks here first. A call that our kernels would
not take is left to PyTorch, and so is every call while the switch is off.

The operators of this package, group_norm_act and its backward, have fake kernels here too. They do
not ask the switch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, meta_table
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode, torch_decomp_decompositions

from gn_override import _activations, _library

_FORWARD = torch.ops.aten.native_group_norm.default
_BACKWARD = torch.ops.aten.native_group_norm_backward.default

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float64, *_HALF)

# Of the library that is loaded.
_device_types = frozenset(_library.build_info()["backends"])


@functools.cache  # torch takes each once, and gn_override may be reloaded
def install() -> None:
    """Puts the fake implementations in place; they answer from the first follow() on."""
    fake_impls.register_op_impl(_FORWARD)(_fake_forward)
    fake_impls.register_op_impl(_BACKWARD)(_fake_backward)
    torch.library.register_fake("gn_override::group_norm_act", _fake_act)
    torch.library.register_fake("gn_override::group_norm_act_backward", _fake_act_backward)
    torch.library.register_fake("gn_override::group_norm_act_inference", _fake_inference)


def follow() -> None:
    """Makes fake tensors follow the switch."""
    for op in (_FORWARD, _BACKWARD):
        # FakeTensorMode decomposes an operator before it asks its fake implementation, unless
        # it finds the operator here.
        if torch.ops.gn_override.is_enabled():
            meta_table[op] = decomposition_table[op]
        else:
            meta_table.pop(op, None)
    FakeTensorMode.cache_clear()  # it remembers the old strides


def _fake_forward(
    mode: FakeTensorMode,
    func: torch._ops.OpOverload,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Any:
    if not takes_forward(input, weight, bias, N, C, HxW, group, eps):
        return _stock(mode, func, input, weight, bias, N, C, HxW, group, eps)
    param_dtype = _param_dtype(weight, bias, input.dtype)
    with mode:
        return (
            _empty_channels_last(input),
            input.new_empty((N, group), dtype=param_dtype),
            input.new_empty((N, group), dtype=param_dtype),
        )


def _fake_backward(
    mode: FakeTensorMode,
    func: torch._ops.OpOverload,
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: list[bool],
) -> Any:
    args = (grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)
    if not takes_backward(*args):
        return _stock(mode, func, *args)
    dtype = input.dtype if weight is None else weight.dtype
    with mode:
        return (
            _empty_channels_last(input) if output_mask[0] else None,
            input.new_empty((C,), dtype=dtype) if output_mask[1] else None,
            input.new_empty((C,), dtype=dtype) if output_mask[2] else None,
        )


def _stock(mode: FakeTensorMode, func: torch._ops.OpOverload, *args: Any) -> Any:
    """What FakeTensorMode does with the call where there is no entry in meta_table."""
    if func not in meta_table:  # it has done so already
        return NotImplemented
    symbolic = any(
        isinstance(a, torch.SymInt) or (isinstance(a, Tensor) and a._has_symbolic_sizes_strides)
        for a in args
    )
    if symbolic or torch_decomp_decompositions(func):
        with mode:
            return decomposition_table[func](*args)
    return NotImplemented


def _fake_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    N, C, HxW = _sizes(input, num_groups, weight, bias, activation)
    dtype = out_dtype or input.dtype
    ours = _fits_forward(input, weight, bias, N, C, HxW, num_groups, dtype)
    mean, rstd = (input.new_empty((N, num_groups), dtype=_accumulator(input)) for _ in range(2))
    return _empty_like(input, ours, dtype), mean, rstd


def _fake_inference(
    input: Tensor,
    added: Tensor | None,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
) -> Tensor:
    return _fake_act(input, num_groups, weight, bias, eps, activation)[0]


def _fake_act_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    activation: str,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    N, C, HxW = _sizes(input, num_groups, weight, bias, activation)
    dtype = _param_dtype(weight, bias, grad_out.dtype)
    ours = mean.dtype in (dtype, _accumulator(input)) and _fits_backward(
        grad_out, input, mean, rstd, weight, bias, dtype, N, C, HxW, num_groups, grad_out.dtype
    )
    return (
        _empty_like(input, ours, input.dtype) if output_mask[0] else None,
        input.new_empty((C,), dtype=dtype) if output_mask[1] else None,
        input.new_empty((C,), dtype=dtype) if output_mask[2] else None,
    )


def _sizes(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, activation: str
) -> tuple[int, int, int]:
    """N, C and HxW; raises what the operators raise for arguments that do not fit."""
    _activations.check(activation)
    fits = input.ndim >= 2 and num_groups > 0 and input.shape[1] % num_groups == 0
    if not fits or any(
        t.ndim != 1 or t.shape[0] != input.shape[1] or t.device != input.device
        for t in (weight, bias)
        if t is not None
    ):
        torch.group_norm(input, num_groups, weight, bias)
    return input.shape[0], input.shape[1], math.prod(input.shape[2:])


def _accumulator(X: Tensor) -> torch.dtype:
    return torch.float64 if X.dtype == torch.float64 else torch.float32


def _param_dtype(weight: Tensor | None, bias: Tensor | None, otherwise: torch.dtype) -> torch.dtype:
    return next((t.dtype for t in (weight, bias) if t is not None), otherwise)


# The rest mirrors native/binding/classify.cpp.


def takes_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> bool:
    """Whether our kernels run this call of native_group_norm, on fake tensors or real ones."""
    return torch.ops.gn_override.is_enabled() and _fits_forward(
        input, weight, bias, N, C, HxW, group, input.dtype
    )


def takes_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> bool:
    """Whether our kernels run this call of group_norm_act, while the switch is on."""
    if not torch.ops.gn_override.is_enabled() or input.ndim < 2:
        return False
    N, C, HxW = input.shape[0], input.shape[1], math.prod(input.shape[2:])
    return _fits_forward(input, weight, bias, N, C, HxW, num_groups, out_dtype or input.dtype)


def takes_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: list[bool],
) -> bool:
    """Whether our kernels run this call of native_group_norm_backward."""
    return torch.ops.gn_override.is_enabled() and _fits_backward(
        grad_out, input, mean, rstd, weight, None, mean.dtype, N, C, HxW, group, input.dtype
    )


def _fits_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    out_dtype: torch.dtype,
) -> bool:
    param_dtype = _param_dtype(weight, bias, out_dtype)
    return _takes(input, param_dtype, N, C, HxW, group, out_dtype) and _parameters_fit(
        input, weight, bias, param_dtype
    )


def _fits_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    param_dtype: torch.dtype,
    N: int,
    C: int,
    HxW: int,
    group: int,
    out_dtype: torch.dtype,
) -> bool:
    return (
        _takes(input, param_dtype, N, C, HxW, group, out_dtype)
        and grad_out.shape == input.shape
        and _fits(grad_out, input, out_dtype, input.numel())
        and _fits(mean, input, mean.dtype, N * group)
        and _fits(rstd, input, mean.dtype, N * group)
        and _parameters_fit(input, weight, bias, param_dtype)
    )


def _takes(
    X: Tensor,
    param_dtype: torch.dtype,
    N: int,
    C: int,
    HxW: int,
    group: int,
    out_dtype: torch.dtype,
) -> bool:
    """Whether our kernels run a call with this input, as far as the input decides."""
    wide = out_dtype != X.dtype
    refused = not wide and _refused_by_stock(X, param_dtype)
    half = X.dtype in _HALF
    return (
        X.device.type in _device_types
        and (_prefers_channels_last(X) or (refused and _one_layout(X)))
        and X.shape[0] == N
        and X.shape[1] == C
        and X.numel() == N * C * HxW
        and not _guard_or_false(X.numel() == 0)
        and group > 0
        and C % group == 0
        and X.dtype in _DTYPES
        and all(
            dtype == X.dtype or (half and dtype == torch.float32)
            for dtype in (param_dtype, out_dtype)
        )
        and not (wide and (param_dtype != out_dtype or X.device.type != "cuda"))
    )


def _fits(tensor: Tensor, X: Tensor, dtype: torch.dtype, numel: int) -> bool:
    return (
        tensor.numel() == numel
        and tensor.dtype == dtype
        and tensor.device == X.device
        and tensor.layout == torch.strided
    )


def _parameters_fit(
    X: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> bool:
    return all(
        t.ndim == 1 and _fits(t, X, dtype, X.shape[1]) for t in (weight, bias) if t is not None
    )


def _refused_by_stock(X: Tensor, param_dtype: torch.dtype) -> bool:
    return X.device.type == "cuda" and param_dtype != X.dtype


def _one_layout(X: Tensor) -> bool:
    return (
        2 <= X.ndim <= 5
        and torch._prims_common.is_contiguous_or_false(X)
        and (
            _guard_or_false(X.shape[1] == 1)
            or _guard_or_false(X.numel() == X.shape[0] * X.shape[1])
        )
    )


def _prefers_channels_last(X: Tensor) -> bool:
    if X.layout != torch.strided or not 3 <= X.ndim <= 5:
        return False
    if torch._prims_common.is_contiguous_or_false(X):
        return False
    if all(
        _guard_or_false(size == 1) or _guard_or_false(stride == expected)
        for size, stride, expected in zip(
            X.shape, X.stride(), _channels_last_strides(X), strict=True
        )
    ):
        return True
    return torch._prims_common.suggest_memory_format(X) in (
        torch.channels_last,
        torch.channels_last_3d,
    )


def _channels_last_strides(X: Tensor) -> list[int]:
    strides = [0] * X.ndim
    stride = 1
    for d in (1, *range(X.ndim - 1, 1, -1), 0):
        strides[d] = stride
        stride = stride * X.shape[d]
    return strides


def _empty_channels_last(X: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return X.new_empty_strided(X.shape, _channels_last_strides(X), dtype=dtype)


def _empty_like(X: Tensor, ours: bool, dtype: torch.dtype) -> Tensor:
    """What group_norm_act returns: channels-last from our kernels, else NCHW."""
    return _empty_channels_last(X, dtype) if ours else X.new_empty(X.shape, dtype=dtype)


def _guard_or_false(condition: Any) -> bool:
    """The condition; False where it hangs on sizes that are not known while tracing."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)
