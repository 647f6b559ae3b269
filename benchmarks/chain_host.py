"""What a chain costs the host: microseconds from the call to its return, while the device is still busy.

    python -m benchmarks.chain_host              # on one GPU; writes docs/benchmarks/chain_host.json and .md

Chains of a block as in Qwen3-30B-A3B (E=128, k=8, H=2048, I=768, bf16), with packed weights and with one tensor an
expert. "first": a run with sizes that are new (kernels compiled already); "again": every later one, whose launches are
one graph; "one by one" and "through triton" the same with a call of the driver for each launch, and with each made by
triton. "graph alone", "updated" and "calls alone": the calls of the driver without the operator around them, for the
graph with the addresses of the run before and with new ones, and for the launches one by one. Calls are made in bursts
of 16 on an idle device, so none waits for a full queue.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.timing import RESULTS, table, write
from moe_compiler.demo import backend_or_function, ignore_known_warnings
from moe_compiler.runtime_kernels.chain import launcher
from moe_compiler.runtime_kernels.chain.prepared import PreparedProgram, prepare
from moe_compiler.testing import examples

SIZES = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
# How the weights are kept, and the formulation whose example keeps them so.
WEIGHTS = {"packed": "grouped_mm", "one an expert": "where_loop"}
TOKENS = (1, 8, 128, 1024, 8192)
BURST, ROUNDS = 16, 15


@contextmanager
def chains() -> Iterator[list[tuple[list[torch.Tensor], str]]]:
    """The chains that run inside, as (operands, program)."""
    calls: list[tuple[list[torch.Tensor], str]] = []
    texts: list[str] = []
    signature, ready = PreparedProgram.signature, launcher.prepare

    def prepared(text: str) -> PreparedProgram:
        texts.append(text)
        return ready(text)

    def signed(self: PreparedProgram, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        calls.append((list(tensors), texts[-1]))
        return signature(self, tensors)

    with mock.patch.object(launcher, "prepare", prepared), mock.patch.object(PreparedProgram, "signature", signed):
        yield calls


def host_us(call: Callable[[], object]) -> float:
    """Median over rounds of the mean time a call of a burst takes to return."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - begin) / BURST * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


@contextmanager
def without(bound: Any, *ways: str) -> Iterator[None]:
    """Runs of a bound chain meanwhile do without these of its ways to launch."""
    held = {way: getattr(bound, way) for way in ways}
    try:
        for way in ways:
            setattr(bound, way, None)
        yield
    finally:
        for way, value in held.items():
            setattr(bound, way, value)


def ways_us(bound: Any, again: Callable[[], None]) -> dict[str, float]:
    """Host time of a repeated run by its other ways to launch, and of the launches alone; nothing where triton makes
    them."""
    direct, graph = bound._direct, bound._graph
    if direct is None or graph is None:
        return {}
    found = {}
    with without(bound, "_graph"):
        found["one by one us"] = host_us(again)
        with without(bound, "_direct"):
            found["through triton us"] = host_us(again)
    addresses, stream = list(direct._memory), torch.cuda.current_stream().cuda_stream

    def updated() -> None:
        graph._current = None
        graph(addresses, stream)

    found["calls alone us"] = host_us(lambda: direct(addresses, stream))
    found["updated us"] = host_us(updated)
    found["graph alone us"] = host_us(lambda: graph(addresses, stream))
    return found


def compiled_block(weights: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A block of SIZES on the GPU. One graph serves every T above 1: a loop over 128 experts is long to trace."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = examples()[WEIGHTS[weights]](dtype=torch.bfloat16, **SIZES).module.cuda()
    return torch.compile(module, backend=backend_or_function("moepdl"), fullgraph=True, dynamic=True)


def measure(
    compiled: Callable[[torch.Tensor], torch.Tensor], weights: str, tokens: int, backward: bool
) -> list[dict[str, Any]]:
    x = torch.randn(tokens, SIZES["hidden"], dtype=torch.bfloat16, device="cuda", requires_grad=backward)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            y = compiled(x)
        if backward:
            y.backward(torch.ones_like(y))

    step()
    with chains() as calls:
        step()
    rows = []
    for tensors, text in calls:
        program = prepare(text)

        def again(tensors: Any = tensors, text: str = text) -> None:
            torch.ops.moepdl.chain.default(tensors, text)

        def first(program: Any = program, call: Callable[[], None] = again) -> None:
            program.bound.clear()
            call()

        first_us = host_us(first)
        again()
        again_us = host_us(again)
        bound = [value for value in program.bound.values() if value is not None][-1:]
        others = ways_us(bound[0], again) if bound else {}
        launches = len(program.variant([tokens] * 8).launches)
        rows.append(
            {
                "chain": program.name,
                "weights": weights,
                "T": tokens,
                "launches": launches,
                "first us": round(first_us, 1),
                "again us": round(again_us, 1),
                **{
                    name: round(others[name], 1) if name in others else None
                    for name in ("one by one us", "through triton us", "graph alone us", "updated us", "calls alone us")
                },
                "repeated": "yes" if bound else "no",
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS))
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    ignore_known_warnings()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for weights in arguments.weights:
        compiled = compiled_block(weights)
        for tokens, backward in [*((tokens, False) for tokens in arguments.tokens), (1024, True)]:
            rows += measure(compiled, weights, tokens, backward)[int(backward) :]
            print(f"[{time.perf_counter() - began:.0f}s] {rows[-1]}", flush=True)
        notes = [
            ", ".join(f"{key} {value}" for key, value in SIZES.items()) + ", bf16; medians, us of host time a call.",
            "first: sizes that are new; again: every later call. Chains whose run cannot be repeated say no.",
        ]
        write(arguments.out, "chain_host", "Host time of a chain", rows, device="cuda", notes=notes)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
