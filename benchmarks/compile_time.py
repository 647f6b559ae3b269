"""Compile time of a 16-layer Qwen3-MoE decoder with cold caches: Inductor against moepdl.

    python -m benchmarks.compile_time            # 3 runs each, taking turns; about a minute a run on 2 cores

Each run is a fresh process with an empty Inductor cache folder. The clock covers the first call: Dynamo, our passes,
Inductor and its C++ compiler. Importing torch and Inductor, and the compiler's once-only header work, are paid before
by compiling a one-line function. The share of moepdl's passes counts the finder, every pass and the checks after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS, ROOT, median, table, write
from moe_compiler.progress import Progress


def child(backend: str, layers: int, train: bool) -> tuple[float, float]:
    """Seconds of the first call in this process, and those of moepdl's passes with their checks among them."""
    import torch

    from moe_compiler.backend import last_reports
    from moe_compiler.demo import SMALL, backend_or_function, build_model

    torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(8))
    model = build_model(SMALL, layers, "grouped_mm", "cpu", torch.float32).train(train)
    ids_BS = torch.randint(0, SMALL["vocab_size"], (1, 64))
    start = time.perf_counter()
    compiled = torch.compile(model, backend=backend_or_function(backend), dynamic=False)
    with torch.set_grad_enabled(train):
        if train:
            compiled(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss.backward()
        else:
            compiled(input_ids=ids_BS, use_cache=False)
    seconds = time.perf_counter() - start
    reports = last_reports()
    return seconds, sum(record.seconds for report in reports for record in report.passes)


def run(backend: str, layers: int, train: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="moepdl-compile-") as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, "-m", "benchmarks.compile_time", "--child", backend, "--layers", str(layers)]
        command += ["--train"] if train else []
        result = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(result.stdout.splitlines()[-1])
    return float(told["seconds"]), float(told["passes"])


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--train", action="store_true", help="forward and backward only (default: forward, then both)")
    p.add_argument("--backend", default="moepdl")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--child", help=argparse.SUPPRESS)
    arguments = p.parse_args(argv)
    if arguments.child:
        seconds, passes = child(arguments.child, arguments.layers, arguments.train)
        print(json.dumps({"seconds": seconds, "passes": passes}))
        return 0
    rows: list[dict[str, Any]] = []
    with Progress("compile_time") as progress:
        for train in (True,) if arguments.train else (False, True):
            seconds: dict[str, list[float]] = {"inductor": [], arguments.backend: []}
            shares: list[float] = []
            for turn in range(arguments.runs):
                for backend in sorted(seconds, reverse=turn % 2 == 1):
                    progress.step(f"{'train' if train else 'forward'}: {backend}, run {turn + 1} of {arguments.runs}")
                    total, passes = run(backend, arguments.layers, train)
                    seconds[backend].append(total)
                    if backend == arguments.backend:
                        shares.append(passes / total)
            base, ours = median(seconds["inductor"]), median(seconds[arguments.backend])
            rows.append(
                {
                    "what": "forward + backward" if train else "forward",
                    "Inductor s": base,
                    "moepdl s": ours,
                    "moepdl / Inductor": ours / base,
                    "moepdl's passes, share": median(shares),
                    "Inductor runs": ", ".join(f"{s:.1f}" for s in seconds["inductor"]),
                    "moepdl runs": ", ".join(f"{s:.1f}" for s in seconds[arguments.backend]),
                }
            )
    notes = [
        f"Qwen3-MoE decoder of transformers, {arguments.layers} layers, small, fp32, S=64, experts as grouped_mm.",
        f"Fresh process and empty cache folder each run, {arguments.runs} runs each in turns, medians.",
    ]
    write(arguments.out, "compile_time", "Compile time, cold caches", rows, device="cpu", notes=notes)
    print(table(rows))
    print(f"\nwritten: {arguments.out / 'compile_time'}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
