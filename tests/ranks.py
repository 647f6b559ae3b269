"""Several processes on this machine for the tests of what ranks do together, each under a time limit.

A worker is a module with a `main(rank, ranks, folder)`-like command line: `python -m MODULE RANK RANKS FOLDER ...`. It
writes what it found to FOLDER/RANK.json. The store is a file and the traffic stays on the loopback device: no port to
collide on, no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(
    module: str, ranks: int, folder: Path, seconds: float, arguments: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What each rank of a worker found; all are killed after `seconds`. A rank that wrote nothing fails the test."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", module]
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            line = [*command, str(rank), str(ranks), str(folder), *arguments]
            workers.append(subprocess.Popen(line, cwd=ROOT, env=environment, stdout=out, stderr=out))
    deadline = time.monotonic() + seconds
    try:
        for worker in workers:
            worker.wait(timeout=max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        pass  # a scenario that was not reached fails by its name
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found = []
    for rank, log in enumerate(logs):
        path = folder / f"{rank}.json"
        assert path.exists(), f"rank {rank} wrote nothing: {log.read_text()[-3000:]}"
        found.append(json.loads(path.read_text()))
    return found


@contextmanager
def fake_ranks(ranks: int) -> Iterator[Any]:
    """The group of rank 0 of `ranks`, of which the others do not exist: for compiling, in this process."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def joined(rank: int, ranks: int, folder: Path, seconds: float = 60) -> None:
    """In a worker: join the group of all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )


def run_scenarios(scenarios: Sequence[Callable[[int, int], Any]], rank: int, ranks: int, folder: Path) -> None:
    """In a worker: run each scenario and write {name: {"error": text or None, "found": what it returned}}.

    It stops at the first error: the other ranks then wait for this one, and nothing after it can be right.
    """
    import torch

    found: dict[str, Any] = {}
    for scenario in scenarios:
        torch._dynamo.reset()
        error = result = None
        begun = time.monotonic()
        try:
            result = scenario(rank, ranks)
        except Exception:
            error = traceback.format_exc()
        found[scenario.__name__] = {"error": error, "found": result, "seconds": time.monotonic() - begun}
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if error is not None:
            break
    # Threads of a group that has failed are not waited for.
    sys.stdout.flush()
    os._exit(0)


def of_scenario(results: list[dict[str, Any]], name: str) -> list[Any]:
    """What each rank returned from a scenario; a failure on any rank fails here, with its text."""
    for rank, found in enumerate(results):
        errors = [f"{key}: {entry['error'][-2000:]}" for key, entry in found.items() if entry["error"]]
        assert name in found, f"rank {rank} did not come to {name}: {errors}"
        assert found[name]["error"] is None, f"rank {rank}: {found[name]['error']}"
    return [found[name]["found"] for found in results]
