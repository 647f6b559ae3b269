"""Predicted and measured time of a block's chain, for models that no calibration saw.

    python -m benchmarks.predictions             # on one GPU; writes docs/benchmarks/predictions.json and .md

Each chain is one block with its router, in bf16, replayed in a CUDA graph over 8 inputs (2 from T=2048 on; 1 for
backward chains). The model is the one that the compiler uses on this device: its own calibration if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, table, write
from moe_compiler.block_program import BlockSizes, weights_of
from moe_compiler.device import cost_model
from moe_compiler.device_model import DeviceModel
from moe_compiler.measure import compile_ahead, measure_block

SHAPES = {
    "gpt-oss-20b": BlockSizes(32, 4, 2880, 2880),
    "OLMoE-1B-7B": BlockSizes(64, 8, 2048, 1024),
    "DeepSeek-V2-Lite": BlockSizes(64, 6, 2048, 1408),
    "Mixtral-8x7B": BlockSizes(8, 2, 4096, 14336),
    "DeepSeek-V3": BlockSizes(256, 8, 7168, 2048),
}
TOKENS = (1, 8, 64, 512, 4096)


def row(
    model: DeviceModel, name: str, tokens: int, kernels: Sequence[str], programmatic: int, plain: float, pdl: float
) -> dict[str, Any]:
    """One line of the table."""
    predicted = model.chain_us(kernels, programmatic, SHAPES[name].named, tokens)
    assert predicted is not None
    return {
        "model": name,
        "T": tokens,
        "kernels": ", ".join(kernels),
        "predicted us": round(predicted, 1),
        "measured us": round(pdl, 1),
        "error": f"{predicted / pdl - 1:+.1%}",
        "measured without PDL us": round(plain, 1),
        "programmatic": programmatic,
    }


def notes(model: DeviceModel) -> list[str]:
    """What the table's numbers are."""
    return [
        "one MoE block with its router, bf16, in a CUDA graph; medians in us.",
        f"model: {model.label}; a programmatic edge is predicted to gain {model.boundary_us:.2f} us.",
        ", ".join(f"{name}: E={s.experts} k={s.k} H={s.hidden} I={s.intermediate}" for name, s in SHAPES.items()) + ".",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES))
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    model = cost_model("cuda")
    if model is None:
        p.error("needs a CUDA GPU")
    began = time.perf_counter()
    cases = [(SHAPES[name], tokens, False) for name in arguments.models for tokens in arguments.tokens]
    compile_ahead(cases, workers=arguments.workers)
    rows = []
    for name in arguments.models:
        weights = weights_of(SHAPES[name], "cuda")
        for tokens in arguments.tokens:
            found = measure_block(SHAPES[name], tokens, weights)
            kernels = [kernel for kernel, _ in found.launches]
            plain, pdl = found.chain_us["plain"], found.chain_us["pdl"]
            rows.append(row(model, name, tokens, kernels, found.programmatic, plain, pdl))
            print(f"[{time.perf_counter() - began:.0f}s] {rows[-1]}", flush=True)
        del weights
        torch.cuda.empty_cache()
        write(arguments.out, "predictions", "Predicted times", rows, device="cuda", notes=notes(model))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
