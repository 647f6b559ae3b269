"""How much memory a chain takes between its kernels, and options["memory"] = "low", which bounds it.

Between the kernels of a block lies a row a (token, expert) pair: k times the tokens, of the intermediate size (`act`)
and of the hidden size (`pairs`), both alive while the down projection runs. "low" cuts the tokens of a variant into
chunks where that would pass CHUNK_BYTES. Weights are read once a chunk, so chunks are as large as the bound allows: at
half a gigabyte they hold thousands of tokens, whose products take longer than reading the weights. Below the bound
nothing is cut, and nothing is lost.

A training step keeps the pre-activation and the order of all pairs for its backward, whose gradients of the weights
sum over all tokens: those chains stay whole, and the report says so. Under activation checkpointing nothing is kept,
and the first forward is cut as it is in inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moe_compiler.report import MemoryRecord
from moe_compiler.runtime_kernels.chain.chunks import CHUNK_UNIT, cut_inputs, why_whole
from moe_compiler.runtime_kernels.chain.memory import variant_peak
from moe_compiler.runtime_kernels.chain.program import Chunks, Program, Variant

__all__ = ["CHUNK_BYTES", "in_chunks", "memory_records"]

# What the temporary memory of a chain in chunks may take.
CHUNK_BYTES = 512 * 2**20
# Where the search for the size of a chunk ends: no run has as many tokens.
_MOST_TOKENS = 2**26


def in_chunks(program: Program) -> tuple[Program, dict[str, str]]:
    """The program with chunks where CHUNK_BYTES would be passed, and why a variant stays whole, by its name."""
    changed: list[Variant] = []
    why: dict[str, str] = {}
    for variant in program.variants:
        reason = why_whole(variant, program.outputs)
        if reason:
            why[variant.name] = reason
        else:
            tokens = _most_tokens(program, variant)
            if variant.max_tokens is None or tokens < variant.max_tokens:
                variant = replace(variant, chunks=Chunks(tokens, cut_inputs(variant)))
        changed.append(variant)
    return replace(program, variants=tuple(changed)), why


def memory_records(program: Program, tokens: Mapping[str, int], why: Mapping[str, str]) -> dict[str, MemoryRecord]:
    """What the report shows of each variant, by name: its memory at tokens[name], and why "low" leaves it whole."""
    return {
        variant.name: MemoryRecord(
            tokens=tokens[variant.name],
            bytes=variant_peak(program, variant, {"T": tokens[variant.name]}),
            chunk_tokens=None if variant.chunks is None else variant.chunks.tokens,
            whole=why.get(variant.name, ""),
        )
        for variant in program.variants
    }


def _most_tokens(program: Program, variant: Variant) -> int:
    """The largest chunk whose memory stays within CHUNK_BYTES; the smallest there is where none does."""
    low, high = 1, _MOST_TOKENS // CHUNK_UNIT
    while low < high:
        middle = (low + high + 1) // 2
        if variant_peak(program, variant, {"T": middle * CHUNK_UNIT}) <= CHUNK_BYTES:
            low = middle
        else:
            high = middle - 1
    return low * CHUNK_UNIT
