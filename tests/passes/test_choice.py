"""Routers with a bias for the choice, groups, or a scale for each expert: the spellings of public models agree.

And what is near to them and means something else: it stays with Inductor, for the reason that is said, while the
experts are rewritten.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_compiler.backend import last_reports, moepdl
from moe_compiler.testing import run_passes
from tests.fast_part import covering
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.router_models import (
    KEPT,
    ROUTERS,
    SIZE,
    Block,
    E,
    G,
    H,
    K,
    Router,
    deepseek_inference_unbiased,
    deepseek_v3,
    deepseek_v3_zero,
    gemma4,
    kept_experts,
    minimax_m2,
    scaled_and_biased,
    torchtitan,
)

CAPTURE = ["canonicalize", "find_moe", "raise_moe"]
ROUTE = torch.ops.moepdl.route.default


@pytest.mark.parametrize(("name", "dtype"), covering([*ROUTERS], [torch.float32, torch.bfloat16]))
def test_a_router_of_a_model_is_raised_and_agrees(name, dtype):
    router, rule, attributes = ROUTERS[name]
    report = raised_agrees(Block(router, dtype), torch.randn(37, H, dtype=dtype))
    (match,) = report.matches
    assert (match.router, match.router_why) == (rule, "")
    assert {key: match.attributes.get(key) for key in attributes} == attributes
    assert report.misses == []


@pytest.mark.parametrize("router", [deepseek_v3, torchtitan, gemma4], ids=lambda router: router.__name__)
def test_any_number_of_tokens(router):
    module = Block(router)
    compiled = compile_eager(module, dynamic=True)
    for tokens in (37, 2, 1, 0):
        report = raised_agrees(module, torch.randn(tokens, H), compiled=compiled)
        assert report.matches[0].router.startswith("R")


@pytest.mark.slow
def test_through_inductor():
    module = Block(scaled_and_biased)
    compiled = torch.compile(module, backend=moepdl, fullgraph=True)
    report = raised_agrees(module, torch.randn(7, H), compiled=compiled)
    assert report.matches[0].router == "R11 sigmoid, bias, top-k, renormalise, per-expert scale"


def test_scores_that_are_filled_in_place_without_a_bias_are_raised_without_the_write():
    """Eager cannot differentiate this one, so without gradients. The write goes with the router that it belonged to."""
    module, x = Block(deepseek_inference_unbiased), torch.randn(37, H)
    after, report = run_passes(module, CAPTURE, x)
    (match,) = report.matches
    assert match.router == "R5 softmax, groups, top-k" and match.attributes["fill"] == "-inf"
    assert report.misses == [] and "masked_fill" not in str(after.graph) and "aten.topk" not in str(after.graph)
    with torch.no_grad():
        torch.testing.assert_close(compile_eager(module)(x), module(x))


def test_scores_that_are_filled_in_place_and_read_elsewhere_stay():
    """What is returned must be what the write left."""

    def returning(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        b.seen = scores = logits.softmax(dim=-1)
        grouped = scores.view(-1, G, SIZE)
        mask = grouped.new_ones(logits.size(0), G, dtype=torch.bool)
        mask.scatter_(1, grouped.amax(dim=-1).topk(KEPT, dim=-1)[1], False)
        ids = torch.topk(grouped.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1), K, dim=-1)[1]
        return scores.gather(1, ids), ids

    class Returning(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.seen.clamp(min=-1.0)

    module, x = Returning(returning), torch.randn(19, H)
    with torch.no_grad():
        expected = module(x)
        for one, other in zip(compile_eager(module)(x), expected, strict=True):
            torch.testing.assert_close(one, other)
    _, report = run_passes(module, CAPTURE, x)
    assert "reads memory that the router writes in place" in report.matches[0].router_why


@pytest.mark.parametrize("fill", ["0", "-inf"])
def test_a_negative_choice_meets_the_fill_as_in_the_source(fill):
    """With a bias below -1 every dropped expert beats every kept one when the fill is 0: other experts are chosen."""
    module = Block(deepseek_v3_zero if fill == "0" else deepseek_v3)
    module.bias.copy_(torch.linspace(-3.0, -1.5, E))
    x = torch.randn(37, H)
    after, report = run_passes(module, CAPTURE, x)
    assert report.matches[0].attributes["fill"] == fill
    (node,) = after.graph.find_nodes(op="call_function", target=ROUTE)
    logits = torch.nn.functional.linear(x, module.router)
    weights, ids = ROUTE(logits, module.bias, None, *node.args[3:])
    scores = logits.sigmoid() + module.bias
    best = scores.view(-1, G, SIZE).topk(2, dim=-1)[0].sum(-1)
    kept = kept_experts(best).bool().gather(1, ids)
    assert kept.all() if fill == "-inf" else not kept.any()
    chosen = logits.sigmoid().gather(1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True) * 2.5)


def test_the_bias_keeps_no_gradient_and_the_scale_gets_one():
    module = Block(lambda b, logits: ((r := minimax_m2(b, logits))[0] * b.per_expert[r[1]], r[1]))
    del module.bias
    module.bias = torch.nn.Parameter(torch.zeros(E))
    x = torch.randn(19, H)
    grads = [
        torch.autograd.grad(f(x).square().sum(), [module.bias, module.per_expert], allow_unused=True)
        for f in (module, compile_eager(module))
    ]
    assert [grad[0] for grad in grads] == [None, None]
    torch.testing.assert_close(grads[1][1], grads[0][1])
    _, report = run_passes(module, CAPTURE, x)
    assert report.matches[0].router == "R11 sigmoid, bias, top-k, renormalise, per-expert scale"


def test_scores_with_further_users_stay_beside_the_router():
    """An auxiliary loss of the scores and a count of the ids; the count is not in the order of the unsorted top-k."""

    class Returning(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(x, self.router)
            scores = logits.sigmoid()
            counts = torch.bincount(minimax_m2(self, logits)[1].flatten(), minlength=E)
            return super().forward(x), scores.mean(0), counts

    def once(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = minimax_m2(b, logits)
        b.counts = torch.bincount(ids.view(-1), minlength=E)
        return weights, ids

    class Counting(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.counts

    for module in (Returning(minimax_m2), Counting(once)):
        x = torch.randn(19, H)
        assert raised_agrees(module, x).matches[0].router == "R6 sigmoid, bias, top-k, renormalise"
        assert torch.equal(compile_eager(module)(x)[-1], module(x)[-1])


def test_a_recomputed_choice_is_the_same():
    """Equal scores everywhere: under activation checkpointing the recomputed router picks what the first one picked."""

    class Recomputed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    plain, recomputed = Block(deepseek_v3), Recomputed(deepseek_v3)
    with torch.no_grad():
        plain.router.zero_()
        plain.bias.zero_()
    recomputed.load_state_dict(plain.state_dict())
    x = torch.randn(19, H)
    results = []
    for module in (plain, recomputed):
        y = compile_eager(module)(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [module.router, module.gate_up, module.down])])
        assert last_reports()[-1].matches[0].router == "R5 sigmoid, bias, groups, top-k, renormalise"
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_detached_score_is_not_differentiated():
    def detached(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(torch.softmax(logits, -1).detach(), K)

    assert raised_agrees(Block(detached), torch.randn(19, H)).matches[0].router == "top-k"


# Near to a rule, and another: (router, words of the reason)


def _limited(choice: Tensor, best: Tensor, fill: float = float("-inf")) -> Tensor:
    return choice.masked_fill(~kept_experts(best).bool(), fill)


def _gathered(scores: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    ids = choice.topk(K, dim=-1)[1]
    return scores.gather(1, ids), ids


def smallest_group(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, _limited(scores, scores.view(-1, G, SIZE).topk(2, largest=False)[0].sum(-1)))


def mean_of_the_group(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, _limited(scores, scores.view(-1, G, SIZE).mean(-1)))


def sum_of_the_group(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, _limited(scores, scores.view(-1, G, SIZE).sum(-1)))


def worst_groups(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    kept = kept_experts(scores.view(-1, G, SIZE).amax(-1)).bool()
    return _gathered(scores, scores.masked_fill(kept, float("-inf")))


def groups_by_the_unbiased(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, _limited(scores + b.bias, scores.view(-1, G, SIZE).amax(-1)))


def groups_of_strangers(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Expert e is in group e % G, not e // SIZE."""
    scores = logits.sigmoid()
    best = scores.view(-1, SIZE, G).amax(1).topk(KEPT)[1]
    mask = torch.zeros(logits.shape[0], G).scatter(1, best, 1.0)
    return _gathered(scores, scores.masked_fill(mask.repeat(1, SIZE) == 0, float("-inf")))


def another_fill(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, _limited(scores, scores.view(-1, G, SIZE).amax(-1), -1.0))


def fill_among_the_weights(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As many experts are chosen as one group does not have, so zeros are among the weights."""
    scores = logits.softmax(-1)
    best = scores.view(-1, G, SIZE).amax(-1).topk(1)[1]
    mask = torch.zeros(logits.shape[0], G).scatter(1, best, 1.0).unsqueeze(-1).expand(-1, G, SIZE).reshape(-1, E)
    return torch.topk(scores.masked_fill(mask == 0, 0.0), SIZE + 1)


def masked_raw_logits(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits may be negative, and then the zeros are chosen."""
    return torch.topk(_limited(logits, logits.view(-1, G, SIZE).amax(-1), 0.0), K)


def a_bias_for_each_token(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, scores + logits.cos())


def a_bias_with_a_factor(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, torch.add(scores, b.bias, alpha=2))


def a_factor_for_the_choice(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, scores * b.per_expert)


def weights_of_other_scores(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    return _gathered(logits.softmax(-1), logits.sigmoid() + b.bias)


def a_rounded_choice(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    return _gathered(scores, (scores + b.bias).to(torch.bfloat16))


def groups_in_a_wider_type(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.bfloat16).sigmoid()
    wide = scores.float()
    return _gathered(scores, _limited(wide, wide.view(-1, G, SIZE).topk(2)[0].sum(-1)))


def scaled_before_the_sum(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.sigmoid(), K)
    weights = weights * 3.0
    return weights / (weights.sum(-1, keepdim=True) + 1.0), ids


def own_scale_before_the_sum(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.sigmoid(), K)
    weights = weights * b.per_expert[ids]
    return weights / weights.sum(-1, keepdim=True), ids


def scale_of_another_order(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.sigmoid(), K)
    return weights * b.per_expert[ids.flip(-1)], ids


def clamped_above(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.sigmoid(), K)
    return weights / weights.sum(-1, keepdim=True).clamp(0.5, 1.0), ids


def minimum(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.sigmoid().min(-1, keepdim=True)
    return values, ids


def a_third(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplying by the inverse of 3 rounds twice."""
    weights, ids = torch.topk(logits.sigmoid(), K)
    return weights / 3, ids


NEAR: dict[str, tuple[Router, str]] = {
    "smallest_group": (smallest_group, "groups by their smallest"),
    "mean_of_the_group": (mean_of_the_group, "scored by mean, not by their best"),
    "sum_of_the_group": (sum_of_the_group, "scored by sum, not by their best"),
    "worst_groups": (worst_groups, "the best groups are filled"),
    "groups_by_the_unbiased": (groups_by_the_unbiased, "scored by something else than the choice"),
    "groups_of_strangers": (groups_of_strangers, "in the mask of the groups"),
    "another_fill": (another_fill, "filled with -1.0, not 0 or -inf"),
    "fill_among_the_weights": (fill_among_the_weights, "a fill may be among the chosen"),
    "masked_raw_logits": (masked_raw_logits, "a fill may be among the chosen"),
    "a_bias_for_each_token": (a_bias_for_each_token, "not one number an expert"),
    "a_bias_with_a_factor": (a_bias_with_a_factor, "the bias for the choice has a factor"),
    "a_factor_for_the_choice": (a_factor_for_the_choice, "mul is neither a bias"),
    "weights_of_other_scores": (weights_of_other_scores, "other scores than they are weighted with"),
    "a_rounded_choice": (a_rounded_choice, "other scores than they are weighted with"),
    "groups_in_a_wider_type": (groups_in_a_wider_type, "compared in a wider dtype"),
    "scaled_before_the_sum": (scaled_before_the_sum, "scaled before they are renormalised"),
    "own_scale_before_the_sum": (own_scale_before_the_sum, "own scale is applied before"),
    "scale_of_another_order": (scale_of_another_order, "not from the top-k's scores"),
    "clamped_above": (clamped_above, "something else than their own sum"),
    "minimum": (minimum, "do not come from a top-k"),
    "a_third": (a_third, "not from the top-k's scores"),
}


# What of them is a rule all the same, up to the step that is not: that is raised, and the rest stays.
STARTS = {
    "scaled_before_the_sum": "sigmoid, top-k, then Inductor",
    "own_scale_before_the_sum": "R11 sigmoid, top-k, per-expert scale, then Inductor",
    "scale_of_another_order": "sigmoid, top-k, then Inductor",
    "clamped_above": "sigmoid, top-k, then Inductor",
    "a_third": "sigmoid, top-k, then Inductor",
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_near_to_a_rule_stays_for_a_reason(name):
    router, words = NEAR[name]
    module, x = Block(router), torch.randn(37, H)
    _, report = run_passes(module, CAPTURE, x)
    (match,) = report.matches
    assert match.formulation == "batched_mm" and match.router == STARTS.get(name)
    reason, _, where = match.router_why.partition(", at ")
    assert words in reason and "router_models.py:" not in reason
    assert "test_choice.py:" in where or "router_models.py:" in where
    assert report.misses == []
    with torch.no_grad():
        torch.testing.assert_close(compile_eager(module)(x), module(x))


def test_a_bias_that_is_in_the_weights_too_is_no_bias_for_the_choice():
    """The biased scores are what is chosen and weighted: a plain top-k of what is computed before it."""

    def both(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.sigmoid() + b.bias.abs(), K)

    after, report = run_passes(Block(both), CAPTURE, torch.randn(5, H))
    assert report.matches[0].router == "top-k" and report.matches[0].attributes["bias"] is False
    (node,) = after.graph.find_nodes(op="call_function", target=ROUTE)
    assert node.args[1] is None and node.args[0].target is torch.ops.aten.add.Tensor
    raised_agrees(Block(both), torch.randn(37, H))


def test_a_choice_without_gradients_that_is_read_there_stays():
    """The raised router would stand behind its reader."""

    def read_inside(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        with torch.no_grad():
            ids = torch.topk(scores + b.bias, K, dim=-1)[1]
            b.load = torch.bincount(ids.flatten(), minlength=E)
        return scores.gather(1, ids), ids

    class Returning(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.load

    module = Returning(read_inside)
    report = raised_agrees(module, torch.randn(19, H))
    assert "reads the ids inside of the grad-mode region" in report.matches[0].router_why


class WeighedEarly(torch.nn.Module):
    """The largest score is read, and changed, before the code asks whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))
        self.down = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x_BSH).softmax(-1)
        weights = (scores.amax(-1) + 0.25).view(-1, 1)
        ids, x = scores.argmax(-1).view(-1, 1), x_BSH.view(-1, 8)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.experts, self.down, strict=True)):
            t, n = torch.where(ids == e)
            out = out.index_add(0, t, down(torch.nn.functional.silu(up(x[t]))) * weights[t, n, None])
        return out.view_as(x_BSH)


def test_weights_that_are_read_before_the_choice_keep_the_router_where_it_is():
    torch.manual_seed(0)
    module, x = WeighedEarly(), torch.randn(2, 7, 8)
    compiled = torch.compile(module, backend=moepdl, options={"remainder": "eager"}, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    (match,) = last_reports()[-1].matches
    assert match.router is None and match.router_why
