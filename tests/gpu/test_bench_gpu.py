"""`moepdl bench block` on a GPU: both directions and modes, memory, and kernels that were compiled ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_compiler import cli
from moe_compiler.ahead import Ahead
from moe_compiler.bench.block import make_block
from moe_compiler.bench.floor import Speed
from moe_compiler.bench.measuring import Plan, first_calls
from moe_compiler.bench.shapes import find_shape
from moe_compiler.bench.ways import Compiled
from moe_compiler.runtime_kernels import launching

pytestmark = pytest.mark.gpu
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "peers_torch.py"


def test_a_small_block_in_every_direction_and_mode(tmp_path):
    arguments = ["--shape", "16,2,256,128,64", "--tokens", "1", "8", "200", "--device", "cuda", "--out", str(tmp_path)]
    arguments += ["--direction", "forward", "forward_backward", "--mode", "graph", "nograph", "--no-plot"]
    arguments += ["--reference-tokens", "8", "--peers", str(EXAMPLE)]
    assert cli.main(["bench", "block", *arguments]) == 0
    data = json.loads((tmp_path / "16x2x256x128x64.json").read_text())
    rows = {(row["direction"], row["mode"], row["tokens"]): row for row in data["rows"]}
    assert len(rows) == 12
    for (direction, mode, tokens), row in rows.items():
        assert ("loop" in row["peers"]) is (mode == "nograph")
        assert ("loop, graph" in row["problems"]) is (mode == "graph")  # it waits for the device
        assert ("all_experts" in row["peers"]) is (tokens <= 64) or direction == "forward_backward"
        assert row["us"] > 0 and "moepdl" not in row["problems"]
        assert row["memory_bytes"] is not None and row["memory_bytes"] < 1 << 30
        if mode == "nograph":
            assert "eager" in row["peers"] and ("inductor" in row["peers"]) is (tokens == 8)


def test_what_is_compiled_ahead_is_what_is_launched(tmp_path, monkeypatch):
    """After it, a call finds each of its kernels in triton's cache; `_compile` of launching is asked for no other."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block = make_block(find_shape("16,2,512,256"), torch.bfloat16, "cuda", 0)
    compiled = Compiled(block)
    plan = Plan([("forward", 1, ()), ("forward", 300, ())], frozenset(), {}, Speed(1.0, 1.0, ""))
    with Ahead(workers=4).open() as ahead:
        assert ahead.compile(first_calls(compiled, plan)) > 5
    before = {path.parent.name for path in tmp_path.rglob("*.cubin")}
    assert before
    launching._handles.clear()
    for call in first_calls(compiled, plan):
        call()
    torch.cuda.synchronize()
    assert {path.parent.name for path in tmp_path.rglob("*.cubin")} == before
