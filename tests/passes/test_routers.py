"""Routers: which rules are raised, in how many spellings, and which stay with Inductor while the experts do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.backend import last_reports, moepdl
from moe_compiler.testing import run_passes
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.spellings import Block, E, H, I, K

Router = Callable[[Block, Tensor], tuple[Tensor, Tensor]]


def experts(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    gate, up = torch.bmm(b.gate_up[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (rows * weights.to(x.dtype).reshape(-1, 1)).view(-1, K, H).sum(1)


def routed(router: Router) -> Block:
    """A block whose experts are written as batched_mm, whatever the router."""
    return Block(lambda b, x, logits: experts(b, x, *router(b, logits)))


def softmax_renormalized(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float32), K, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, ids


def softmax_renormalized_by_gather(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1)
    ids = scores.topk(K, sorted=False).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1)[:, None], ids


def softmax_renormalized_with_eps(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits, -1)
    ids = torch.topk(scores, k=K, dim=1)[1]
    weights = torch.take_along_dim(scores, ids, dim=-1)
    return torch.div(weights, torch.sum(weights, -1, True) + 1e-20) * 2.5, ids


def softmax_plain(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.special.softmax(logits.float(), dim=-1), K, dim=-1)


def softmax_scaled(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax(logits, dim=-1).topk(K, -1)
    return weights * 16.0, ids.to(torch.int32)


def softmax_after(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, K)
    return F.softmax(values, dim=1, dtype=torch.float).to(logits.dtype), ids


def softmax_after_gather(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.topk(K, dim=-1, sorted=False).indices
    return torch.softmax(logits.gather(-1, ids).float(), dim=-1), ids


def sigmoid_after(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, K, dim=1)
    return torch.sigmoid(values.float()), ids


def sigmoid_before(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    weights, ids = torch.topk(scores, K, dim=-1)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-9) * 1.5, ids


def raw(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(logits, K, dim=-1)


def by_sorting(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.argsort(dim=-1, descending=True)[:, :K]
    return torch.softmax(logits.gather(1, ids), dim=-1), ids


RULES: dict[str, tuple[Router, str]] = {
    "renormalized": (softmax_renormalized, "R1/R2 softmax, top-k, renormalise"),
    "renormalized_by_gather": (softmax_renormalized_by_gather, "R1/R2 softmax, top-k, renormalise"),
    "renormalized_with_eps": (softmax_renormalized_with_eps, "R1/R2 softmax, top-k, renormalise"),
    "plain": (softmax_plain, "R3 softmax, top-k"),
    "scaled": (softmax_scaled, "R3 softmax, top-k"),
    "after": (softmax_after, "R4 top-k, softmax"),
    "after_gather": (softmax_after_gather, "R4 top-k, softmax"),
    "sigmoid_after": (sigmoid_after, "R7 top-k, sigmoid"),
    "sigmoid_before": (sigmoid_before, "sigmoid, top-k, renormalise"),
    "raw": (raw, "top-k"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_raised_and_agrees(name):
    router, rule = RULES[name]
    report = raised_agrees(routed(router), torch.randn(37, H))
    (match,) = report.matches
    assert (match.router, match.router_why) == (rule, "")


def test_the_attributes_of_a_router_are_those_of_the_source():
    after, report = run_passes(
        routed(softmax_renormalized_with_eps), ["canonicalize", "find_moe", "raise_moe"], torch.randn(5, H)
    )
    (route,) = after.graph.find_nodes(op="call_function", target=torch.ops.moepdl.route.default)
    assert route.args[1:4] == (None, None, K)
    assert route.args[4:] == (
        *("softmax", "before", 1, 1, 1, "-inf", True, False),
        *(1e-20, 2.5, torch.float32, torch.float32),
    )
    assert not after.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
    (match,) = report.matches
    assert {name: match.attributes[name] for name in ("renormalize", "eps", "scale")} == {
        "renormalize": True,
        "eps": 1e-20,
        "scale": 2.5,
    }


def test_a_rounding_of_the_scores_before_the_choice_is_kept():
    """Scores that are rounded before the top-k choose other experts than scores that are not."""

    def narrowed(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(torch.softmax(logits.float(), -1).to(torch.bfloat16), K, dim=-1)

    after, _ = run_passes(routed(narrowed), ["canonicalize", "find_moe", "raise_moe"], torch.randn(5, H))
    (route,) = after.graph.find_nodes(op="call_function", target=torch.ops.moepdl.route.default)
    assert route.args[0].meta["val"].dtype == torch.bfloat16 and route.args[4] == "none"


# Rules that are not raised


def normalized_by_length(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1)
    return F.normalize(weights, p=2.0, dim=-1), ids


def over_tokens(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.softmax(logits, dim=0), K, dim=-1)


def smallest(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.softmax(logits, dim=-1), K, dim=-1, largest=False)


def by_table(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """R10: experts by a hash, without a choice."""
    ids = (torch.arange(logits.shape[0])[:, None] * 7 + torch.arange(K)) % E
    return torch.softmax(logits, -1).gather(1, ids), ids


def divided_by_another(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits, -1)
    weights, ids = torch.topk(scores, K, dim=-1)
    return weights / scores.sum(-1, keepdim=True), ids


def second_best(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.argsort(dim=-1, descending=True)[:, 1 : K + 1]
    return torch.softmax(logits.gather(1, ids), dim=-1), ids


def first_of_an_ascending_sort(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1)
    return torch.softmax(values[:, :K], dim=-1), ids[:, :K]


def values_of_other_columns(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(K + 1)
    return torch.sigmoid(values[:, 1 : K + 1]), ids[:, :K]


def cut_out_of_an_unsorted_choice(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which K of the K + 1 comes first is not said."""
    values, ids = torch.topk(logits, K + 1, sorted=False)
    return torch.sigmoid(values[:, :K]), ids[:, :K]


def raw_by_absolute_values(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits may be negative, and then the sum is another one."""
    values, ids = torch.topk(logits, K)
    return F.normalize(values, p=1.0, dim=-1), ids


def over_all_tokens(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1)
    return weights / torch.linalg.vector_norm(weights, ord=1, dim=0, keepdim=True), ids


STAYS: dict[str, tuple[Router, str]] = {
    "by_sorting": (by_sorting, "by a sort that is not stable"),
    "normalized_by_length": (normalized_by_length, "something else than their own sum"),
    "over_tokens": (over_tokens, "softmax over another dimension"),
    "smallest": (smallest, "top-k takes the smallest"),
    "by_table": (by_table, "do not come from a top-k"),
    "divided_by_another": (divided_by_another, "something else than their own sum"),
    "second_best": (second_best, "not those of the largest scores"),
    "first_of_an_ascending_sort": (first_of_an_ascending_sort, "not those of the largest scores"),
    "values_of_other_columns": (values_of_other_columns, "not taken of the top-k's own values"),
    "cut_out_of_an_unsorted_choice": (cut_out_of_an_unsorted_choice, "cut out of an unsorted top-k"),
    "raw_by_absolute_values": (raw_by_absolute_values, "the sum of absolute values of raw scores"),
    "over_all_tokens": (over_all_tokens, "something else than their own sum"),
}


# What of them is a rule all the same, up to a step: that is raised, and the rest stays.
STARTS = {
    "normalized_by_length": "R3 softmax, top-k, then Inductor",
    "divided_by_another": "R3 softmax, top-k, then Inductor",
    "over_all_tokens": "R3 softmax, top-k, then Inductor",
    "raw_by_absolute_values": "top-k, then Inductor",
}


@pytest.mark.parametrize("name", STAYS)
def test_another_rule_stays_and_the_experts_are_raised_all_the_same(name):
    router, words = STAYS[name]
    report = raised_agrees(routed(router), torch.randn(37, H))
    (match,) = report.matches
    assert match.formulation == "batched_mm" and match.router == STARTS.get(name)
    assert words in match.router_why and "test_routers.py:" in match.router_why


@pytest.mark.parametrize(
    ("router", "remedy"),
    [
        (normalized_by_length, "weights.sum(-1, keepdim=True)"),
        (by_table, "indices of a topk, sort or argmax"),
        (cut_out_of_an_unsorted_choice, "leave out sorted=False"),
    ],
    ids=["norm", "table", "unsorted"],
)
def test_a_router_that_stays_says_what_would_help(router, remedy):
    _, report = run_passes(routed(router), ["canonicalize", "find_moe", "raise_moe"], torch.randn(5, H))
    why, _, hint = report.matches[0].router_why.partition("; try: ")
    assert "test_routers.py:" in why and remedy in hint and hint in str(report)


def test_logits_that_are_written_into_before_the_choice_stay():
    """The softmax reads the logits before they change; raised, it would read them after."""

    def written_into(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        held = logits * 1
        alias = held.view(-1)
        scores = torch.softmax(held, -1)
        held.mul_(b.bias)
        weights, ids = torch.topk(scores, K, dim=-1)
        return experts(b, x, weights, ids) + alias.sum()

    module, x = Block(written_into), torch.randn(19, H)
    _, report = run_passes(module, ["canonicalize", "find_moe", "raise_moe"], x)
    (match,) = report.matches
    assert match.router is None and "writes into memory of the router" in match.router_why
    with torch.no_grad():
        torch.testing.assert_close(compile_eager(module)(x), module(x))


def test_an_unsorted_choice_whose_values_have_further_users_stays():
    """Their order is the top-k's own; raised ids would be in another."""

    def both(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1, sorted=False)
        b_used = values.cumsum(-1)
        return values + 0 * b_used, ids

    def returning(b: Block, x: Tensor, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        values, _ = torch.topk(torch.softmax(logits, -1), K, dim=-1, sorted=False)
        return y, values

    module = routed(both)
    _, report = run_passes(module, ["canonicalize", "find_moe", "raise_moe"], torch.randn(5, H))
    assert report.matches[0].router is None
    module = routed(softmax_renormalized_by_gather)
    module.around = returning
    assert raised_agrees(module, torch.randn(19, H)).matches[0].router is not None


class Single(Block):
    """One expert a token, chosen and weighted by `router` -> weights and ids of any shape."""

    def __init__(self, router: Router) -> None:
        def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
            weights, ids = router(b, logits)
            gate, up = torch.bmm(b.gate_up[ids.reshape(-1)], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
            rows = torch.bmm(b.down[ids.reshape(-1)], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return rows * weights.reshape(-1, 1)

        super().__init__(spelling)


def test_one_weight_a_token_is_not_divided_by_the_sum_of_all():
    """Without their dimension of size 1 the weights of all tokens stand in one row."""

    def divided(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(logits, -1).max(-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def softened(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = logits.max(-1)
        return values.softmax(-1), ids

    for router, start, words in (
        (divided, "R3 softmax, top-k, then Inductor", "something else than their own sum"),
        (softened, "top-k, then Inductor", "softmax over another dimension"),
    ):
        (match,) = raised_agrees(Single(router), torch.randn(37, H)).matches
        assert match.router == start and words in match.router_why


def _sorted_choice(sort: Callable[[Tensor], tuple[Tensor, Tensor] | Tensor], k: int, last: bool = False) -> Router:
    """A router of the first k columns of a sort of the scores, or of the last; or of an argsort."""

    def route(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(logits, -1)
        found = sort(scores)
        ids = found if isinstance(found, Tensor) else found[1]
        ids = ids[:, -k:] if last else ids[:, :k]
        return scores.gather(1, ids), ids

    return route


def _first_group(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best of each token's best group (of one expert), both by an argmax: of equals the first."""
    scores = torch.softmax(logits, -1)
    best = scores.unflatten(-1, (E, 1)).amax(-1).argmax(-1, keepdim=True)
    dropped = torch.ones(logits.shape[0], E, dtype=torch.bool).scatter(1, best, False)
    ids = scores.masked_fill(dropped, 0.0).argmax(-1, keepdim=True)
    return scores.gather(1, ids), ids


_STABLE, _UNSTABLE = "keeps ties in their order", "a sort that is not stable"
TIES: dict[str, tuple[Router, str]] = {
    "stable": (_sorted_choice(lambda s: torch.sort(s, dim=-1, descending=True, stable=True), K), _STABLE),
    "stable_argsort": (_sorted_choice(lambda s: torch.argsort(s, dim=-1, descending=True, stable=True), K), _STABLE),
    "stable_end": (_sorted_choice(lambda s: torch.sort(s, dim=-1, stable=True), K, last=True), _STABLE),
    "stable_last": (_sorted_choice(lambda s: torch.sort(s, dim=-1, stable=True), 1, last=True), _STABLE),
    "unstable": (_sorted_choice(lambda s: torch.sort(s, descending=True), K), _UNSTABLE),
    "unstable_argsort": (_sorted_choice(lambda s: s.argsort(-1, descending=True), K), _UNSTABLE),
    "unstable_first": (_sorted_choice(lambda s: s.argsort(-1, descending=True), 1), _UNSTABLE),
    "stable_first": (_sorted_choice(lambda s: torch.sort(s, dim=-1, descending=True, stable=True), 1), ""),
    "group_by_argmax": (_first_group, ""),
}


@pytest.mark.parametrize("name", TIES)
def test_a_sort_names_the_same_of_equal_scores_as_in_the_source(name):
    """A gate of zeros, as it is initialised: all scores are equal."""
    router, why = TIES[name]

    class Returning(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = router(self, F.linear(x, self.router))
            flat, k = ids.reshape(-1), ids.shape[-1]
            rows = x.repeat_interleave(k, 0).unsqueeze(-1)
            gate, up = torch.bmm(self.gate_up[flat], rows).squeeze(-1).chunk(2, -1)
            rows = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return (rows * weights.reshape(-1, 1)).view(-1, k, H).sum(1), ids

    module, x = Returning(lambda b, x, logits: x), torch.randn(37, H)
    with torch.no_grad():
        module.router.zero_()
        ours, eager = compile_eager(module)(x), module(x)
    (match,) = last_reports()[-1].matches
    assert match.formulation == "batched_mm" and (match.router is None) == bool(why)
    assert why in match.router_why and bool(match.router_why) == bool(why)
    assert not why or "try: write torch.topk" in match.router_why
    assert torch.equal(ours[1], eager[1])
    torch.testing.assert_close(ours[0], eager[0])


def test_of_equal_scores_any_may_be_chosen_and_its_expert_runs():
    """Two halves of equal experts: which of two is named is up to the operator, what comes out is not."""

    def first(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(logits.round(), -1)
        return scores.amax(-1), scores.argmax(-1)

    class Returning(Single):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), first(self, F.linear(x, self.router))[1]

    module, x = Returning(first), torch.randn(64, H)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.shape[0] == E:
                parameter[E // 2 :] = parameter[: E // 2]
        ours, eager = compile_eager(module)(x), module(x)
    assert last_reports()[-1].matches[0].router == "R3 softmax, top-k"
    assert torch.equal(ours[1] % (E // 2), eager[1] % (E // 2))
    torch.testing.assert_close(ours[0], eager[0])


@pytest.mark.parametrize(
    ("read", "raised"),
    [
        (lambda ids: F.one_hot(ids, E).sum(dim=1), True),
        (lambda ids: F.one_hot(ids, E).float().mean(dim=(0, 1)), True),
        (lambda ids: F.one_hot(ids.flatten(), E).sum(0), True),
        (lambda ids: torch.zeros(ids.shape[0], E).scatter(1, ids, torch.ones(ids.shape)), True),
        (lambda ids: torch.zeros(E).index_add(0, ids.view(-1), torch.ones(ids.numel())), True),
        (lambda ids: F.one_hot(ids, E).sum(dim=0), False),
        (lambda ids: F.one_hot(ids.t(), E).sum(dim=1), False),
        (lambda ids: torch.zeros(ids.shape[0], E).scatter(1, ids, torch.rand(ids.shape) * 0 + torch.arange(K)), False),
        (lambda ids: ids[:, 0], False),
    ],
    ids=["sum", "mean", "flat", "marks", "added", "over_tokens", "turned", "numbered", "first"],
)
def test_an_unsorted_choice_may_be_counted_but_not_read_in_its_order(read, raised):
    def unsorted(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(logits, -1)
        ids = torch.topk(scores, K, dim=-1, sorted=False)[1]
        b.read = read(ids)
        return scores.gather(1, ids), ids

    class Returning(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.read

    module = Returning(lambda b, x, logits: experts(b, x, *unsorted(b, logits)))
    x = torch.randn(37, H)
    with torch.no_grad():
        ours, eager = compile_eager(module)(x), module(x)
    (match,) = last_reports()[-1].matches
    assert (match.router is not None) == raised
    torch.testing.assert_close(ours[0], eager[0])
    assert torch.equal(ours[1], eager[1])


def test_a_router_in_a_region_of_its_own_is_raised_up_to_its_end():
    """The softmax under another autocast state than the division of its result, which stays where it is."""

    def split(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    (match,) = raised_agrees(routed(split), torch.randn(37, H)).matches
    assert match.router == "R3 softmax, top-k, then Inductor"
    assert "two autocast or grad-mode regions" in match.router_why


def skipped_class(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """zaya: one class stands for no expert; who chose it runs expert 0 with the weight 0."""
    weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1)
    none = ids == E - 1
    return weights.masked_fill(none, 0), ids.masked_fill(none, 0)


def weights_by_a_learned_power(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.sigmoid(logits), K, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)) ** b.bias.mean().exp()
    return weights.cumsum(-1), ids


def logged(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy of the weights is returned beside them: it reads what the router gives."""
    weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1)
    return F.normalize(weights, dim=-1) + 0 * (weights * weights.log()).sum(-1, keepdim=True), ids


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("router", "rule"),
    [
        (skipped_class, "R3 softmax, top-k, then Inductor"),
        (weights_by_a_learned_power, "sigmoid, top-k, renormalise, then Inductor"),
        (logged, "R3 softmax, top-k, then Inductor"),
    ],
    ids=["skipped", "power", "logged"],
)
def test_the_start_of_a_router_is_raised_and_its_end_stays(router, rule, dynamic):
    module = routed(router)
    report = raised_agrees(module, torch.randn(37, H), compiled=compile_eager(module, dynamic=dynamic))
    (match,) = report.matches
    assert match.router == rule and match.router_why
    assert f"router {rule} ({match.router_why})" in str(report)


def test_the_end_of_a_router_may_tell_the_order_of_an_unsorted_choice():
    """cumsum of the weights: sorted ones give another sum than those in the choice's own order."""

    def summed(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1, sorted=False)
        return weights.cumsum(-1), ids

    (match,) = raised_agrees(routed(summed), torch.randn(37, H)).matches
    assert match.router is None and "come from cumsum" in match.router_why


@pytest.mark.slow
@pytest.mark.parametrize("router", [skipped_class, normalized_by_length], ids=["skipped", "normalized"])
def test_the_start_of_a_router_through_inductor(router):
    module = routed(router)
    compiled = torch.compile(module, backend=moepdl, fullgraph=True)
    assert raised_agrees(module, torch.randn(37, H), compiled=compiled).matches[0].router.endswith("then Inductor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_of_any_dtype_agrees(dtype):
    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(logits, -1), K, dim=-1)  # in the logits' own dtype
        gate, up = torch.einsum("th,tkih->tki", x, b.gate_up[ids]).split([I, I], -1)
        rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, b.down[ids])
        return torch.einsum("tkh,tk->th", rows, weights)

    report = raised_agrees(Block(spelling, dtype), torch.randn(37, H, dtype=dtype))
    assert report.matches[0].attributes["score_dtype"] == str(dtype).removeprefix("torch.")


def test_a_scale_that_is_computed_from_sizes_is_no_constant():
    """It would be another for each number of tokens, and the code compiled for each."""

    def by_tokens(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(logits, -1), K)
        return weights * (logits.shape[0] * 0.5), ids

    module = Block(lambda b, x, logits: experts(b, x, *by_tokens(b, logits)))
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return moepdl(graph, inputs, options={"remainder": "eager"})

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (5, 12, 29):
        x = torch.randn(tokens, H)
        torch.testing.assert_close(compiled(x), module(x))
    assert len(graphs) == 1
