"""One class in a process of its own, with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.coverage.classes import Experts

__all__ = ["run"]

# What a class's process imports once for all.
PRELOAD = ["torch._dynamo", "transformers.modeling_utils", "moe_compiler.backend", "benchmarks.coverage.cells"]
# Seconds that a process has for ending by itself once it has answered.
END_S = 10.0


def _child(experts: Experts, pipe: Connection, log: str) -> None:
    """Measure one class; everything that it prints goes to the log."""
    import torch

    from benchmarks.coverage.cells import measure

    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipe.send(measure(experts))
    pipe.close()


def run(experts: Experts, limit: float, logs: Path) -> dict[str, Any]:
    """The row of a class, measured in its own process within `limit` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    logs.mkdir(parents=True, exist_ok=True)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(experts, sender, str(logs / f"{experts.name}.txt")))
    start = time.perf_counter()
    process.start()
    sender.close()
    row: dict[str, Any] = {"folder": experts.folder, "name": experts.name, "packed": experts.packed}
    try:
        if receiver.poll(limit):
            row = receiver.recv()
            process.join(END_S)
        else:
            row["not built"] = f"took more than {limit:.0f} s"
    except EOFError:
        process.join()
        row["not built"] = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row
