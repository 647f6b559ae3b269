"""With Inductor behind: right results, its caches kept honest, parameters static, the user's own passes kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx as inductor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from moe_compiler import torch_private
from moe_compiler.backend import last_reports, moepdl
from tests.moe_compiler.blocks import assert_block_is_accurate, qwen3_block, qwen3_decoder


def test_forward_and_backward_through_inductor():
    block = qwen3_block()
    ours = torch.compile(block, backend="moepdl", dynamic=True)
    for tokens in (100, 130):
        assert_block_is_accurate(ours, block, tokens, torch.float32, "cpu")
    directions = [[chain.direction for chain in report.schedule] for report in last_reports()]
    assert ["forward", "backward"] in directions and ["forward"] in directions


def test_an_unmodified_graph_without_moe_compiles():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(model, backend="moepdl")(x), model(x))
    assert last_reports()[-1].status == "unchanged"


@pytest.mark.parametrize("training", [False, True])
def test_as_many_static_inputs_as_without_our_capture(training, monkeypatch):
    """Else a CUDA graph would copy every weight at every step. What Inductor is asked for is seen; no code is made."""
    model = qwen3_decoder(layers=1).train(training)
    tokens = torch.randint(0, 128, (2, 8))
    seen: dict[str, int] = {}

    def run(name, backend):
        def spy(graph, inputs, **kwargs):
            if not kwargs.get("is_backward"):
                seen[name] = len(kwargs.get("static_input_idxs") or [])

            def run_graph(values):
                return graph(*values)

            run_graph._boxed_call = True
            return run_graph

        def compile_fx(module, inputs, patches=None):
            return inductor.compile_fx(module, inputs, inner_compile=spy, config_patches=patches)

        monkeypatch.setattr(torch_private, "compile_fx", compile_fx)
        torch._dynamo.reset()
        with torch.set_grad_enabled(training), config.patch(fx_graph_cache=False):
            torch.compile(model, backend=backend or compile_fx)(input_ids=tokens, use_cache=False)

    run("ours", moepdl)
    run("inductor", None)
    weights = len(list(model.parameters())) + len(
        [b for n, b in model.named_buffers() if not n.endswith("original_inv_freq")]
    )
    assert seen["ours"] == seen["inductor"] == weights


def test_graphs_that_differ_only_in_a_constant_do_not_share_compiled_code(cold_cache):
    block = qwen3_block()

    def make(scale):
        def function(x):
            return block(x) * torch.tensor([scale, 2.0 * scale] * 16)

        return function

    x = torch.randn(1, 100, 32)
    with torch.no_grad():
        for scale in (1.0, 3.0):
            torch._dynamo.reset()
            function = make(scale)
            torch.testing.assert_close(torch.compile(function, backend="moepdl")(x), function(x))


def test_large_constants_too(cold_cache):
    block = qwen3_block()
    x = torch.randn(1, 100, 32)
    with torch.no_grad():
        for seed in (0, 1):
            torch._dynamo.reset()
            values = torch.randn(128, generator=torch.Generator().manual_seed(seed)).tolist()

            def function(x, values=values):
                return block(x) * torch.tensor(values)[:32]

            torch.testing.assert_close(torch.compile(function, backend="moepdl")(x), function(x))


@pytest.mark.parametrize("where", ["config", "options"])
def test_the_users_own_inductor_pass_still_runs(where, cold_cache):
    seen = []

    def own(graph):
        seen.append(str(graph))

    block = qwen3_block()
    x = torch.randn(1, 300, 32)
    options = {"inductor": {"post_grad_custom_pre_pass": own}} if where == "options" else {}
    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=own if where == "config" else None):
        torch.compile(block, backend="moepdl", options=options)(x)
    assert len(seen) == 1 and "moepdl.chain" in seen[0]


_SECOND_PROCESS = """
import sys, torch
from moe_compiler import last_reports
from tests.moe_compiler.blocks import qwen3_block
block = qwen3_block()
torch.manual_seed(1)
x = torch.randn(1, 300, 32)
with torch.no_grad():
    out = torch.compile(block, backend="moepdl", options={"dump": sys.argv[1]})(x)
    torch.testing.assert_close(out, block(x))
report = last_reports()[-1]
source = "cache" if any("cache" in note for note in report.notes) else "fresh"
print(report.schedule[0].name, len(report.schedule[0].variants[0].launches), source)
"""


def test_a_second_process_loads_the_code_and_tells_the_same_story(cold_cache, tmp_path):
    stories = []
    for number in (1, 2):
        folder = tmp_path / f"dump{number}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _SECOND_PROCESS, str(folder)],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        stories.append(done.stdout.split())
        files = {path.name for path in (folder / "rank0" / "0_0").iterdir()}
        assert {"matches.json", "schedule.json", "dag.dot", "report.html", "passes.txt", "repro.py"} <= files
        assert any(name.endswith("raise_moe.py") for name in files)
    assert stories[0][:2] == stories[1][:2]
    assert (stories[0][2], stories[1][2]) == ("fresh", "cache")
    first, second = (sorted(Path(tmp_path / f"dump{n}").rglob("*_lower.py")) for n in (1, 2))
    assert [path.read_text() for path in first] == [path.read_text() for path in second]


def test_options_are_part_of_the_cache_key():
    from moe_compiler.inductor import post_grad_pass
    from moe_compiler.options import resolve
    from moe_compiler.pipeline import known_names

    def key(options):
        return post_grad_pass(lambda module: None, resolve(options, known_names=known_names())).uuid()

    assert key({}) == key({"require_match": True})
    assert key({"dump": "somewhere"}) == key({"dump": "elsewhere"}) != key({})
    assert key({}) != key({"pdl": "off"})
    assert key({}) != key({"disable": ["chain_pdl"]})


def test_a_mode_of_inductor_reaches_inductor():
    block = qwen3_block()
    x = torch.randn(1, 100, 32)
    with torch.no_grad():
        ours = torch.compile(block, backend="moepdl", mode="max-autotune-no-cudagraphs")
        torch.testing.assert_close(ours(x), block(x))
    assert last_reports()[-1].options["mode"] == "max-autotune-no-cudagraphs"


def test_what_the_guards_have_checked_is_not_checked_again_at_each_call():
    """Each of hundreds of inputs, where every expert has tensors of its own; the user may have the checks back."""
    block, x = qwen3_block(torch.float32), torch.randn(1, 6, 32)
    for given, wanted in (({}, False), ({"inductor": {"size_asserts": True}}, True)):
        torch.compiler.reset()
        compiled = torch.compile(block, backend="moepdl", options={"require_match": True, **given})
        with torch.no_grad():
            _, (code,) = run_and_get_code(compiled, x)
        assert ("assert_size_stride(arg" in code) is wanted, given
    torch.compiler.reset()
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(torch.nn.Linear(4, 4), backend="moepdl"), torch.randn(2, 4))
    assert "assert_size_stride(arg" in code, "what is not ours is as Inductor has it"
