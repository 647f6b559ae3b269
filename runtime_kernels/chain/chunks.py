"""A chain over chunks of the tokens: its launches are made once a chunk, on memory of a chunk's size.

What lies between the kernels of a block has a row a (token, expert) pair, many times the size of the tokens
themselves. Where a variant has `Chunks`, its launches run for some of the tokens, then for the next ones in the same
memory: inputs that have a row a token are cut, and so are the outputs, which are allocated whole. The first launch of
a chain is plain, and so is the first one of each chunk: it starts when all of the chunk before it is complete.

That gives each token the same result only where nothing looks across tokens: see `why_whole`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_compiler.runtime_kernels.registry import kernel

if TYPE_CHECKING:
    from collections.abc import Collection

    from moe_compiler.runtime_kernels.chain.program import Variant

__all__ = ["CHUNK_UNIT", "cut_inputs", "rounds", "why_whole"]

# Chunks begin at multiples of it, so that a row's address is as aligned in a chunk as it is in the whole tensor.
CHUNK_UNIT = 16


def rounds(tokens: int, limit: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each chunk: as few as `limit` tokens a chunk allow, and of about one size.

    limit: a positive multiple of CHUNK_UNIT. Without tokens there is one chunk of none.
    """
    if tokens <= limit:
        return [(0, tokens)]
    size = -(-tokens // (-(-tokens // limit) * CHUNK_UNIT)) * CHUNK_UNIT
    return [(first, min(size, tokens - first)) for first in range(0, tokens, size)]


def cut_inputs(variant: Variant) -> tuple[str, ...]:
    """The inputs of a program that a chunk takes its own rows of: those that a launch reads by token."""
    found: dict[str, None] = {}
    for launch in variant.launches:
        for parameter in kernel(launch.kernel).traits.by_token:
            name = launch.ins.get(parameter)
            if name is not None and name not in variant.buffers:
                found[name] = None
    return tuple(found)


def why_whole(variant: Variant, outputs: Collection[str]) -> str:
    """Why the launches of a variant can only be made for all tokens at once, as the end of a sentence; "" if not so."""
    cut = cut_inputs(variant)
    by_token: set[str] = set()
    for launch in variant.launches:
        traits = kernel(launch.kernel).traits
        by_token.update(name for key, name in launch.outs.items() if key in traits.by_token)
        for key, name in launch.ins.items():
            if name is None or name in variant.buffers or key in traits.by_token:
                continue
            if name in cut:
                return f"{launch.kernel} reads {name} whole"
            if key not in traits.weights and key not in traits.shared:
                return f"{launch.kernel} reads {name}, which is in the order of all tokens' pairs"
    over_all = [name for name in outputs if name not in by_token]
    if over_all:
        return f"it returns {', '.join(over_all)}: sums over all tokens, or rows in the order of all tokens' pairs"
    return "" if cut else "it reads nothing that has a row a token"
