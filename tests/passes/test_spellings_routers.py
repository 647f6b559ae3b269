"""Every router rule in several spellings, each in fp32 and bf16, with and without gradients, static and dynamic.

What a model may write otherwise than the examples elsewhere: scores of a batch [B, S, E], a sort instead of a top-k,
views and copies between the steps, numbers that are attributes of the module or tensors, one expert a token without a
dimension for it. Each is one match with its router, agrees with float64, gives the gradients that eager gives (None
where eager gives None), and leaves every list of passes at its fixed point.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler import compilation
from moe_compiler.backend import last_reports
from moe_compiler.moe_ir import op_name
from moe_compiler.numeric import copy_graph
from moe_compiler.testing import capture_graph, run_passes
from tests.fast_part import one_in
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.test_damage import _run, _values, damages
from tests.properties.check import run_phase_twice

E, K, G, KEPT, H, I = 8, 2, 4, 2, 8, 8

Router = Callable[["Block", Tensor], tuple[Tensor, Tensor]]


class Block(torch.nn.Module):
    """x [B, S, H] -> y, the experts written as batched_mm. bias: learned by nobody, it only chooses."""

    def __init__(self, router: Router, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.route, self.k, self.scale, self.eps = router, k, 2.5, 1e-9

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(*shape) * shape[-1] ** -0.5).to(dtype))

        self.router = torch.nn.Parameter((torch.randn(E, H) * 2).to(dtype))
        self.gate_up, self.down = made(E, 2 * I, H), made(E, H, I)
        self.bias = torch.nn.Parameter(torch.linspace(-1.5, 0.5, E)[torch.randperm(E)])
        self.per_expert = torch.nn.Parameter((torch.rand(E) + 0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(self, F.linear(x, self.router))
        rows, flat = x.reshape(-1, H).repeat_interleave(self.k, 0), ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        rows = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        rows = rows * weights.to(x.dtype).reshape(-1, 1)
        return rows.view(-1, self.k, H).sum(1).view(x.shape)


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, E)


@torch.no_grad()
def tokens_of_clear_choice(module: Block, batch: int, tokens: int) -> Tensor:
    """x [batch, tokens, H] of which no rounding decides an expert: equal scores are another test's matter."""
    x = torch.randn(1, 4 * batch * tokens + 8, H, dtype=module.router.dtype)
    logits = F.linear(x, module.router)

    def chosen(logits: Tensor) -> Tensor:
        return module.route(module, logits)[1].long().reshape(-1, module.k).sort(-1)[0]

    clear = torch.ones(x.shape[1], dtype=torch.bool)
    for _ in range(8):
        clear &= (chosen(logits + 0.04 * torch.randn_like(logits)) == chosen(logits)).all(-1)
    return x[0, clear][: batch * tokens].reshape(batch, tokens, H)


# R1 and R2: softmax, top-k, divided by the sum


def renormalised_in_a_batch(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.softmax(-1, dtype=torch.float32), K, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.view(-1, K), ids.view(-1, K)


def renormalised_by_a_sort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.sort(F.softmax(flat(logits), dim=1), dim=1, descending=True)
    values = values[:, :K].contiguous()
    values /= values.sum(1).unsqueeze(1)
    return values, ids[:, :K]


def renormalised_by_a_norm(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """megablocks and dbrx: an L_p norm, whose p is 1."""
    weights, ids = torch.topk(flat(logits).softmax(-1), K, dim=-1)
    return F.normalize(weights, p=1.0, dim=-1), ids


def renormalised_and_scaled(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the epsilon are attributes: under dynamic=True Dynamo makes numbers of graph inputs of them."""
    weights, ids = torch.topk(flat(logits).softmax(-1), K, dim=-1)
    denominator = weights.unsqueeze(0).sum(-1, keepdim=True).squeeze(0) + b.eps
    return (weights / denominator) * b.scale, ids.clone()


# R3: softmax, top-k


def plain_with_views(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.softmax(-1), K, dim=-1)
    weights = weights.reshape(-1).view(-1, K).unsqueeze(0).squeeze(0)
    return weights, ids.contiguous().clone().reshape(-1, K)


def plain_by_argsort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits, dim=-1)
    ids = scores.argsort(dim=-1, descending=True, stable=True)[..., :K]
    return torch.tensor(1.5) * scores.gather(-1, ids), ids


def plain_scaled(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits.unsqueeze(1), dim=-1, dtype=torch.float32).squeeze(1)
    weights, ids = scores.view(-1, E).topk(K)
    return torch.mul(weights, b.scale).to(logits.dtype), ids


# R4: top-k, softmax over the K


def after_in_a_batch(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(K, dim=2)
    return values.float().softmax(dim=2).flatten(0, 1), ids.flatten(0, 1)


def after_the_end_of_an_argsort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The last columns of an ascending sort are in an order of their own, which nobody sees."""
    logits = flat(logits)
    ids = torch.argsort(logits, -1)[:, -K:]
    return torch.softmax(torch.take_along_dim(logits, ids, 1), -1), ids


def after_more_than_are_used(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The noisy top-k of 2017 asks for one more."""
    values, ids = flat(logits).topk(K + 1, dim=1)
    return F.softmax(values[:, :K], dim=1), ids[:, :K]


# R5: groups


def groups_in_a_batch(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    choice = scores + b.bias
    best = choice.unflatten(-1, (G, E // G)).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(best).scatter_(-1, torch.topk(best, KEPT, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(*mask.shape, E // G).flatten(-2)
    ids = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), K, dim=-1, sorted=False)[1]
    weights = scores.gather(-1, ids)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) * b.scale).view(-1, K), ids.view(-1, K)


def groups_by_a_sort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = flat(logits).softmax(-1, dtype=torch.float32)
    grouped = scores.view(-1, G, E // G)
    kept = grouped.amax(-1).argsort(-1, descending=True)[:, :KEPT]
    dropped = torch.ones(kept.shape[0], G, dtype=torch.bool).scatter(1, kept, False)
    choice = torch.where(dropped.unsqueeze(-1), 0.0, grouped).reshape(-1, E)
    ids = torch.sort(choice, 1, descending=True).indices.narrow(1, 0, K)
    return scores.gather(1, ids), ids


def groups_of_rows(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Filled in the shape of the groups, chosen in the shape of the batch."""
    scores = logits.sigmoid()
    grouped = scores.reshape(-1, G, E // G)
    kept = grouped.max(-1).values.topk(KEPT, -1).indices
    mask = torch.zeros(kept.shape[0], G).scatter(1, kept, 1.0)
    choice = grouped.masked_fill((mask == 0).unsqueeze(2), float("-inf")).view(scores.shape)
    ids = choice.topk(K, -1)[1]
    return torch.gather(scores, -1, ids).reshape(-1, K), ids.reshape(-1, K)


# R6: a bias for the choice alone


def biased_in_a_batch(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    ids = torch.topk(scores.detach() + b.bias, K, dim=-1)[1]
    weights = scores.gather(2, ids)
    return weights / weights.sum(-1, keepdim=True).clamp(min=b.eps), ids


def biased_by_argsort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = flat(logits).float().softmax(1)
    ids = (b.bias[None] + scores).argsort(1, descending=True)[:, :K]
    return scores[torch.arange(ids.shape[0])[:, None], ids] * 6, ids


def biased_with_views(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    ids = (scores.view(-1, E) + b.bias.view(1, E)).topk(K, sorted=False)[1].view(*scores.shape[:-1], K)
    weights = scores.gather(-1, ids).view(-1, K)
    return weights / weights.abs().sum(-1, keepdim=True), ids.view(-1, K)


# R7: top-k, sigmoid


def sigmoid_in_a_batch(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, K)
    return torch.sigmoid(values.reshape(-1, K).float()).to(logits.dtype), ids.reshape(-1, K).to(torch.int32)


def sigmoid_by_a_sort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = flat(logits).sort(dim=-1, descending=True)
    return values.narrow(-1, 0, K).sigmoid(), ids.narrow(-1, 0, K)


def sigmoid_of_the_largest(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = flat(logits).max(dim=-1)
    return values.float().sigmoid(), ids


# R9: one expert a token


def argmax_without_a_dimension(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits, dim=-1)
    ids = torch.argmax(scores, dim=-1)
    return scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1), ids


def max_without_a_dimension(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.max(F.softmax(flat(logits), dim=-1, dtype=torch.float32), dim=-1)
    return weights * b.scale, ids


def argmax_beside_amax(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    return scores.amax(dim=-1), scores.argmax(dim=-1)


def top_1(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = flat(logits).softmax(-1).topk(1)
    return weights.squeeze(-1), ids.view(-1)


def first_of_a_stable_sort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of equal scores the first, as argmax takes it."""
    values, ids = torch.sort(flat(logits).softmax(-1), dim=-1, descending=True, stable=True)
    return values[:, :1], ids[:, :1]


# R11: a scale for each expert


def own_scale_in_a_batch(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * b.per_expert[ids], ids


def own_scale_by_a_sort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.sort(flat(logits).softmax(-1), descending=True)
    ids = ids[:, :K]
    return F.embedding(ids, b.per_expert.unsqueeze(1)).squeeze(-1) * values[:, :K] * b.scale, ids


def own_scale_taken(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(K, -1)
    weights = values.softmax(-1) * torch.take(b.per_expert, ids)
    return weights.flatten(0, 1), ids.view(-1, K)


# A choice by sorting stays, and only the experts are raised.
SPELLINGS: dict[str, list[tuple[Router, str | None]]] = {
    "R1": [
        (renormalised_in_a_batch, "R1/R2 softmax, top-k, renormalise"),
        (renormalised_by_a_sort, None),
        (renormalised_by_a_norm, "R1/R2 softmax, top-k, renormalise"),
        (renormalised_and_scaled, "R1/R2 softmax, top-k, renormalise"),
    ],
    "R3": [
        (plain_with_views, "R3 softmax, top-k"),
        (plain_by_argsort, None),
        (plain_scaled, "R3 softmax, top-k"),
    ],
    "R4": [
        (after_in_a_batch, "R4 top-k, softmax"),
        (after_the_end_of_an_argsort, None),
        (after_more_than_are_used, "R4 top-k, softmax"),
    ],
    "R5": [
        (groups_in_a_batch, "R5 sigmoid, bias, groups, top-k, renormalise"),
        (groups_by_a_sort, None),
        (groups_of_rows, "R5 sigmoid, groups, top-k"),
    ],
    "R6": [
        (biased_in_a_batch, "R6 sigmoid, bias, top-k, renormalise"),
        (biased_by_argsort, None),
        (biased_with_views, "R6 sigmoid, bias, top-k, renormalise"),
    ],
    "R7": [
        (sigmoid_in_a_batch, "R7 top-k, sigmoid"),
        (sigmoid_by_a_sort, None),
        (sigmoid_of_the_largest, "R7 top-k, sigmoid"),
    ],
    "R9": [
        (argmax_without_a_dimension, "R3 softmax, top-k"),
        (max_without_a_dimension, "R3 softmax, top-k"),
        (argmax_beside_amax, "R3 softmax, top-k"),
        (top_1, "R3 softmax, top-k"),
        (first_of_a_stable_sort, "R3 softmax, top-k"),
    ],
    "R11": [
        (own_scale_in_a_batch, "R11 softmax, top-k, renormalise, per-expert scale"),
        (own_scale_by_a_sort, None),
        (own_scale_taken, "R11 top-k, softmax, per-expert scale"),
    ],
}
ONE = {*(router for router, _ in SPELLINGS["R9"]), sigmoid_of_the_largest}
WAYS = tuple(itertools.product((torch.float32, torch.bfloat16), (True, False), (False, True)))


def cases() -> Iterator[object]:
    """Each spelling in all eight ways; one of them, another for each spelling, is not slow."""
    each = [(router, rule) for spelled in SPELLINGS.values() for router, rule in spelled]
    for number, (router, rule) in enumerate(each):
        for place, (dtype, training, dynamic) in enumerate(WAYS):
            words = (router.__name__, str(dtype).removeprefix("torch."), ("inference", "training")[training])
            name = "-".join((*words, ("static", "dynamic")[dynamic]))
            marks = () if place == number * 3 % len(WAYS) else pytest.mark.slow
            yield pytest.param(router, rule, dtype, training, dynamic, id=name, marks=marks)


@pytest.mark.parametrize(("router", "rule", "dtype", "training", "dynamic"), list(cases()))
def test_a_router_in_another_spelling_is_raised_unless_it_sorts_and_agrees(router, rule, dtype, training, dynamic):
    module = Block(router, 1 if router in ONE else K, dtype)
    compiled = compile_eager(module, dynamic=dynamic)
    with mock.patch.object(compilation, "run_phase", run_phase_twice):
        # Enough tokens for an error in bf16 to be no matter of chance.
        for batch, tokens in ((2, 37), (3, 25)) if dynamic else ((2, 37),):
            x = tokens_of_clear_choice(module, batch, tokens)
            report = raised_agrees(module, x, compiled=compiled, training=training)
            (match,) = report.matches
            assert (match.formulation, match.count) == ("batched_mm", 1) and bool(match.router_why) == (rule is None)
            assert rule is not None or re.search("sort.*; try: write torch.topk", match.router_why)
            assert match.router == rule and not report.misses and not report.errors
    if training:
        _check_which_have_gradients(module, compiled, x)


def _check_which_have_gradients(module: Block, compiled: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """None stays None: the bias that only chooses, and what a router does not read."""
    x = x.detach().requires_grad_()
    leaves = [x, *module.parameters()]
    eager, ours = (torch.autograd.grad(f(x).sum(), leaves, allow_unused=True) for f in (module, compiled))
    assert [grad is None for grad in ours] == [grad is None for grad in eager]
    assert any(grad is None for grad in eager)


@pytest.mark.parametrize("router", one_in(2, [groups_in_a_batch, renormalised_and_scaled, biased_with_views, top_1]))
def test_one_compilation_serves_any_number_of_tokens(router):
    module = Block(router, 1 if router in ONE else K, torch.float32)
    compiled = compile_eager(module, dynamic=True)
    raised_agrees(module, tokens_of_clear_choice(module, 2, 3), compiled=compiled)
    before = len(last_reports())
    for batch, tokens in ((4, 5), (3, 2), (37, 6)):
        raised_agrees(module, tokens_of_clear_choice(module, batch, tokens), compiled=compiled)
    assert len(last_reports()) == before
    for batch, tokens in ((1, 1), (1, 5), (2, 0)):
        report = raised_agrees(module, tokens_of_clear_choice(module, batch, tokens), compiled=compiled)
        assert (report.matches[0].router or "")[:1] == "R", report.matches[0].router_why


@torch.no_grad()
def check_damages(router: Router, every: int) -> None:
    """Do one damage in `every` to the operators ahead of the experts: what is matched still computes what it says."""
    module = Block(router, 1 if router in ONE else K, torch.float32)
    captured = capture_graph(module, torch.randn(2, 7, H))
    values = _values(captured)
    own = itertools.takewhile(lambda node: op_name(node) != "bmm", captured.graph.nodes)
    tried = 0
    for damage in [damage for node in own for damage in damages(node)][::every]:
        if damage.what in ("clamped", "rounded"):
            continue  # they make scores equal, and of equals any may be chosen
        damaged = copy_graph(captured)
        (target,) = [node for node in damaged.graph.nodes if node.name == damage.node]
        before = _run(copy_graph(damaged), values) if damage.apply(target) else None
        if before is None:
            continue
        tried += 1
        after, report = run_passes(damaged, ["canonicalize", "find_moe", "raise_moe"])
        found = _run(after, values)
        what = f"{damage.node} {damage.what}: {[match.router for match in report.matches]}"
        assert found is not None, what
        for mine, theirs in zip(found, before, strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan()), what
            error, scale = (mine - theirs).norm(), theirs.norm() + 1e-6
            assert error <= 1e-4 * scale or not theirs.isfinite().all(), f"{what}: {error / scale:.1e}"
    assert tried > 40 // every


@pytest.mark.parametrize("router", [spelled[0][0] for spelled in SPELLINGS.values()], ids=list(SPELLINGS))
def test_a_damaged_router_stays_or_means_what_it_says(router):
    check_damages(router, every=9)


@pytest.mark.slow
@pytest.mark.parametrize("router", [router for spelled in SPELLINGS.values() for router, _ in spelled])
def test_every_damage_of_a_router_stays_or_means_what_it_says(router):
    check_damages(router, every=1)
