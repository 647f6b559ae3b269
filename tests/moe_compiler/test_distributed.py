"""FSDP2 and DDP around the model, on two processes with gloo: trained as without, and matched.

Both processes run all scenarios once (tests/moe_compiler/distributed_worker.py); each test reads one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by scenario."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    pytest.importorskip("transformers", reason="the worker trains transformers' own model")
    folder = tmp_path_factory.mktemp("ranks")
    # The store is a file and the traffic stays on the loopback device: no port to collide on, no network.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.moe_compiler.distributed_worker"]
    logs = [folder / f"{rank}.log" for rank in range(2)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            workers.append(
                subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, env=environment, stdout=out, stderr=out)
            )
    deadline = time.monotonic() + SECONDS
    try:
        for worker in workers:
            worker.wait(timeout=max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        pass  # a scenario that was not reached fails below, by its name
    finally:
        for worker in workers:
            worker.kill()
    found = []
    for rank, log in enumerate(logs):
        path = folder / f"{rank}.json"
        assert path.exists(), f"rank {rank} wrote nothing: {log.read_text()[-2000:]}"
        found.append(json.loads(path.read_text()))
    return found


def scenario(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    for rank, found in enumerate(ranks):
        errors = [f"{key}: {entry['error']}" for key, entry in found.items() if entry["error"]]
        assert name in found, f"rank {rank} did not come to {name}: {errors}"
        assert found[name]["error"] is None, f"rank {rank}: {found[name]['error']}"
    return [found[name] for found in ranks]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("fsdp_whole", 1),
        ("fsdp_around", 1),
        ("fsdp_bfloat16", 1),
        ("ddp_whole", 2),
        ("ddp_inductor", 1),
        ("ddp_uncut", 1),
    ],
)
def test_trained_as_without_and_every_block_matched(ranks, name, blocks):
    for found in scenario(ranks, name):
        # Equal layers share one compiled frame; one that is compiled again, for another size, is matched again.
        assert sum(found["matches"]) >= blocks and sum(found["matches"]) % blocks == 0, found
        assert {"forward", "backward"} <= set(found["directions"])


def test_a_block_that_ddp_cuts_is_a_fragment_with_the_remedy(ranks):
    for found in scenario(ranks, "ddp_cut"):
        assert sum(found["matches"]) == 0 and set(found["status"]) == {"unchanged"}
        notes = [note for note in found["notes"] if "DistributedDataParallel" in note]
        assert notes and all("optimize_ddp" in note and "bucket_cap_mb" in note for note in notes)
        assert not any("fullgraph" in note for note in notes)


def test_a_block_that_ddp_leaves_whole_is_matched_in_its_part(ranks):
    for found in scenario(ranks, "ddp_cut_inductor"):
        assert len(found["matches"]) > 1 and sum(found["matches"]) == 1
        assert found["directions"] == ["backward", "forward"]
