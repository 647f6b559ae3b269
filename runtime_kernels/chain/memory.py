"""What a chain allocates besides its inputs and outputs, from its program alone.

The launcher allocates a buffer before the launch that writes it and frees it after the last one that reads it, so the
lifetimes are in the program. Not in it: the partial sums that the gradient of the routing weights adds up (a number a
pair and tile of the intermediate size), copies of operands whose rows are not contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from moe_compiler.runtime_kernels.chain.chunks import rounds
from moe_compiler.runtime_kernels.chain.program import Program, ProgramError, Variant, dtype_named
from moe_compiler.runtime_kernels.chain.shapes import compile_shape

__all__ = ["ALIGNMENT", "lifetimes", "peak_bytes", "variant_peak"]

# In bytes: what torch's allocator rounds a block to, and where a chain's own memory puts its buffers.
ALIGNMENT = 512


def lifetimes(variant: Variant, outputs: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(first, last) launch that uses each buffer which is no output."""
    found: dict[str, tuple[int, int]] = {}
    for index, launch in enumerate(variant.launches):
        for name in (*launch.ins.values(), *launch.outs.values()):
            if name is not None and name in variant.buffers and name not in outputs:
                found[name] = (found[name][0] if name in found else index, index)
    return found


def peak_bytes(program: Program, sizes: Mapping[str, int]) -> int:
    """The most memory in bytes that a run allocates at one time besides inputs, weights and outputs.

    sizes: the value of each symbol of the program; "T" chooses the variant. Raises ProgramError.
    """
    tokens = sizes.get("T")
    fitting = (v for v in program.variants if v.max_tokens is None or (tokens is not None and tokens <= v.max_tokens))
    return variant_peak(program, next(fitting), sizes)


def variant_peak(program: Program, variant: Variant, sizes: Mapping[str, int]) -> int:
    """As `peak_bytes`, of one variant, whatever T it is for."""
    if variant.chunks is not None:
        sizes = {**sizes, "T": max(count for _, count in rounds(sizes["T"], variant.chunks.tokens))}
    symbols = tuple(sorted(sizes))
    values = [sizes[symbol] for symbol in symbols]
    alive = [0] * len(variant.launches)
    lists = dict(program.inputs)
    for name, (first, last) in lifetimes(variant, program.outputs).items():
        buffer = variant.buffers[name]
        if buffer.like is not None and lists[buffer.like] == 0:
            continue
        if buffer.shape is None:
            raise ProgramError(f"variant {variant.name!r}: the size of buffer {name!r}, like an input, is not known")
        elements = prod(compile_shape(buffer.shape, symbols)(values))
        size = -(-elements * dtype_named(buffer.dtype).itemsize // ALIGNMENT) * ALIGNMENT
        for index in range(first, last + 1):
            alive[index] += size
    return max(alive, default=0)
