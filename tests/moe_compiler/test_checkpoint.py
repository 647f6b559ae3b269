"""Activation checkpointing, full and selective: gradients of the function that ran, with the experts that it chose."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_compiler.backend import last_reports, moepdl
from tests.fast_part import covering
from tests.moe_compiler.blocks import qwen3_block, qwen3_decoder

_aten = torch.ops.aten


def _save_products(_context, operator, *_args, **_kwargs):
    """The usual policy of selective checkpointing: products are kept, everything else is recomputed."""
    kept = operator in (_aten.mm.default, _aten.bmm.default, _aten._grouped_mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all(_context, _operator, *_args, **_kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


POLICIES = {"full": None, "selective": _save_products, "recompute": _recompute_all}


def checkpointed(block, policy):
    """norm, then the block, in a checkpoint; the residual outside of it."""
    norm = torch.nn.RMSNorm(32)
    extra = {}
    if POLICIES[policy] is not None:
        extra["context_fn"] = lambda: create_selective_checkpoint_contexts(POLICIES[policy])

    def function(x):
        return x + checkpoint(lambda h: block(norm(h)), x, use_reentrant=False, **extra)

    return function, [*block.parameters(), *norm.parameters()]


def stages_of(report, direction):
    return [node["label"] for dag in report.dags if dag.direction == direction for node in dag.nodes]


def chains_of(report, direction):
    return [
        launch.kernel
        for chain in report.schedule
        if chain.direction == direction
        for launch in chain.variants[-1].launches
    ]


@pytest.mark.parametrize(("policy", "remainder"), covering([*POLICIES], ["eager", "inductor"]))
def test_the_backward_graph_recomputes_the_experts_and_not_their_choice(policy, remainder):
    block = qwen3_block()
    function, parameters = checkpointed(block, policy)
    ours = torch.compile(function, backend=moepdl, options={"remainder": remainder, "require_match": True})
    x = torch.randn(1, 70, 32, requires_grad=True)
    out, eager = ours(x), function(x)
    torch.testing.assert_close(out, eager)
    wanted = torch.autograd.grad(eager.square().sum(), [x, *parameters])
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), [x, *parameters]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    report = last_reports()[-1]
    assert "route" in chains_of(report, "forward")
    backward = chains_of(report, "backward")
    assert "order" in backward and "route" not in backward and "route" not in stages_of(report, "backward")


@pytest.mark.parametrize(("policy", "remainder"), covering([*POLICIES], ["eager", "inductor"]))
def test_tied_experts_get_the_gradients_of_the_forward_pass(policy, remainder):
    """All scores are equal, so any choice is right, as long as the recomputation makes the same."""
    block = qwen3_block()
    with torch.no_grad():
        block.gate.weight.fill_(0.1)
    function, parameters = checkpointed(block, policy)
    ours = torch.compile(function, backend=moepdl, options={"remainder": remainder, "require_match": True})
    x = torch.randn(1, 70, 32, requires_grad=True)
    grads = torch.autograd.grad(ours(x).square().sum(), [x, *parameters])
    gate_up = grads[1 + [name for name, _ in block.named_parameters()].index("experts.gate_up_proj")]
    used = {expert for expert in range(8) if gate_up[expert].abs().sum() > 0}
    assert 2 <= len(used) < 8
    with torch.no_grad():
        for expert in set(range(8)) - used:
            block.experts.gate_up_proj[expert] = torch.nan
    assert torch.isfinite(ours(x)).all()


def test_a_router_that_stays_with_inductor_keeps_its_choice_too(tmp_path):
    """The second best by a full sort: no rule of ours, and the checkpoint may not sort the recomputed scores again."""
    block = qwen3_block()

    def inner(x):
        flat = x.reshape(-1, 32)
        scores = torch.sigmoid(torch.nn.functional.linear(flat, block.gate.weight))
        ids = scores.argsort(dim=-1, descending=True)[:, 1:3]
        return block.experts(flat, ids, scores.gather(1, ids)).reshape(x.shape)

    def function(x):
        return checkpoint(inner, x, use_reentrant=False)

    options = {"remainder": "eager", "require_match": True, "dump": str(tmp_path)}
    ours = torch.compile(function, backend=moepdl, options=options)
    x = torch.randn(1, 70, 32, requires_grad=True)
    out, eager = ours(x), function(x)
    torch.testing.assert_close(out, eager)
    parameters = [x, *block.parameters()]
    for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (out, eager)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    report = last_reports()[-1]
    assert report.matches[0].router is None
    (backward,) = [graph.code for graph in report.graphs if (graph.phase, graph.name) == ("backward", "autograd")]
    assert "sigmoid" in backward and "sort" not in backward


def test_a_decoder_with_transformers_own_checkpointing():
    model = qwen3_decoder().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.randint(0, 128, (2, 16))
    ours = torch.compile(model, backend=moepdl, options={"remainder": "eager"})
    before = last_reports()
    loss, eager = (m(input_ids=tokens, labels=tokens, use_cache=False).loss for m in (ours, model))
    torch.testing.assert_close(loss, eager)
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(eager, parameters))
    # Only so many reports are kept: in a long run their number does not tell which ones are new.
    new = [report for report in last_reports() if not any(report is known for known in before)]
    assert sum(len(report.matches) for report in new) == 2


def test_the_start_of_a_router_is_not_recomputed(tmp_path):
    """Masks stand between the raised router and the experts: what it gave is kept, not only what they made of it."""
    block = qwen3_block()

    def inner(x):
        flat = x.reshape(-1, 32)
        weights, ids = torch.topk(torch.softmax(torch.nn.functional.linear(flat, block.gate.weight), -1), 2, dim=-1)
        none = ids == 7
        return block.experts(flat, ids.masked_fill(none, 0), weights.masked_fill(none, 0)).reshape(x.shape)

    def function(x):
        return checkpoint(inner, x, use_reentrant=False)

    options = {"remainder": "eager", "require_match": True, "dump": str(tmp_path)}
    ours = torch.compile(function, backend=moepdl, options=options)
    x = torch.randn(1, 70, 32, requires_grad=True)
    out, eager = ours(x), function(x)
    torch.testing.assert_close(out, eager)
    parameters = [x, *block.parameters()]
    for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (out, eager)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    report = last_reports()[-1]
    assert report.matches[0].router == "R3 softmax, top-k, then Inductor"
    (backward,) = [graph.code for graph in report.graphs if (graph.phase, graph.name) == ("backward", "autograd")]
    assert "moepdl.route_backward" in backward and "moepdl.route.default" not in backward
