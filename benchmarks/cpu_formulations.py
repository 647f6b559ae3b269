"""Every formulation on a CPU: eager, Inductor and moepdl, forward, in turns.

    python -m benchmarks.cpu_formulations                       # all formulations, T = 1, 16, 128, 512, fp32
    python -m benchmarks.cpu_formulations --only batched_mm --tokens 128 --dtype bfloat16

Writes docs/benchmarks/cpu.json and cpu.md (cpu_DTYPE.* for other dtypes than float32, cpu_ExKxHxI.* for other sizes),
after each case, so that a run that is stopped leaves what it measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, table, write
from moe_compiler import timing
from moe_compiler.demo import backend_or_function, ignore_known_warnings
from moe_compiler.progress import Progress

SIZES = {"experts": 64, "top_k": 8, "hidden": 1024, "intermediate": 512}
TOKENS = (1, 16, 128, 512)
# Eager's copy of gathered weights must fit into memory beside the rest.
GATHER_LIMIT = 10e9
# Freed memory is kept for the next call: else the operating system's page faults are what is measured.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 34), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
# Largest relative difference from eager's output, in the norm, with which a timing counts.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Case:
    """A module and its inputs for any number of tokens."""

    name: str
    module: torch.nn.Module
    inputs: Callable[[int], tuple[Any, ...]]


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """The example of every formulation, then transformers' own block in both of its spellings."""
    from moe_compiler.testing import examples

    for name, factory in examples().items():
        if name.startswith("grouped_") and dtype is not torch.bfloat16:
            continue  # torch's own grouped matmul takes bf16 only when compiled; transformers' row below has fp32
        torch.manual_seed(0)
        example = factory(dtype=dtype, **SIZES)
        yield Case(name, example.module, example.inputs)
    for spelling in ("grouped_mm", "batched_mm"):
        yield Case(f"transformers {spelling}", transformers_block(spelling, dtype), transformers_inputs(dtype))


def transformers_block(spelling: str, dtype: torch.dtype) -> torch.nn.Module:
    """Qwen3MoeSparseMoeBlock of SIZES."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=SIZES["hidden"],
        moe_intermediate_size=SIZES["intermediate"],
        num_experts=SIZES["experts"],
        num_experts_per_tok=SIZES["top_k"],
        norm_topk_prob=True,
    )
    config._experts_implementation = spelling
    module = Qwen3MoeSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    return module


def transformers_inputs(dtype: torch.dtype) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda tokens: (torch.randn(1, tokens, SIZES["hidden"], dtype=dtype),)


def gathered_bytes(name: str, tokens: int, dtype: torch.dtype) -> int:
    """What eager copies in the forms that gather a matrix for every pair."""
    if "batched_mm" not in name and name != "gather_einsum":
        return 0
    return tokens * SIZES["top_k"] * 3 * SIZES["hidden"] * SIZES["intermediate"] * dtype.itemsize


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def measure(case: Case, tokens: int, dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the table. What a compiler cannot compile or computes wrongly has a reason in place of a time."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(1)
    module, inputs = case.module.eval(), case.inputs(tokens)
    row: dict[str, Any] = {"formulation": case.name, "T": tokens}
    ways: dict[str, Callable[[], object]] = {"eager": lambda: module(*inputs)}
    failed: dict[str, str] = {}
    with torch.no_grad():
        want = first(module(*inputs)).double()
        for way, name in (("inductor", "inductor"), ("moepdl", arguments.backend)):
            # fullgraph: loops over experts have sizes that depend on data, which Dynamo else breaks the graph at.
            compiled = torch.compile(module, backend=backend_or_function(name), fullgraph=True, dynamic=False)
            try:
                error = ((first(compiled(*inputs)).double() - want).norm() / want.norm()).item()
            except Exception as failure:
                failed[way] = f"fails: {type(failure).__name__}"
                continue
            if not error <= CLOSE[dtype]:
                failed[way] = f"wrong: {error:.1e}"
                continue
            ways[way] = lambda compiled=compiled: compiled(*inputs)
        # Eager's gigabytes of gathered weights would leave cold caches and pages behind: it gets rounds of its own.
        samples = timing.interleaved({"eager": ways.pop("eager")}, budget_s=arguments.seconds / 3, rounds=(2, 50))
        samples |= timing.interleaved(ways, budget_s=arguments.seconds, rounds=(9, 300))
    for way in ("eager", "inductor", "moepdl"):
        row[f"{way} ms"] = failed.get(way) or timing.milliseconds(samples[way])
    row["moepdl / Inductor (95 %)"] = row["verdict"] = "-"
    if not failed:
        against = timing.ratio(samples["moepdl"], samples["inductor"])
        row["moepdl / Inductor (95 %)"] = str(against)
        row["verdict"] = verdict(against)
    return row


def verdict(against: timing.Ratio) -> str:
    """What the interval says about "at most 5 % slower"."""
    if against.high < 1:
        return f"{1 / against.value:.2f} x faster"
    if against.high <= 1.05:
        return "within 5 %"
    return "slower" if against.low > 1.05 else "undecided"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--only", nargs="*", help="names of formulations")
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    p.add_argument("--backend", default="moepdl")
    for size, value in SIZES.items():
        p.add_argument("--" + size.replace("_", "-"), type=int, default=value)
    p.add_argument("--seconds", type=float, default=5.0, help="time to measure for, a case")
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    if ALLOCATOR.items() - os.environ.items():
        # glibc reads these when a process starts.
        return subprocess.call(
            [sys.executable, "-m", "benchmarks.cpu_formulations", *(argv or sys.argv[1:])],
            env={**os.environ, **ALLOCATOR},
        )
    ignore_known_warnings()
    dtype = getattr(torch, arguments.dtype)
    name = "cpu" if dtype is torch.float32 else f"cpu_{arguments.dtype}"
    sizes = {size: getattr(arguments, size) for size in SIZES}
    if sizes != SIZES:
        name += "_" + "x".join(map(str, sizes.values()))
    SIZES.update(sizes)
    notes = [
        ", ".join(f"{key} {value}" for key, value in SIZES.items()) + f", {arguments.dtype}, forward, no_grad.",
        "Medians of calls, Inductor's and moepdl's in turns. The ratio is of medians, with a 95 % bootstrap interval.",
        "The allocator keeps freed memory (" + ", ".join(ALLOCATOR) + "), so page faults are not measured.",
        "Each output was compared with eager's first.",
        "`transformers` rows are Qwen3MoeSparseMoeBlock; the others are the formulations' example modules.",
    ]
    rows: list[dict[str, Any]] = []
    with Progress("cpu_formulations") as progress:
        for case in cases(dtype):
            if arguments.only and case.name not in arguments.only:
                continue
            for tokens in arguments.tokens:
                if gathered_bytes(case.name, tokens, dtype) > GATHER_LIMIT:
                    notes.append(
                        f"{case.name} T={tokens}: left out, eager would gather more than {GATHER_LIMIT:.0e} bytes."
                    )
                    continue
                progress.step(f"{case.name} T={tokens}")
                rows.append(measure(case, tokens, dtype, arguments))
                write(arguments.out, name, "MoE formulations on a CPU", rows, device="cpu", notes=notes)
    print(table(rows))
    print(f"\nwritten: {arguments.out / name}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
