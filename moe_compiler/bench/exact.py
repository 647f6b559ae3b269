"""The block in float64, one expert at a time, and the rule by which an output or a gradient counts as right.

The float64 run chooses its experts itself. Where the choice is a near tie (`Router.near_ties`), a correct router in the
block's dtype may choose otherwise: those tokens are left out of the comparison of outputs, and get a gradient of zero
when gradients are compared, so that they add nothing to any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.bench.block import Block

__all__ = ["FACTOR", "TOLERANCE", "Choice", "choice_of", "exact_output", "gradient_errors", "output_error", "problem"]

# An error may be FACTOR times eager's own plus this, both relative to the norm.
FACTOR = 1.5
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Choice:
    """ids [T, k] and weights [T, k] of x in float64; `near` [T]: where the choice is a near tie."""

    ids: Tensor
    weights: Tensor
    near: Tensor


@torch.no_grad()
def choice_of(block: Block, x: Tensor) -> Choice:
    """What the router of a block chooses for x [T, H]."""
    logits = block.router.exact_logits(x)
    ids = block.router.choose(logits)
    return Choice(ids, block.router.weigh(logits, ids), block.router.near_ties(x))


@torch.no_grad()
def exact_output(block: Block, x: Tensor, choice: Choice) -> Tensor:
    """y [T, H] in float64."""
    x = x.double()
    y = torch.zeros_like(x)
    for expert, token, place in _pairs(block, choice.ids):
        rows = _expert(block, x[token], *_parameters(block, expert))
        y.index_add_(0, token, rows * choice.weights[token, place, None])
    return y if block.shared is None else y + _shared(block, x, _shared_parameters(block))


def output_error(y: Tensor, exact: Tensor, near: Tensor) -> float:
    """Relative error of y [T, H] over the tokens that are no near ties; infinite for a wrong shape or no such token."""
    if y.shape != exact.shape or bool(near.all()):
        return float("inf")
    kept = ~near
    difference = y.detach().double()[kept] - exact[kept]
    return (difference.norm() / exact[kept].norm()).item()


def gradient_errors(
    block: Block, x: Tensor, grad_y: Tensor, choice: Choice, *, given: tuple[Tensor, Tensor] | None = None
) -> dict[str, float]:
    """Relative errors of `x.grad` and of the gradients of the block's parameters, by name; infinite where one misses.

    x: [T, H], its gradient is that of an output with gradient grad_y [T, H], which must be zero at near ties.
    given: (weights, ids), each [T, k], where these were an input: the gradient of the weights is then compared in place
    of the router's, which it does not run through.
    """
    parts: dict[str, list[float]] = {}

    def compare(name: str, found: Tensor | None, wanted: Tensor) -> None:
        off, size = parts.setdefault(name, [0.0, 0.0])
        missing = found is None or found.shape != wanted.shape
        off += float("inf") if missing else (found.double() - wanted).norm().item() ** 2  # type: ignore[union-attr]
        parts[name] = [off, size + wanted.norm().item() ** 2]

    grad_y = grad_y.double()
    x64 = x.detach().double()
    grad_x, grad_weights = torch.zeros_like(x64), torch.zeros_like(choice.weights)
    hit = set()
    for expert, token, place in _pairs(block, choice.ids):
        hit.add(expert)
        leaves = [None if p is None else p.requires_grad_() for p in _parameters(block, expert)]
        rows = x64[token].requires_grad_()
        scales = choice.weights[token, place].detach().requires_grad_()
        (_expert(block, rows, *leaves) * scales[:, None]).backward(grad_y[token])
        grad_x.index_add_(0, token, _grad(rows))
        grad_weights[token, place] = _grad(scales)
        for name, leaf in zip(_NAMES, leaves, strict=True):
            if leaf is not None:
                whole = getattr(block, name).grad
                compare(name, None if whole is None else whole[expert], _grad(leaf))
    for expert in set(range(block.shape.experts)) - hit:  # their gradients are zero, and must be
        for name, parameter in zip(_NAMES, _parameters(block, expert), strict=True):
            if parameter is not None:
                whole = getattr(block, name).grad
                compare(name, None if whole is None else whole[expert], torch.zeros_like(parameter))
    if block.shared is not None:
        shared = {name: p.requires_grad_() for name, p in _shared_parameters(block).items()}
        rows = x64.clone().requires_grad_()
        _shared(block, rows, shared).backward(grad_y)
        grad_x += _grad(rows)
        for name, parameter in shared.items():
            compare(f"shared.{name}", block.shared.get_parameter(name).grad, _grad(parameter))
    if given is None:
        rows = x64.clone().requires_grad_()
        weight = block.router.weight.detach().double().requires_grad_()
        bias = None if block.router.bias is None else block.router.bias.detach().double().requires_grad_()
        logits = F.linear(rows, weight, bias)
        block.router.weigh(logits, choice.ids).backward(grad_weights)
        grad_x += _grad(rows)
        compare("router.weight", block.router.weight.grad, _grad(weight))
        if bias is not None and block.router.bias is not None:
            compare("router.bias", block.router.bias.grad, _grad(bias))
    else:
        # By expert: which of two close weights comes first is no part of the choice.
        weights, ids = given
        blank = grad_weights.new_zeros(ids.shape[0], block.shape.experts)
        found = None if weights.grad is None else blank.scatter(1, ids, weights.grad.double())
        compare("weights", found, blank.scatter(1, choice.ids, grad_weights))
    compare("x", x.grad, grad_x)
    return {name: _ratio(off, size) for name, (off, size) in parts.items()}


def problem(error: float, eager: float, dtype: torch.dtype, what: str = "") -> str:
    """Empty when an error is within the rule; else what is wrong."""
    limit = FACTOR * eager + TOLERANCE[dtype]
    if error <= limit:  # written so that a NaN fails
        return ""
    return f"{what}{': ' if what else ''}error {error:.1e} against float64, {limit:.1e} is allowed"


_NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


def _pairs(block: Block, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens, the place among the k of each) of every expert that was chosen."""
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        yield expert, token, place


def _parameters(block: Block, expert: int) -> list[Tensor | None]:
    """gate_up, down and their biases of one expert in float64, None where there are none."""
    found = [getattr(block, name) for name in _NAMES]
    return [None if tensor is None else tensor[expert].detach().double() for tensor in found]


def _expert(
    block: Block,
    rows: Tensor,
    gate_up: Tensor | None,
    down: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """rows [N, H] -> [N, H] through one expert."""
    assert gate_up is not None and down is not None
    if block.shape.transposed:
        gate_up, down = gate_up.t(), down.t()
    return F.linear(block.activate(F.linear(rows, gate_up, gate_up_bias)), down, down_bias)


def _shared_parameters(block: Block) -> dict[str, Tensor]:
    assert block.shared is not None
    return {name: p.detach().double() for name, p in block.shared.named_parameters()}


def _shared(block: Block, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    assert block.shared is not None
    return torch.func.functional_call(block.shared, parameters, (x,))


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _ratio(off: float, size: float) -> float:
    # Where all of a gradient is exactly zero, so must the other be.
    return (off / size) ** 0.5 if size else (0.0 if off == 0 else float("inf"))
