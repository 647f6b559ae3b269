"""A shared expert beside a chain: one stream after the other, or both at once on two streams. On one GPU.

    python -m benchmarks.branch_stream           # writes docs/benchmarks/branch_stream.json and .md

The chain is the compiler's own of a block of these sizes; the shared expert is what Inductor makes of it (gated, its
result added to the block's). "one": chain, shared expert and sum in a graph on one stream. "two": the shared expert on
a second stream between a fork and a join. Each replay is alone on the device, the ways take turns. "predicted" is what
the report would say of the second stream (`moe_compiler.branches`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from benchmarks.timing import RESULTS, captured, device_us, median, table, write
from moe_compiler import timing
from moe_compiler.block_program import BlockSizes, forward_program, inputs_of, weights_of
from moe_compiler.branches import gain_us
from moe_compiler.demo import ignore_known_warnings
from moe_compiler.device_model import device_model

TOKENS = (1, 8, 64, 512, 4096)


@dataclass(frozen=True)
class Shape:
    """A block's sizes, and the intermediate size of its shared expert."""

    block: BlockSizes
    shared: int


# Qwen3-Next-80B-A3B, GLM-4.5-Air, DeepSeek-V3 with an eighth of its experts (what one of eight devices would hold).
SHAPES = {
    "qwen3-next": Shape(BlockSizes(512, 10, 2048, 512), 512),
    "glm-4.5-air": Shape(BlockSizes(128, 8, 4096, 1408), 1408),
    "deepseek-v3/8": Shape(BlockSizes(32, 8, 7168, 2048), 2048),
}


def shared_expert(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [T,H], gate and up [J,H], down [H,J] -> [T,H]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def row(name: str, tokens: int, weights: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """One row: medians in us of the chain, the shared expert, both on one stream and both on two."""
    shape = SHAPES[name]
    sizes = shape.block
    operands = inputs_of(sizes, tokens, weights, "cuda")
    x, text = operands[0], forward_program(sizes).to_text()
    matrices = [torch.randn(shape.shared, sizes.hidden, device="cuda", dtype=sizes.dtype) * 0.02 for _ in range(2)]
    matrices.append(torch.randn(sizes.hidden, shape.shared, device="cuda", dtype=sizes.dtype) * 0.02)
    torch._dynamo.reset()
    # Apart: the sum is the one kernel that both ways run behind the chain.
    shared = torch.compile(shared_expert, dynamic=False)
    side = torch.cuda.Stream()

    def chain() -> torch.Tensor:
        return torch.ops.moepdl.chain(operands, text)[0]

    def one(_: Any) -> torch.Tensor:
        return chain() + shared(x, *matrices)

    def two(_: Any) -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            beside = shared(x, *matrices)
        y = chain()
        main.wait_stream(side)
        return y + beside

    with torch.no_grad():
        ways: dict[str, Callable[[], object]] = {
            "chain": captured(lambda _: chain(), [None]),
            "shared": captured(lambda _: shared(x, *matrices), [None]),
            "one": captured(one, [None]),
            "two": captured(two, [None]),
        }
        samples = device_us(ways, rounds=60)
    found: dict[str, Any] = {"shape": name, "T": tokens}
    found |= {f"{way} us": median(values) for way, values in samples.items()}
    found["gain us"] = round(found["one us"] - found["two us"], 2)
    found["two / one (95 %)"] = str(timing.ratio(samples["two"], samples["one"]))
    found["predicted us"] = predicted(shape, tokens)
    return found


def predicted(shape: Shape, tokens: int) -> float:
    """What the report says that a second stream gains."""
    model = device_model(torch.cuda.get_device_name())
    sizes, kernel = shape.block, model.kernels["gate_up"]
    matmuls = [(2 * sizes.hidden * (tokens + shape.shared) + 2 * tokens * shape.shared, sizes.hidden)] * 2
    matmuls.append((2 * shape.shared * (tokens + sizes.hidden) + 2 * tokens * sizes.hidden, shape.shared))
    beside = [0.0, 0.0, 0.0]
    for moved, _ in matmuls:
        amounts = float(moved), 2.0 * tokens * shape.shared * sizes.hidden
        times = (kernel.time_us(*amounts), *kernel.bounds_us(*amounts))
        beside = [a + b for a, b in zip(beside, times, strict=True)]
    total = [0.0, 0.0, 0.0]
    for stage in ("router_logits", "route", "order", "gate_up", "down", "combine"):
        time_us, bounds = model.time_us(stage, sizes.named, tokens), model.bounds_us(stage, sizes.named, tokens)
        if time_us is None or bounds is None:
            continue
        total = [a + b for a, b in zip(total, (time_us, *bounds), strict=True)]
    return round(gain_us((total[0], total[1], total[2]), (beside[0], beside[1], beside[2])), 2)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("branch_stream: needs a CUDA device; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    ignore_known_warnings()
    began, rows = time.perf_counter(), []
    for name in arguments.shapes:
        weights = weights_of(SHAPES[name].block, "cuda")
        for tokens in arguments.tokens:
            rows.append(row(name, tokens, weights))
            print(f"[{time.perf_counter() - began:.0f}s] {rows[-1]}", flush=True)
        del weights
        notes = [
            "us, medians; bf16; one call in a graph, replayed alone on the device; the ways take turns.",
            "one: chain, shared expert, sum on one stream; two: the shared expert on a second stream.",
        ]
        title = "A shared expert beside a chain"
        write(arguments.out, "branch_stream", title, rows, device="cuda", notes=notes)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
