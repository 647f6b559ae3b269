"""What tuning gains over the shipped tiles, on blocks that these were not made for. Needs a GPU.

    python -m benchmarks.tuning [--budget 65] [--tokens 1 8 64 512 4096] [--models NAME ...] [--out docs/benchmarks]

Each block is tuned as `moepdl tune` does, and its whole chain is timed with the tiles that it takes without any tuning
and with those that were found, in turns. Nothing is kept in the device's own table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS, write
from moe_compiler.bench.shapes import NAMED
from moe_compiler.progress import Progress
from moe_compiler.tuning.command import record, sizes_of, tune_shape
from moe_compiler.tuning.compile_pool import CompilePool

# Of `moepdl bench block`, for which no tile was ever tuned.
SHAPES = ("qwen3-next", "glm-4.5-air", "phi-3.5-moe")
TOKENS = (1, 8, 64, 512, 4096)
# Shipped tiles are to be within this of the tuned ones.
GOAL = 1.15


def rows_of(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a block and number of tokens, from what `record` tells of each block and its name."""
    rows = []
    for case in cases:
        for tokens, (shipped, tuned) in case["chain_us"].items():
            won = [f"{name} {at[tokens]}" for name, at in case["tiles"].items() if at.get(tokens, "own") != "own"]
            rows.append(
                {
                    "block": case["name"],
                    "T": int(tokens),
                    "shipped us": shipped,
                    "tuned us": tuned,
                    "shipped / tuned": f"{shipped / tuned:.3f}",
                    "tiles that won": "; ".join(won) or "-",
                }
            )
    return rows


def worst(cases: Sequence[Mapping[str, Any]]) -> float:
    """The largest ratio of shipped to tuned."""
    return max((shipped / tuned for case in cases for shipped, tuned in case["chain_us"].values()), default=1.0)


def _sizes(name: str) -> str:
    shape = NAMED[name]
    return f"{shape.experts}, {shape.k}, {shape.hidden}, {shape.intermediate}"


def notes(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table's numbers are."""
    return [
        "whole forward chain of a block with its router, bf16, in a CUDA graph; medians of 15 rounds.",
        "shipped: the tiles that a block takes without tuning; tuned: those that `moepdl tune` found in the time.",
        "experts, top-k, hidden, intermediate: " + "; ".join(f"{name} {_sizes(name)}" for name in SHAPES),
        *(
            f"{case['name']}: {case['tried']} tiles timed in {case['seconds']} s"
            + ("" if case["complete"] else ", when the time was up")
            for case in cases
        ),
        f"largest ratio {worst(cases):.3f}, goal at most {GOAL}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Tune the blocks, write the table, and return 1 when the goal is missed."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES))
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--budget", type=float, default=65.0, help="seconds a block")
    p.add_argument("--workers", type=int)
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    cases: list[dict[str, Any]] = []
    text = ""
    with Progress("tuning") as progress, CompilePool(arguments.workers) as pool, tempfile.TemporaryDirectory() as kept:
        for name in arguments.models:
            (found,) = tune_shape(
                sizes_of(name),
                arguments.tokens,
                budget_s=arguments.budget,
                pool=pool,
                out=Path(kept, "tiles.json"),
                say=lambda told, name=name: progress.step(f"{name}, {told}"),  # type: ignore[misc]
            )
            cases.append({"name": name, **record(found)})
            # After each block, so that what was measured survives a run that is cut short.
            title = "Shipped tiles against tuned ones"
            text = write(arguments.out, "tuning", title, rows_of(cases), device="cuda", notes=notes(cases))
            (arguments.out / "tuning_kernels.json").write_text(json.dumps(cases, indent=1) + "\n")
    print(text)
    return int(worst(cases) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
