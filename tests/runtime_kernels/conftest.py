"""A block of experts in every weight layout, and the naive dense formulation in float64 that judges it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compiler.runtime_kernels.activations import parse_activation
from moe_compiler.runtime_kernels.weights import in_turns, out_size

# Relative to the norm. The narrow types round the pre-activation, the activation and the down result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda g: g * torch.sigmoid(g),
    "gelu": lambda g: g * 0.5 * (1 + torch.erf(g / 2**0.5)),
    "gelu_tanh": lambda g: 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))),
    "relu": lambda g: torch.clamp(g, min=0),
    "relu2": lambda g: torch.clamp(g, min=0) ** 2,
}


LISTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass
class Block:
    """Tensors and attributes of one call of `experts`. Leaves require a gradient."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]
    gate_bias: list[Tensor]
    up_bias: list[Tensor]
    down_bias: list[Tensor]
    activation: str
    gated: bool
    weight_at: str
    layout: str

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *(tensor for name in LISTS for tensor in getattr(self, name))]

    @property
    def arguments(self) -> tuple[Any, ...]:
        tensors = (self.x, self.ids, self.weights, *(getattr(self, name) for name in LISTS))
        return (*tensors, self.activation, self.gated, self.weight_at, self.dtype)

    def detached(self) -> Block:
        """The same values without gradients."""
        values = dict(vars(self))
        for name in ("x", "weights"):
            values[name] = values[name].detach()
        for name in LISTS:
            values[name] = [t.detach() for t in values[name]]
        return Block(**values)

    def double(self) -> Block:
        """The same values in float64, as leaves of their own."""
        return self.like(torch.float64)

    def like(self, dtype: torch.dtype | None = None) -> Block:
        """The same values in another dtype or their own, as leaves of their own."""
        values = dict(vars(self))
        for name in ("x", "weights"):
            values[name] = values[name].detach().to(dtype or self.dtype).requires_grad_()
        for name in LISTS:
            values[name] = [t.detach().to(dtype or self.dtype).requires_grad_() for t in values[name]]
        return Block(**values)

    def logical(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """gate, up [E,I,H] and down [E,H,I], differentiable in the leaves."""

        def stacked(tensors: list[Tensor]) -> Tensor:
            return tensors[0] if tensors[0].dim() > 2 else torch.stack(tensors)

        gate, down = stacked(self.gate), stacked(self.down)
        if not self.gated:
            return gate, None, down
        if gate.dim() == 4:
            return gate[:, 0], gate[:, 1], down
        if self.up:
            return gate, stacked(self.up), down
        first, second = gate.chunk(2, dim=1)
        return first, second, down

    def logical_biases(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Biases [E,I], [E,I] and [E,H], zeros where there are none, differentiable in the leaves."""

        def stacked(tensors: list[Tensor], like: Tensor) -> Tensor:
            if not tensors:
                return like.new_zeros(like.shape[:2])
            return tensors[0] if tensors[0].dim() > 1 else torch.stack(tensors)

        gate, up, down = self.logical()
        down_bias = stacked(self.down_bias, down)
        if up is None or self.up or not self.gate_bias:
            return stacked(self.gate_bias, gate), None if up is None else stacked(self.up_bias, up), down_bias
        both = stacked(self.gate_bias, gate)
        first, second = both.unbind(1) if both.dim() == 3 else both.chunk(2, dim=1)
        return first, second, down_bias

    def dense(self) -> Tensor:
        """Every expert computes every token; the choice is a mask. In the dtype of x, meant for float64."""
        gate, up, down = self.logical()
        gate_bias, up_bias, down_bias = self.logical_biases()
        rule = parse_activation(self.activation)
        y = torch.zeros(self.x.shape[0], down.shape[1], dtype=self.x.dtype)
        for j in range(self.ids.shape[1]):
            for e in range(gate.shape[0]):
                weight = (self.weights[:, j] * (self.ids[:, j] == e)).unsqueeze(1)
                rows = self.x * self.weights[:, j : j + 1] if self.weight_at == "input" else self.x
                inner = rows @ gate[e].T + gate_bias[e]
                if rule.limit is not None:
                    inner = torch.clamp(inner, max=rule.limit)
                scaled = rule.alpha != 1.0
                hidden = inner * torch.sigmoid(rule.alpha * inner) if scaled else _ACTIVATIONS[rule.name](inner)
                if up is not None:
                    other = rows @ up[e].T + up_bias[e]
                    other = other if rule.limit is None else torch.clamp(other, -rule.limit, rule.limit)
                    hidden = hidden * (other + rule.shift)
                out = hidden @ down[e].T + down_bias[e]
                y = y + (out * weight if self.weight_at == "output" else out * (self.ids[:, j : j + 1] == e))
        return y


def _routing(kind: str, tokens: int, k: int, experts: int) -> Tensor:
    if kind == "one":  # every token on the last expert
        return torch.full((tokens, k), experts - 1)
    if kind == "skewed":  # expert 0 has most tokens, odd experts have none
        ids = torch.rand(tokens, experts).argsort(1)[:, :k] // 2 * 2
        return torch.where(torch.rand(tokens, k) < 0.7, 0, ids)
    ids = torch.rand(tokens, experts).argsort(1)[:, :k]
    if kind == "outside":
        ids = torch.where(torch.rand(tokens, k) < 0.3, experts + 2, ids)
        ids = torch.where(torch.rand(tokens, k) < 0.1, -1, ids)
    return ids


def _make_block(
    tokens: int = 37,
    k: int = 2,
    experts: int = 5,
    hidden: int = 12,
    inner: int = 7,
    layout: str = "packed",
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    gated: bool = True,
    weight_at: str = "output",
    routing: str = "random",
    ids_dtype: torch.dtype = torch.int64,
    biased: tuple[str, ...] = (),
) -> Block:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_()

    turns = layout.startswith("turns")
    parts = 2 if gated and layout not in ("separate", "list") else 1
    gate = (torch.randn(experts, parts * inner, hidden, dtype=torch.float64) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, dtype=torch.float64) / inner**0.5).to(dtype)
    up: list[Tensor] = []
    if gated and parts == 1:
        second = torch.randn_like(gate) / hidden**0.5
        up = [leaf(second)] if layout == "separate" else [leaf(t.clone()) for t in second]
    if layout.endswith("transposed"):
        gate = gate.transpose(1, 2).contiguous().transpose(1, 2)
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    gates, downs = [leaf(in_turns(gate, 1) if turns else gate)], [leaf(down)]
    if layout.startswith("list"):
        gates = [leaf(t.clone()) for t in gate]
        downs = [leaf(t.clone()) for t in down]

    def bias(name: str, weights: list[Tensor]) -> list[Tensor]:
        if name not in biased or not weights:
            return []
        rows = torch.randn(experts, out_size(weights), dtype=torch.float64).to(dtype)
        if turns and name == "gate":
            return [leaf(in_turns(rows, 1))]
        return [leaf(row.clone()) for row in rows] if layout.startswith("list") else [leaf(rows)]

    return Block(
        x=leaf(torch.randn(tokens, hidden, dtype=torch.float64).to(dtype)),
        ids=_routing(routing, tokens, k, experts).to(ids_dtype),
        weights=leaf(torch.rand(tokens, k, dtype=torch.float64).add(0.1).to(dtype)),
        gate=gates,
        up=up,
        down=downs,
        gate_bias=bias("gate", gates),
        up_bias=bias("up", up),
        down_bias=bias("down", downs),
        activation=activation,
        gated=gated,
        weight_at=weight_at,
        layout=layout,
    )


@pytest.fixture
def make_block() -> Callable[..., Block]:
    """make_block(tokens=, layout=, dtype=, ...) -> Block."""
    return _make_block


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """assert_close(actual, expected, dtype): the error relative to the norm is within the dtype's tolerance."""

    def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "result") -> None:
        assert actual.shape == expected.shape, what
        error = (actual.detach().double() - expected.detach().double()).norm()
        assert error <= TOLERANCE[dtype] * expected.detach().double().norm() + 1e-30, f"{what}: error {error:.3g}"

    return check


@pytest.fixture
def operator_calls() -> type[TorchDispatchMode]:
    """A dispatch mode that records the names of the operators that run below autograd."""

    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    return Calls
