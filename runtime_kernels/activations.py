"""The activations between the two expert matmuls, forward and backward, in plain torch.

Both work in fp32 (fp64 for fp64) and round once, as the device kernels do.
    act = f(gate) * up   if gated, else   act = f(gate)
A pre-activation `preact_SN` holds gate in its columns [0, I) and up in its columns [I, 2I); N = I when not gated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and activations are computed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_activation(name: str) -> None:
    """Raise ValueError when `name` is not one of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; use one of {', '.join(ACTIVATIONS)}")


def _function(name: str, gate: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(gate)
    if name == "gelu":
        return F.gelu(gate)
    if name == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    if name == "relu":
        return F.relu(gate)
    if name == "relu2":
        positive = F.relu(gate)
        return positive.mul_(positive)
    raise ValueError(f"activation {name!r} is not known; use one of {', '.join(ACTIVATIONS)}")


def _derivative_times(name: str, gate: Tensor, grad: Tensor) -> Tensor:
    """grad * f'(gate), both in the wide dtype."""
    if name == "silu":
        return torch.ops.aten.silu_backward(grad, gate)
    if name == "gelu":
        return torch.ops.aten.gelu_backward(grad, gate)
    if name == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")
    if name == "relu":
        return grad * (gate > 0)
    if name == "relu2":
        return grad * F.relu(gate).mul_(2)
    raise ValueError(f"activation {name!r} is not known; use one of {', '.join(ACTIVATIONS)}")


def split(preact: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    """The gate and up halves of a pre-activation, as views; up is None when not gated."""
    if not gated:
        return preact, None
    half = preact.shape[-1] // 2
    return preact[..., :half], preact[..., half:]


def activate_parts(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """act [rows, I] in the dtype of `gate`, rounded once, contiguous; up is None when not gated."""
    compute = wide(gate.dtype)
    act = _function(activation, gate.to(compute))
    if up is not None:
        act.mul_(up)
    return act.to(gate.dtype).contiguous()


def activate(preact: Tensor, activation: str, gated: bool) -> Tensor:
    """act [rows, I] of a pre-activation [rows, N], in its dtype."""
    return activate_parts(*split(preact, gated), activation)


def activate_backward(
    preact: Tensor, grad_act: Tensor, activation: str, gated: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of the pre-activation, and act again.

    `grad_act` [rows, I] is in the wide dtype. Returns grad_preact [rows, N] in the dtype of `preact` (written into
    `out` where given) and act [rows, I] in the wide dtype.
    """
    gate, up = split(preact.to(wide(preact.dtype)), gated)
    grad_preact = torch.empty_like(preact, memory_format=torch.contiguous_format) if out is None else out
    value = _function(activation, gate)
    if up is None:
        grad_preact.copy_(_derivative_times(activation, gate, grad_act))
        return grad_preact, value.contiguous()
    half = up.shape[-1]
    grad_preact[..., half:].copy_(grad_act * value)
    grad_preact[..., :half].copy_(_derivative_times(activation, gate, grad_act * up))
    return grad_preact, value.mul_(up).contiguous()
