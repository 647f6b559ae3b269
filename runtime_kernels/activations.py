"""The activations between the two expert matmuls, forward and backward, in plain torch.

Both work in fp32 (fp64 for fp64) and round once, as the device kernels do.
    act = f(gate) * up   if gated, else   act = f(gate)
A pre-activation `preact_SN` holds gate in its columns [0, I) and up in its columns [I, 2I); N = I when not gated.

An activation travels as text: a name, or a name with parameters, "silu(alpha=1.702,limit=7.0,shift=1.0)", which says
    act = f(min(gate, limit)) * (clamp(up, -limit, limit) + shift),   f = gate * sigmoid(alpha * gate) for silu
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class ActivationRule:
    """An activation with its parameters.

    name    one of ACTIVATIONS: the function of the gate
    alpha   of silu: gate * sigmoid(alpha * gate)
    limit   the gate is clamped from above to it, and up to -limit .. limit; None: neither
    shift   added to up, behind its clamp
    """

    name: str
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    @property
    def text(self) -> str:
        """The canonical text: parameters that do nothing are left out."""
        given = [f"alpha={self.alpha}"] if self.alpha != 1.0 else []
        given += [f"limit={self.limit}"] if self.limit is not None else []
        given += [f"shift={self.shift}"] if self.shift != 0.0 else []
        return f"{self.name}({','.join(given)})" if given else self.name


@lru_cache(maxsize=256)
def parse_activation(text: str) -> ActivationRule:
    """The rule of an activation's text. Raises ValueError, which names what is not known."""
    name, bracket, rest = text.partition("(")
    if name not in ACTIVATIONS or (bracket and not rest.endswith(")")):
        raise ValueError(f"activation {text!r} is not known; use one of {', '.join(ACTIVATIONS)}")
    values: dict[str, float] = {}
    for part in rest[:-1].split(",") if bracket else ():
        key, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if key not in ("alpha", "limit", "shift") or not math.isfinite(value) or (key == "limit" and value <= 0):
            raise ValueError(f"activation {text!r}: {part!r} is not one of alpha=, limit= (above 0), shift= a number")
        values[key] = value
    if "alpha" in values and name != "silu":
        raise ValueError(f"activation {text!r}: only silu has an alpha")
    return ActivationRule(name, **values)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and activations are computed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_activation(text: str, gated: bool = True) -> None:
    """Raise ValueError when `text` is no activation, or shifts an up that is not there."""
    if parse_activation(text).shift and not gated:
        raise ValueError(f"activation {text!r} shifts up, but gated is False")


def _clamped(rule: ActivationRule, gate: Tensor) -> Tensor:
    return gate if rule.limit is None else gate.clamp(max=rule.limit)


def _function(rule: ActivationRule, gate: Tensor) -> Tensor:
    """f(gate), of the gate as clamped already; a new tensor."""
    if rule.name == "silu":
        return F.silu(gate) if rule.alpha == 1.0 else torch.sigmoid(gate * rule.alpha).mul_(gate)
    if rule.name == "gelu":
        return F.gelu(gate)
    if rule.name == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    positive = F.relu(gate)
    return positive if rule.name == "relu" else positive.mul_(positive)


def _derivative_times(rule: ActivationRule, gate: Tensor, grad: Tensor) -> Tensor:
    """grad * f'(gate), both in the wide dtype; the gate as clamped already."""
    if rule.name == "silu":
        # alpha * f is silu of alpha * gate.
        return torch.ops.aten.silu_backward(grad, gate if rule.alpha == 1.0 else gate * rule.alpha)
    if rule.name == "gelu":
        return torch.ops.aten.gelu_backward(grad, gate)
    if rule.name == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")
    if rule.name == "relu":
        return grad * (gate > 0)
    return grad * F.relu(gate).mul_(2)


def _other(rule: ActivationRule, up: Tensor) -> Tensor:
    """What f(gate) is multiplied with: up, clamped and shifted."""
    if rule.limit is not None:
        up = up.clamp(-rule.limit, rule.limit)
    return up + rule.shift if rule.shift else up


def split(preact: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    """The gate and up halves of a pre-activation, as views; up is None when not gated."""
    if not gated:
        return preact, None
    half = preact.shape[-1] // 2
    return preact[..., :half], preact[..., half:]


def activate_parts(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """act [rows, I] in the dtype of `gate`, rounded once, contiguous; up is None when not gated."""
    rule, compute = parse_activation(activation), wide(gate.dtype)
    act = _function(rule, _clamped(rule, gate.to(compute)))
    if up is not None:
        # up itself needs no copy in the wide dtype; what is made of it does.
        act.mul_(_other(rule, up if rule.limit is None and not rule.shift else up.to(compute)))
    return act.to(gate.dtype).contiguous()


def activate(preact: Tensor, activation: str, gated: bool) -> Tensor:
    """act [rows, I] of a pre-activation [rows, N], in its dtype."""
    return activate_parts(*split(preact, gated), activation)


def activate_backward(
    preact: Tensor, grad_act: Tensor, activation: str, gated: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of the pre-activation, and act again.

    `grad_act` [rows, I] is in the wide dtype. Returns grad_preact [rows, N] in the dtype of `preact` (written into
    `out` where given) and act [rows, I] in the wide dtype. Where a clamp holds a value, its gradient is zero.
    """
    rule = parse_activation(activation)
    gate, up = split(preact.to(wide(preact.dtype)), gated)
    grad_preact = torch.empty_like(preact, memory_format=torch.contiguous_format) if out is None else out
    clamped = _clamped(rule, gate)
    value = _function(rule, clamped)
    other = None if up is None else _other(rule, up)
    grad_gate = _derivative_times(rule, clamped, grad_act if other is None else grad_act * other)
    if rule.limit is not None:
        grad_gate = grad_gate * (gate <= rule.limit)
    if up is None or other is None:
        grad_preact.copy_(grad_gate)
        return grad_preact, value.contiguous()
    half = up.shape[-1]
    grad_up = grad_act * value
    if rule.limit is not None:
        grad_up.mul_(up.abs() <= rule.limit)
    grad_preact[..., half:].copy_(grad_up)
    grad_preact[..., :half].copy_(grad_gate)
    return grad_preact, value.mul_(other).contiguous()
