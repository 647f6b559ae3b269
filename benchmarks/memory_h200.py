"""Memory and time of a forward chain for many tokens, as it is by default and with options["memory"] = "low". On a GPU.

    python -m benchmarks.memory_h200           # writes docs/benchmarks/memory.json and .md

The chain is the compiler's own of one block, router included. "MB" is the most that it allocates at one time besides
inputs, weights and output, as torch's allocator counts it; "told" is what the program says. Times are of one chain in
a CUDA graph; the two take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from benchmarks.timing import RESULTS, captured, device_us, median, table, write
from moe_compiler import timing
from moe_compiler.block_program import BlockSizes, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels.chain.chunks import rounds
from moe_compiler.runtime_kernels.chain.memory import peak_bytes

# Qwen3-30B-A3B, Mixtral-8x7B, DeepSeek-V3 with an eighth of its experts (what one of eight devices would hold).
SHAPES = {
    "qwen3": BlockSizes(128, 8, 2048, 768),
    "mixtral": BlockSizes(8, 2, 4096, 14336),
    "deepseek-v3/8": BlockSizes(32, 8, 7168, 2048),
}
TOKENS = (8192, 16384, 32768, 65536)


def row(name: str, tokens: int, weights: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """Megabytes and medians in us of both ways."""
    sizes = SHAPES[name]
    operands = inputs_of(sizes, tokens, weights, "cuda")
    programs = {"default": forward_program(sizes), "low": forward_program(sizes, low=True)}
    texts = {way: program.to_text() for way, program in programs.items()}
    found: dict[str, Any] = {"shape": name, "T": tokens}
    for way, program in programs.items():
        found[f"{way} MB"] = max(taken(operands, texts[way]) for _ in range(2)) / 1e6
        found[f"{way} told"] = peak_bytes(program, {"T": tokens}) / 1e6
    chunks = programs["low"].variants[-1].chunks
    found["chunks"] = 1 if chunks is None else len(rounds(tokens, chunks.tokens))
    replays = {
        way: captured(lambda _, text=text: torch.ops.moepdl.chain(operands, text), [None])
        for way, text in texts.items()
    }
    samples = device_us(replays, rounds=30)
    found |= {f"{way} us": median(values) for way, values in samples.items()}
    found["low / default (95 %)"] = str(timing.ratio(samples["low"], samples["default"]))
    return found


def taken(operands: list[torch.Tensor], text: str) -> int:
    """The most bytes that a run allocates at one time besides its output."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (y,) = torch.ops.moepdl.chain(operands, text)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - int(y.nbytes)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("memory_h200: needs a CUDA device; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    began, rows = time.perf_counter(), []
    for name in arguments.shapes:
        weights = weights_of(SHAPES[name], "cuda")
        for tokens in arguments.tokens:
            rows.append(row(name, tokens, weights))
            torch.cuda.empty_cache()
            print(f"[{time.perf_counter() - began:.0f}s] {rows[-1]}", flush=True)
        del weights
        notes = [
            "MB: the most that a run allocates at one time besides inputs, weights and output; told: by the program.",
            "us, medians; bf16; one chain in a graph, replayed alone on the device; the ways take turns.",
        ]
        title = "Memory between the kernels of a forward chain"
        write(arguments.out, "memory", title, rows, device="cuda", notes=notes)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
