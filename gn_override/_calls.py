"""A norm with an activation by this package's operators, where the call is for them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import DeviceContext

# Other classes, and what stands for a tensor in a trace, know PyTorch's operators alone.
KNOWN = {Tensor, torch.nn.Parameter, FakeTensor}
_KNOWN_OR_NONE = {*KNOWN, type(None)}
# Of others F.group_norm knows whether it takes them.
_INTEGERS = {int, torch.SymInt}
_NUMBERS = {float, int}

# Looked up once: a call is a few microseconds.
_group_norm_act_or_none = torch.ops.gn_override.group_norm_act_or_none.default
_dispatch_modes = torch._C._len_torch_dispatch_stack
_dispatch_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_tracing_state = torch._C._get_tracing_state  # of torch.jit.trace
_transform = torch._C._functorch.maybe_current_level  # of torch.func


def group_norm_act(
    input: Tensor,
    addend: object,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor | None:
    """``functional.group_norm(input + addend, ...)`` as one kernel; None where none does that.

    Where something is added, the kernel rounds no sum and has no backward.

    Args:
        input: [N, C, *spatial].
        addend: None, or whatever is added: a kernel does it where that is [N, C, 1, ...], in
            input's dtype, on a CUDA device.
        num_groups, weight, bias, eps, activation: as in functional.group_norm().
    """
    if (
        torch.compiler.is_compiling()
        or (_dispatch_modes() > 0 and _are_operators_watched())
        or (_function_modes() > 0 and _are_functions_watched())
        or _tracing_state() is not None
        or _transform() is not None
        or type(input) not in KNOWN
        or type(weight) not in _KNOWN_OR_NONE
        or type(bias) not in _KNOWN_OR_NONE
        or type(addend) not in _KNOWN_OR_NONE
        # What F.group_norm refuses before it calls an operator is among these.
        or type(num_groups) not in _INTEGERS
        or type(eps) not in _NUMBERS
        or input.numel() < 2 * num_groups
    ):
        return None
    output: Tensor | None = _group_norm_act_or_none(
        input, addend, num_groups, weight, bias, eps, activation
    )
    return output


def _are_operators_watched() -> bool:
    """Whether a mode sees the operators that are called, other than FakeTensorMode."""
    fake = 0 if _dispatch_mode(_FAKE) is None else 1
    return _dispatch_modes() > fake


def _are_functions_watched() -> bool:
    """Whether a mode sees the functions that are called, other than torch.set_default_device's."""
    return any(type(_function_mode(i)) is not DeviceContext for i in range(_function_modes()))
