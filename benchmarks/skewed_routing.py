"""A chain's time when tokens crowd together on few experts, against uniform routing; and whether its bits repeat.

    python -m benchmarks.skewed_routing          # on one GPU; writes docs/benchmarks/skewed_routing.json and .md

A block as in Qwen3-30B-A3B without its router (E=128, k=8, H=2048, I=768, bf16), one call in a CUDA graph, replayed
alone on the device; the routings take turns. "same": all tokens choose the same k experts. "zipf": the i-th expert is
drawn with a chance in proportion to 1 / i, without repeats. A second graph on the same operands is replayed and
compared with the first result, bit by bit, on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from benchmarks.timing import RESULTS, captured, device_us, median, table, write
from moe_compiler import timing
from moe_compiler.block_program import BlockSizes, forward_program, weights_of

SIZES = BlockSizes(128, 8, 2048, 768)
TOKENS = (1, 64, 1024, 8192)
ROUTINGS = ("uniform", "zipf", "same")


def chosen(routing: str, tokens: int) -> Tensor:
    """ids [T,k] on the GPU."""
    experts, k = SIZES.experts, SIZES.k
    if routing == "same":
        return torch.arange(k, device="cuda").expand(tokens, k).contiguous()
    rank = torch.arange(1, experts + 1, device="cuda", dtype=torch.float32)
    chance = 1 / rank if routing == "zipf" else torch.ones_like(rank)
    return torch.multinomial(chance.expand(tokens, experts), k)


def rows(tokens: int, weights: dict[str, list[Tensor]], repeats: int) -> list[dict[str, Any]]:
    """A row a routing."""
    text = forward_program(SIZES, router=False).to_text()
    graphs: dict[str, Callable[[], object]] = {}
    found: dict[str, dict[str, Any]] = {}
    for routing in ROUTINGS:
        torch.manual_seed(0)
        x = torch.randn(tokens, SIZES.hidden, dtype=SIZES.dtype, device="cuda")
        ids = chosen(routing, tokens)
        scales = torch.rand(tokens, SIZES.k, device="cuda").to(SIZES.dtype)
        operands = [x, ids, scales, *weights["gate"], *weights["down"]]
        out = torch.empty_like(x)

        def call(_: Any, operands: Any = operands, out: Tensor = out) -> None:
            out.copy_(torch.ops.moepdl.chain(operands, text)[0])

        graphs[routing] = captured(call, [None])
        graphs[routing]()
        first = out.clone()
        differing = torch.zeros((), dtype=torch.int32, device="cuda")
        for _ in range(repeats):
            graphs[routing]()
            differing += (out != first).any()
        experts = int(ids.unique().numel())
        found[routing] = {"T": tokens, "routing": routing, "experts hit": experts, "runs that differ": int(differing)}
    samples = device_us(graphs, rounds=40)
    for routing, row in found.items():
        row["us"] = median(samples[routing])
        row["to uniform (95 %)"] = str(timing.ratio(samples[routing], samples["uniform"]))
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--repeats", type=int, default=1000, help="runs whose bits are compared")
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("skewed_routing: needs a CUDA device; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    weights = weights_of(SIZES, "cuda")
    found = [row for tokens in arguments.tokens for row in rows(tokens, weights, arguments.repeats)]
    notes = [
        f"E={SIZES.experts} k={SIZES.k} H={SIZES.hidden} I={SIZES.intermediate}, bf16, without router; medians.",
        f"runs that differ: of {arguments.repeats} replays, in any bit.",
    ]
    write(arguments.out, "skewed_routing", "Routing that crowds together", found, device="cuda", notes=notes)
    print(table(found))
    return 1 if any(row["runs that differ"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
