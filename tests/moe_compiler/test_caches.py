"""Inductor's caches, on and off: what is shared, what must not be, and what is told about code that was loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config

from moe_compiler import pipeline, torch_private
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.inductor import post_grad_pass
from moe_compiler.options import resolve
from tests.moe_compiler.blocks import qwen3_block


def compiled_once(block, options=None) -> Counter[str]:
    """Compile and run inference in a process that has forgotten everything but its caches -> cache hits and misses."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(1, 300, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(block, backend=moepdl, options=options)(x), block(x))
    return Counter(
        {
            "graph hit": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
            "graph miss": counters["inductor"]["fxgraph_cache_miss"],
            "bypass": counters["inductor"]["fxgraph_cache_bypass"],
        }
    )


def test_code_is_shared_by_equal_options_and_by_no_others(cold_cache):
    block = qwen3_block()
    first = compiled_once(block)
    assert first["graph miss"] == 1 and not first["graph hit"]
    again = compiled_once(block)
    assert not again["graph miss"] and again["graph hit"]
    assert any("compile cache" in note for note in last_reports()[-1].notes)
    other = compiled_once(block, {"disable": ["chain_pdl"]})
    assert other["graph miss"] == 1 and not other["graph hit"]
    assert not last_reports()[-1].schedule
    back = compiled_once(block)
    assert not back["graph miss"] and back["graph hit"] and len(last_reports()[-1].schedule) == 1
    # An option that says nothing about the code: the same entry, and the fresh report has its own origin.
    same = compiled_once(block, {"require_match": True})
    assert not same["graph miss"] and last_reports()[-1].options["require_match"] is True


def test_a_fallback_that_is_cached_is_told_again_and_serves_nobody_else(cold_cache):
    block, failing = qwen3_block(), {"pdl": "on"}
    with pytest.raises(Exception, match=r'options\["pdl"\]="on", but the block runs on cpu'):
        compiled_once(block, failing)
    for time in ("first", "second"):
        with pytest.warns(UserWarning, match="moepdl fell back"):
            found = compiled_once(block, {**failing, "on_error": "fallback"})
        report = last_reports()[-1]
        assert report.status == "fallback" and len(report.errors) == 1 and not report.schedule
        assert found["graph hit" if time == "second" else "graph miss"]
    with pytest.raises(Exception, match=r'options\["pdl"\]="on", but the block runs on cpu'):
        compiled_once(block, failing)


def test_code_for_any_size_is_loaded_for_another_with_its_report(cold_cache):
    block = qwen3_block()
    for tokens, hits in ((70, 0), (81, 1)):
        torch._dynamo.reset()
        counters.clear()
        x = torch.randn(1, tokens, 32)
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(block, backend=moepdl, dynamic=True)(x), block(x))
        found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert bool(found) == bool(hits)
        report = last_reports()[-1]
        assert len(report.schedule) == 1 and not any("without chains" in note for note in report.notes)


def test_with_the_caches_off_every_compile_is_whole(cold_cache):
    block = qwen3_block()
    with config.patch(fx_graph_cache=False, force_disable_caches=True):
        for _ in range(2):
            found = compiled_once(block)
            assert not found["graph hit"]
            report = last_reports()[-1]
            assert len(report.schedule) == 1 and not any("cache" in note for note in report.notes)


_TRAINING = """
import json, sys, time, torch
from torch._dynamo.utils import counters
from moe_compiler import last_reports
from moe_compiler.backend import moepdl
from tests.moe_compiler.blocks import qwen3_block
block = qwen3_block()
torch.manual_seed(1)
x = torch.randn(1, 100, 32, requires_grad=True)
options = {"dump": sys.argv[1]} if sys.argv[1] else {}
out = torch.compile(block, backend=moepdl, options=options)(x)
mine = torch.autograd.grad(out.sum(), [x, *block.parameters()])
theirs = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
for a, b in zip(mine, theirs, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
report = last_reports()[-1]
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "schedule": [[chain.direction, chain.name, len(chain.variants)] for chain in report.schedule],
    "passes": sorted({record.phase for record in report.passes}),
    "pending": report.phases_pending,
    "notes": report.notes,
}))
"""


def train_in_a_process(dump: str = "") -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TRAINING, dump], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_training_process_compiles_neither_direction_again(cold_cache, tmp_path):
    dumps = [tmp_path / "first", tmp_path / "second"]
    first, second = (train_in_a_process(str(dump)) for dump in dumps)
    assert first["misses"] == 2 and not first["hits"]
    assert not second["misses"] and second["hits"]
    assert first["schedule"] == second["schedule"] and [c[0] for c in first["schedule"]] == ["forward", "backward"]
    assert first["passes"] == second["passes"] == ["backward", "capture", "forward"]
    assert not first["pending"] and not second["pending"]
    assert sum("compile cache" in note for note in second["notes"]) == 2
    lowered = [{p.relative_to(d): p.read_text() for p in Path(d).rglob("*lower.py")} for d in dumps]
    assert lowered[0] == lowered[1] and len(lowered[0]) == 2


PLACES = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")


@pytest.mark.parametrize("where", ["config", "options"])
def test_the_users_own_passes_run_at_all_four_places(where, cold_cache):
    seen: dict[str, list[str]] = {place: [] for place in PLACES}

    def noting(place):
        def own(graph):
            seen[place].append(" ".join(str(node.target) for node in graph.nodes))

        return own

    passes = {place: noting(place) for place in PLACES}
    block = qwen3_block()
    x = torch.randn(1, 300, 32, requires_grad=True)
    options = {"inductor": passes} if where == "options" else {}
    with config.patch(passes if where == "config" else {}):
        out = torch.compile(block, backend=moepdl, options=options)(x)
        (mine,) = torch.autograd.grad(out.sum(), x)
    (theirs,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # The joint graph has both directions in one; after autograd a pass sees the forward and the backward graph.
    assert {place: len(graphs) for place, graphs in seen.items()} == dict(zip(PLACES, (1, 1, 2, 2), strict=True))
    assert all("moepdl.experts_saving" in text for place in PLACES[:2] for text in seen[place])
    assert all("moepdl.chain" in text for place in PLACES[2:] for text in seen[place])


AWARE = torch_private.inference_aware_pass_base()


@pytest.mark.skipif(AWARE is None, reason="this torch tells no pass whether a graph is compiled for inference")
def test_several_passes_and_those_that_ask_for_inference_keep_their_place(cold_cache):
    seen: list[tuple[str, object]] = []

    class Aware(AWARE):
        def __call__(self, graph, is_inference):
            seen.append(("aware", is_inference))

        def uuid(self):
            return "aware-1"

    class Plain(torch_private.graph_pass_base()):
        def __call__(self, graph):
            seen.append(("plain", None))

        def uuid(self):
            return "plain-1"

    block = qwen3_block()
    with config.patch(post_grad_custom_pre_pass=[Aware(), Plain()]):
        assert compiled_once(block)["graph miss"] == 1
        assert seen == [("aware", True), ("plain", None)]
        # Both can be keyed, so the code is cached, and a hit runs neither.
        assert compiled_once(block)["graph hit"] and len(seen) == 2
    with config.patch(post_grad_custom_pre_pass=[Plain()]):
        assert compiled_once(block)["graph miss"] == 1
    assert seen[2:] == [("plain", None)]
    with config.patch(post_grad_custom_pre_pass=lambda graph: seen.append(("bare", None))):
        for _ in range(2):
            assert compiled_once(block)["bypass"]
    assert seen[3:] == [("bare", None)] * 2


def test_a_torch_without_inference_aware_passes(monkeypatch):
    """As torch 2.11 is: one base class, and passes are called with the graph alone."""
    monkeypatch.setattr(torch_private, "inference_aware_pass_base", lambda: None)
    seen: list[str] = []
    theirs = {"post_grad_custom_pre_pass": lambda graph: seen.append("theirs")}
    options = resolve({"inductor": theirs}, known_names=pipeline.known_names())
    composed = post_grad_pass(lambda module: seen.append("ours"), options)
    assert isinstance(composed, torch_private.graph_pass_base())
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    composed(module.graph)
    assert seen == ["ours", "theirs"]
