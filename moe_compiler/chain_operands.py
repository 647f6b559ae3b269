"""The operands of a chain as layouts in T, and samples of them: what a chain is timed on without a model's data.

A chain's operands are nodes of a graph, with fake values. Their sizes and strides are written in T, the chain's number
of tokens, whatever symbols the graph has for it; a size that depends on anything else cannot be made up. A sample has
values that a block could have: unit normal activations, small weights, and one routing that ids, order and offsets
share. Random numbers come from a generator of their own, so that the model's are what they were.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moe_compiler.cost import T
from moe_compiler.dag import block_sizes
from moe_compiler.launch import Chain
from moe_compiler.moe_ir import size_expr
from moe_compiler.runtime_kernels.chain.program import Program
from moe_compiler.runtime_kernels.registry import kernel

__all__ = ["Layout", "NoSample", "are_weights", "operand_layouts", "sample_operands"]


class NoSample(ValueError):
    """Operands that cannot be made up; the message says of which one and why."""


@dataclass(frozen=True)
class Layout:
    """One tensor: `name` of its input, sizes and strides in T; `weight` for the tensors of a list."""

    name: str
    dtype: torch.dtype
    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    weight: bool

    def __str__(self) -> str:
        shape, stride = (" ".join(map(str, sizes)) for sizes in (self.shape, self.stride))
        return f"{self.name} {self.dtype} {shape} / {stride}"


def operand_layouts(chain: Chain) -> tuple[Layout, ...]:
    """The layout of every operand, in their order. Raises NoSample for a size that is not a function of T alone."""
    named = [
        (name, count is not None) for name, count in chain.program.inputs for _ in range(1 if count is None else count)
    ]
    source, dim = chain.program.symbols["T"]
    position = [name for name, _ in named].index(source)
    tokens = size_expr(chain.operands[position].meta["val"].shape[dim])
    return tuple(
        _layout(name, weight, node, tokens) for (name, weight), node in zip(named, chain.operands, strict=True)
    )


def _layout(name: str, weight: bool, node: Node, tokens: sympy.Expr) -> Layout:
    value = node.meta["val"]

    def in_tokens(size: object) -> sympy.Expr:
        written = size_expr(size).subs(tokens, T) if tokens.free_symbols else size_expr(size)
        if written.free_symbols - {T}:
            raise NoSample(
                f"operand {name} has a size of {size_expr(size)}, which the number of tokens does not decide"
            )
        return written

    return Layout(name, value.dtype, tuple(map(in_tokens, value.shape)), tuple(map(in_tokens, value.stride())), weight)


def are_weights(program: Program) -> list[bool]:
    """For each operand of a program whether it is a weight: an element of a list."""
    return [count is not None for _, count in program.inputs for _ in range(1 if count is None else count)]


def sample_operands(
    chain: Chain, tokens: int, device: str, seed: int = 0, weights: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Operands of the chain for T tokens on `device`, the same for the same seed. Raises NoSample.

    weights: of an earlier sample, to be taken over; else they are made as well.
    """
    sizes = block_sizes(chain.nodes)
    random = torch.Generator(device).manual_seed(seed)
    experts, k = sizes["E"], sizes["k"]
    ids = torch.rand(tokens, experts, generator=random, device=device).topk(k).indices
    perm, starts = kernel("order").reference(ids=ids, num_experts=experts)
    routing = {"ids": ids, "perm": perm, "starts": starts}
    kept = iter(weights or ())
    return [
        next(kept) if layout.weight and weights else _sample(layout, tokens, routing, random, device)
        for layout in operand_layouts(chain)
    ]


def _sample(layout: Layout, tokens: int, routing: dict[str, Tensor], random: torch.Generator, device: str) -> Tensor:
    shape, stride = (tuple(int(size.subs(T, tokens)) for size in sizes) for sizes in (layout.shape, layout.stride))
    if any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)):
        raise NoSample(f"operand {layout.name} is expanded: its elements share memory")
    made = torch.empty_strided(shape, stride, dtype=layout.dtype, device=device)
    if layout.dtype.is_floating_point:
        return made.normal_(std=0.02 if layout.weight else 1.0, generator=random)
    # An input is named after the parameter that reads it, with a number when the name was taken.
    value = routing.get(re.sub(r"_\d+$", "", layout.name))
    if value is None or value.shape != made.shape:
        raise NoSample(f"operand {layout.name} is a {layout.dtype} of shape {list(shape)}: nothing says what it may be")
    return made.copy_(value)
