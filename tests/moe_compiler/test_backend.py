"""The whole way, with remainder="eager": right for every dtype, T, layout and direction, and honest about the rest."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint

from moe_compiler import pipeline
from moe_compiler.backend import explain, last_reports, moepdl
from moe_compiler.errors import MatchRequired, OptionError
from moe_compiler.graph_pass import GraphPass
from moe_compiler.moe_ir import Level
from moe_compiler.pipeline import PIPELINE
from moe_compiler.report import Report
from tests.fast_part import covering
from tests.moe_compiler.blocks import (
    TOKENS,
    assert_accurate,
    assert_block_is_accurate,
    float64_block,
    gradients,
    qwen3_block,
    qwen3_decoder,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compiled(function, *, options=None, **kwargs):
    return torch.compile(function, backend=moepdl, options={"remainder": "eager", **(options or {})}, **kwargs)


def new_reports(before: list[Report]) -> list[Report]:
    known = {id(report) for report in before}
    return [report for report in last_reports() if id(report) not in known]


@pytest.mark.parametrize(("dtype", "implementation"), covering(DTYPES, ["grouped_mm", "batched_mm"]))
def test_forward_and_backward_are_accurate_for_every_number_of_tokens(dtype, implementation):
    block = qwen3_block(dtype, implementation)
    ours = compiled(block, options={"require_match": True})
    for tokens in TOKENS:
        assert_block_is_accurate(ours, block, tokens, dtype, "cpu")


@pytest.mark.parametrize("training", [False, True])
def test_at_most_four_graphs_whatever_the_number_of_tokens(training):
    block = qwen3_block()
    ours = compiled(block)
    before = last_reports()
    for tokens in (0, 1, 2, 3, 16, 17, 40, 100):
        x = torch.randn(1, tokens, 32, requires_grad=training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(ours(x), block(x))
    reports = new_reports(before)
    assert len(reports) <= 4
    assert all(len(report.matches) == 1 for report in reports)


def test_mark_dynamic_with_fullgraph_and_inference_mode_is_one_graph():
    block = qwen3_block()
    ours = compiled(block, fullgraph=True)
    before = last_reports()
    with torch.inference_mode():
        for tokens in (6, 9, 33):
            x = torch.randn(1, tokens, 32)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(ours(x), block(x))
    assert len(new_reports(before)) == 1


def test_all_tokens_on_one_set_of_experts_and_empty_experts():
    block = qwen3_block()
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[3] = 1.0
        block.gate.weight[5] = 0.5
    ours = compiled(block)
    x = torch.randn(1, 20, 32).abs().requires_grad_()
    out, eager = ours(x), block(x)
    grad = torch.randn_like(eager)
    mine, theirs = gradients(block, out, x, grad), gradients(block, eager, x, grad)
    torch.testing.assert_close(out, eager)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    gate_up = mine[2]
    assert gate_up[3].abs().sum() > 0 and gate_up[0].abs().sum() == 0


def test_a_non_contiguous_input():
    block = qwen3_block()
    x = torch.randn(32, 5).t()[None]
    assert not x.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(compiled(block)(x), block(x))


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_computes_in_the_dtypes_that_eager_would(where):
    block = qwen3_block()

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x)

    x = torch.randn(1, 7, 32, requires_grad=True)
    function = block if where == "around" else inside
    ours = compiled(function)
    before = last_reports()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        out, eager = ours(x), function(x)
    assert out.dtype == eager.dtype
    assert len(new_reports(before)[0].matches) == 1
    exact = float64_block(copy.deepcopy(block), x)
    error = (eager.double() - exact).norm() / exact.norm()
    assert (out.double() - exact).norm() / exact.norm() <= 1.5 * error + 1e-3
    grad = torch.randn_like(eager)
    for mine, theirs in zip(gradients(block, out, x, grad), gradients(block, eager, x, grad), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


def test_no_grad_inside_of_a_training_step_stays_outside_of_autograd():
    block = qwen3_block()

    def function(x):
        with torch.no_grad():
            y = block(x)
        return y * x

    x = torch.randn(1, 7, 32, requires_grad=True)
    out, eager = compiled(function)(x), function(x)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))


def test_the_body_of_an_activation_checkpoint_is_rewritten_too():
    block, linear = qwen3_block(), torch.nn.Linear(32, 32)

    def function(x):
        return torch.utils.checkpoint.checkpoint(lambda h: block(linear(h)), x, use_reentrant=False).sum()

    x = torch.randn(1, 7, 32, requires_grad=True)
    before = last_reports()
    out, eager = compiled(function)(x), function(x)
    torch.testing.assert_close(out, eager)
    parameters = [x, *block.parameters(), *linear.parameters()]
    torch.testing.assert_close(torch.autograd.grad(out, parameters), torch.autograd.grad(eager, parameters))
    assert [len(report.matches) for report in new_reports(before)] == [1]


def test_weights_that_move_are_seen_at_the_next_call():
    block = qwen3_block()
    ours = compiled(block)
    x = torch.randn(1, 7, 32)
    with torch.no_grad():
        ours(x)
        block.load_state_dict({k: torch.randn_like(v) * 0.2 for k, v in block.state_dict().items()}, assign=True)
        torch.testing.assert_close(ours(x), block(x))
        for parameter in block.parameters():
            parameter.data = torch.randn_like(parameter) * 0.2
        torch.testing.assert_close(ours(x), block(x))
        block.to(torch.bfloat16)
        assert_accurate(ours(x.bfloat16()), block(x.bfloat16()), float64_block(block, x.bfloat16()))


def test_frozen_experts_get_no_gradient_and_the_others_do():
    block = qwen3_block()
    block.experts.requires_grad_(False)
    x = torch.randn(1, 7, 32, requires_grad=True)
    out, eager = compiled(block)(x), block(x)
    grad = torch.randn_like(eager)
    for mine, theirs in zip(
        torch.autograd.grad(out, [x, block.gate.weight], grad),
        torch.autograd.grad(eager, [x, block.gate.weight], grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_training_step_of_a_decoder_and_generation_with_a_static_cache():
    from transformers import GenerationConfig

    model = qwen3_decoder(layers=1)
    tokens = torch.randint(0, 128, (2, 16))
    ours = compiled(model)
    before = last_reports()
    loss = ours(input_ids=tokens, labels=tokens, use_cache=False).loss
    eager = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(
        torch.autograd.grad(loss, list(model.parameters())), torch.autograd.grad(eager, list(model.parameters()))
    )
    assert [len(report.matches) for report in new_reports(before)] == [1]
    model.eval()
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, cache_implementation="static", pad_token_id=0)
    expected = model.generate(tokens[:, :5], generation_config=settings)
    model.forward = compiled(model.forward)
    assert torch.equal(model.generate(tokens[:, :5], generation_config=settings), expected)


@pytest.mark.parametrize("name", [graph_pass.name for _, graph_pass in PIPELINE] + ["grouped_mm"])
def test_without_any_one_pass_the_result_is_right_and_the_report_says_so(name):
    block = qwen3_block()
    before = last_reports()
    x = torch.randn(1, 7, 32, requires_grad=True)
    ours = compiled(block, options={"disable": [name]})
    out, eager = ours(x), block(x)
    grad = torch.randn_like(eager)
    torch.testing.assert_close(out, eager)
    for mine, theirs in zip(gradients(block, out, x, grad), gradients(block, eager, x, grad), strict=True):
        torch.testing.assert_close(mine, theirs)
    (report,) = new_reports(before)
    assert f'{name} is disabled by options["disable"]' in str(report)
    assert "no top-k" not in str(report)
    launched = any(record.name == "lower" and record.rewrites for record in report.passes)
    assert ("launches" in str(report)) == bool(report.schedule) == launched


def test_a_block_that_matched_without_the_pass_that_raises_it_is_left_alone_for_that_reason(monkeypatch):
    monkeypatch.setenv("MOEPDL_DISABLE", "raise_moe")
    before, x = last_reports(), torch.randn(1, 7, 32)
    compiled(qwen3_block())(x)
    (report,) = new_reports(before)
    (match,) = report.matches
    assert match.left_alone == "raise_moe is disabled by MOEPDL_DISABLE" and report.status == "unchanged"
    assert "1 block matched, 1 left alone" in report.summary()


@pytest.mark.parametrize("name", ["find_moe", "raise_moe"])
def test_a_match_that_is_required_and_disabled_is_an_error_that_says_so(name):
    x = torch.randn(1, 7, 32)
    with pytest.raises(Exception, match=f'try: leave {name} out of options."disable"') as caught:
        compiled(qwen3_block(), options={"disable": [name], "require_match": True})(x)
    assert f'{name} is disabled by options["disable"]' in str(caught.value)


def test_a_graph_without_moe_is_unchanged_and_says_so():
    model = torch.nn.Linear(4, 4)
    before = last_reports()
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(model)(x), model(x))
    (report,) = new_reports(before)
    assert report.status == "unchanged" and not report.matches and not report.misses
    assert "0 blocks matched" in report.summary()


def test_a_dry_run_reports_chains_and_changes_nothing():
    block = qwen3_block()
    x = torch.randn(1, 7, 32)
    before = last_reports()
    with torch.no_grad():
        assert torch.equal(compiled(block, options={"dryrun": True})(x), block(x))
    (report,) = new_reports(before)
    assert report.status == "dryrun" and len(report.matches) == 1 and len(report.schedule) == 1


def test_explain_is_a_report_of_the_real_backend():
    block = qwen3_block()
    report = explain(block, torch.randn(1, 7, 32))
    assert report.status == "dryrun"
    (match,) = report.matches
    assert (match.formulation, match.sizes["E"], match.sizes["k"], match.sizes["T"]) == ("grouped_mm", "8", "2", "7")
    assert match.router is not None and match.router.startswith("R1")
    assert [chain.direction for chain in report.schedule] == ["forward", "backward"]


def test_require_match_fails_with_the_reason():
    with pytest.raises(Exception, match='0 MoE blocks matched where options\\["require_match"\\] asks for 1') as caught:
        compiled(torch.nn.Linear(4, 4), options={"require_match": True})(torch.randn(2, 4))
    assert isinstance(caught.value.inner_exception, MatchRequired)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(Exception, match="remainder") as caught:
        compiled(torch.nn.Linear(4, 4), options={"remaindr": "eager"})(torch.randn(2, 4))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_a_graph_break_is_reported_as_a_fragment():
    block = qwen3_block()

    def function(x):
        y = block(x)
        torch._dynamo.graph_break()
        return y + 1

    before = last_reports()
    x = torch.randn(1, 7, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(function)(x), function(x))
    assert any("fragment" in note for note in new_reports(before)[0].notes)


def test_numeric_verification_runs_every_pass_forward_and_backward():
    block = qwen3_block()
    x = torch.randn(1, 7, 32, requires_grad=True)
    before = last_reports()
    out, eager = compiled(block, options={"verify": "numeric"})(x), block(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))
    (report,) = new_reports(before)
    assert not [note for note in report.notes if "not compared" in note]
    assert {(record.phase, record.name) for record in report.passes if record.rewrites} == {
        ("capture", "canonicalize"),
        ("capture", "raise_moe"),
        ("forward", "expand_stages"),
        ("forward", "lower"),
        ("backward", "expand_stages"),
        ("backward", "lower"),
    }


@pytest.mark.parametrize(("phase", "remainder"), covering(["capture", "graph"], ["eager", "inductor"]))
def test_a_pass_that_fails_is_named_or_falls_back_once(phase, remainder, monkeypatch):
    def breaks(graph, context):
        node = next(node for node in graph.nodes if node.op == "call_function")
        node.meta.pop("val", None)
        raise RuntimeError("lost its way")

    broken = GraphPass("broken", Level.MOE if phase == "capture" else Level.LAUNCHES, "exact", breaks, "Fails.")
    monkeypatch.setattr(pipeline, "PIPELINE", (*pipeline.PIPELINE, (phase, broken)))
    block = qwen3_block()
    x = torch.randn(1, 70, 32)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        with pytest.raises(Exception, match="pass broken: RuntimeError: lost its way"):
            compiled(block, options={"remainder": remainder})(x)
        torch._dynamo.reset()
        ours = compiled(block, options={"on_error": "fallback", "remainder": remainder})
        with pytest.warns(UserWarning, match="moepdl fell back") as warned:
            torch.testing.assert_close(ours(x), block(x))
        assert len([w for w in warned if "fell back" in str(w.message)]) == 1
    report = last_reports()[-1]
    assert report.status == "fallback" and "lost its way" in report.errors[0]


def test_inductors_own_programmatic_launches_are_told():
    def told(**options):
        return [note for note in explain(qwen3_block(), torch.randn(1, 9, 32), options=options).notes if "pdl" in note]

    assert told() == []
    (note,) = told(inductor={"triton.enable_pdl": True})
    assert note.startswith("inductor's triton.enable_pdl is on: kernels of the remainder that only write do not wait")
    with torch._inductor.config.patch({"triton.enable_pdl": True}):
        assert told() == [note]
        assert told(inductor={"triton.enable_pdl": False}) == []


def test_explain_looks_at_the_whole_graph_where_dynamo_breaks_it():
    from moe_compiler.testing import examples

    example = examples()["where_loop"]()
    report = explain(example.module, *example.inputs(9))
    assert [match.formulation for match in report.matches] == ["where_loop"]
    assert any("fullgraph=True" in note for note in report.notes)

    report = explain(qwen3_block(), torch.randn(1, 9, 32))
    assert not any("fullgraph" in note for note in report.notes)

    def broken(x):
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return y + 1

    report = explain(broken, torch.ones(3))
    assert not report.matches and any("does not make one graph" in note for note in report.notes)


def test_a_fragment_and_a_missing_match_name_the_way_out():
    block = qwen3_block()

    def function(x):
        torch._dynamo.graph_break()
        return torch.relu(x)

    x = torch.randn(3)
    with pytest.raises(Exception, match="fullgraph=True"):
        compiled(lambda x: function(torch.sin(x)), options={"require_match": True})(x)
    assert block is not None


def test_a_repro_runs_the_whole_way_and_says_how_far_it_is_from_eager(tmp_path):
    import subprocess
    import sys

    block = qwen3_block()
    with torch.no_grad():
        compiled(block, options={"dump": str(tmp_path)})(torch.randn(1, 70, 32))
    (repro,) = tmp_path.rglob("repro.py")
    text = repro.read_text()
    assert "moepdl.experts" not in text and "OPTIONS = {'remainder': 'eager'}" in text
    done = subprocess.run([sys.executable, str(repro)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "differs from eager by" in done.stdout and "1 block matched, 1 chain" in done.stdout
