"""R9: one-hot masks of an argmax of which a capacity takes some (Switch), masks that are ids (NLLB), rows scaled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_compiler.backend import explain, moepdl
from tests.fast_part import covering, pairwise
from tests.passes.numerics import raised_agrees

B, S, E, H, INNER, CAPACITY = 2, 11, 4, 16, 12, 2


def switch(self: Loop, x: Tensor) -> tuple[Tensor, Tensor]:
    """The map [B, S, E] and the weights [B, S, 1]: the first tokens of a sequence that choose an expert are kept."""
    scores = self.scores(x)
    chosen = F.one_hot(torch.argmax(scores, dim=-1), num_classes=E)
    kept = torch.cumsum(chosen, dim=-2) <= CAPACITY
    return chosen * kept, torch.max(scores, dim=-1).values.unsqueeze(-1).to(x.dtype)


def in_floats(self: Loop, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = self.scores(x)
    chosen = F.one_hot(torch.argmax(scores, dim=-1), num_classes=E).float()
    kept = (torch.cumsum(chosen, dim=-2) <= CAPACITY).to(chosen.dtype)
    return (kept * chosen).int(), torch.max(scores, dim=-1, keepdim=True).values.to(x.dtype)


def as_truth(self: Loop, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = self.scores(x)
    ids = torch.argmax(scores, dim=-1, keepdim=True)
    chosen = F.one_hot(ids.squeeze(-1), num_classes=E)
    kept = torch.cumsum(chosen, dim=1) <= CAPACITY
    return chosen.bool() & kept, scores.gather(-1, ids).to(x.dtype)


def without_capacity(self: Loop, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = self.scores(x)
    return F.one_hot(torch.argmax(scores, dim=-1), num_classes=E), torch.amax(scores, dim=-1, keepdim=True).to(x.dtype)


class Loop(nn.Module):
    """Switch's experts, over all of them: route(self, x [B, S, H]) gives the map and the weights."""

    def __init__(self, route: Callable[[Loop, Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.route = route
        self.router = nn.Linear(H, E, bias=False, dtype=dtype)
        self.wi = nn.ModuleList(nn.Linear(H, INNER, bias=False, dtype=dtype) for _ in range(E))
        self.wo = nn.ModuleList(nn.Linear(INNER, H, bias=False, dtype=dtype) for _ in range(E))

    def scores(self, x: Tensor) -> Tensor:
        """In fp32, where no two of them are equal: of those any may be chosen."""
        return torch.softmax(F.linear(x.float(), self.router.weight.float()), dim=-1)

    def rows(self, expert: int, rows: Tensor, weights: Tensor) -> Tensor:
        return self.wo[expert](F.relu(self.wi[expert](rows))) * weights

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.route(self, x)
        flat, weights = x.reshape(-1, H), weights.reshape(-1, 1)
        masks = chosen.view(-1, 1, E).permute(2, 1, 0)
        out = torch.zeros_like(flat)
        for expert in range(E):
            choice, token = torch.where(masks[expert])
            rows = self.rows(expert, flat[None, token].reshape(-1, H), weights[token, choice, None])
            out.index_add_(0, token, rows.to(out.dtype))
        return out.reshape(x.shape)


def compiled(module: nn.Module, dynamic: bool | None = None) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, backend=moepdl, fullgraph=True, dynamic=dynamic, options={"remainder": "eager"})


def reason(module: nn.Module, *inputs: Tensor) -> str:
    with torch.no_grad():
        report = explain(module, *inputs)
    assert not report.matches, str(report)
    return " | ".join(miss.reason for miss in report.misses)


ROUTES = [switch, in_floats, as_truth, without_capacity]


@pytest.mark.parametrize(
    ("route", "dtype", "dynamic", "training"),
    pairwise(ROUTES, [torch.float32, torch.bfloat16], [False, True], [False, True]),
)
def test_an_argmax_with_a_capacity_is_one_block(route, dtype, dynamic, training):
    module = Loop(route, dtype)
    x = torch.randn(B, S, H, dtype=dtype)
    if route is not without_capacity:
        chosen, _ = route(module, x)
        assert 0 < chosen.sum() < B * S, "the capacity must drop some tokens here"
    report = raised_agrees(module, x, compiled=compiled(module, dynamic), training=training, repeats=20)
    (match,) = report.matches
    assert match.formulation == "one_hot_loop" and match.sizes["k"] == "1"
    assert ("drops" in match.attributes) == (route is not without_capacity)
    assert match.router == "R3 softmax, top-k"


class Written(Loop):
    """Masks [T], which are indices themselves: rows are written, since no other expert has them."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.route(self, x)
        flat, weights = x.reshape(-1, H), weights.reshape(-1, 1)
        masks = chosen.reshape(-1, E).bool()
        out = torch.zeros_like(flat)
        for expert in range(E):
            mask = masks[:, expert]
            out[mask] = self.rows(expert, flat[mask], weights[mask]).to(out.dtype)
        return out.reshape(x.shape)


@pytest.mark.parametrize(("route", "dynamic", "training"), pairwise(ROUTES, [False, True], [False, True]))
def test_masks_without_a_dimension_for_the_choice_are_one_block(route, dynamic, training):
    module = Written(route)
    report = raised_agrees(
        module, torch.randn(B, S, H), compiled=compiled(module, dynamic), training=training, repeats=6
    )
    (match,) = report.matches
    assert match.formulation == "one_hot_loop" and match.sizes["k"] == "1"
    assert ("drops" in match.attributes) == (route is not without_capacity)


@pytest.mark.parametrize(("route", "loop"), covering([switch, without_capacity], [Loop, Written]))
def test_of_equal_scores_the_block_chooses_the_expert_that_the_argmax_does(route, loop):
    """Switch in bf16: with scores of 8 bits, and inputs of which many agree, some tokens have two best experts."""

    class Narrow(loop):  # type: ignore[misc, valid-type]
        def scores(self, x: Tensor) -> Tensor:
            return torch.softmax(self.router(x), dim=-1)

    module = Narrow(route, torch.bfloat16)
    with torch.no_grad():
        module.router.weight.copy_(torch.randint(-1, 2, (E, H)))
        x = torch.randint(-1, 2, (B, S, H)).to(torch.bfloat16)
        scores = module.scores(x)
        assert ((scores == scores.amax(-1, keepdim=True)).sum(-1) > 1).any()
        report = explain(module, x)
        assert report.matches[0].router == "R3 softmax, top-k"
        torch.testing.assert_close(compiled(module)(x), module(x), rtol=2e-2, atol=2e-2)


def test_dropped_tokens_get_nothing_and_no_gradient():
    module = Loop(switch)
    x = torch.randn(B, S, H, requires_grad=True)
    chosen, _ = switch(module, x)
    dropped = chosen.sum(-1) == 0
    out = compiled(module)(x)
    assert dropped.any() and not out[dropped].any() and out[~dropped].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(tokens):
    module = Loop(switch)
    x = torch.randn(1, tokens, H)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda chosen, kept: chosen * kept.long().cumsum(1), "no expert picks its tokens"),
        (lambda chosen, kept: chosen + kept, "no expert picks its tokens"),
        (lambda chosen, kept: chosen * kept.sum(-1, keepdim=True).bool(), "no expert picks its tokens"),
        (lambda chosen, kept: (chosen * kept).flip(-1), "no expert picks its tokens"),
    ],
)
def test_another_map_than_a_part_of_the_choice_is_refused(damage, words):
    def route(self: Loop, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(self.router(x), dim=-1)
        chosen = F.one_hot(torch.argmax(scores, dim=-1), num_classes=E)
        return damage(chosen, torch.cumsum(chosen, dim=-2) <= CAPACITY), scores.amax(-1, keepdim=True)

    module, x = Loop(route), torch.randn(B, S, H)
    assert words in reason(module, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x))


# Masks that are ids, and a constant on the rows


class Scaled(Loop):
    """NLLB: a map [T, E] of zeros and ones is taken for ids, and weighted rows are scaled in evaluation."""

    def __init__(self, factors: tuple[float, ...] = (0.8,) * E, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(switch, dtype)
        self.factors = factors

    def rows(self, expert: int, rows: Tensor, weights: Tensor) -> Tensor:
        rows = super().rows(expert, rows, weights)
        rows *= self.factors[expert]
        return rows

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        scores = self.scores(flat)
        mask = F.one_hot(torch.argmax(scores, dim=-1), num_classes=E)
        masks, weights = F.one_hot(mask, num_classes=E).permute(2, 1, 0), scores.to(x.dtype)
        out = torch.zeros_like(flat)
        for expert in range(E):
            choice, token = torch.where(masks[expert])
            out.index_add_(0, token, self.rows(expert, flat[token], weights[token, choice, None]))
        return out.reshape(x.shape)


@pytest.mark.parametrize(
    ("dtype", "dynamic", "training"), pairwise([torch.float32, torch.bfloat16], [False, True], [False, True])
)
def test_a_constant_on_the_rows_goes_to_the_weights(dtype, dynamic, training):
    module = Scaled(dtype=dtype)
    x = torch.randn(B, S, H, dtype=dtype)
    report = raised_agrees(module, x, compiled=compiled(module, dynamic), training=training, repeats=20)
    (match,) = report.matches
    assert match.attributes["weights_scale"] == 0.8 and match.sizes["k"] == str(E)


def test_the_weights_keep_what_the_constant_makes_of_them_unrounded():
    """A weight of bf16 times the constant is no number of bf16: it would be one rounding more."""
    from moe_compiler.testing import run_passes

    module = Scaled(dtype=torch.bfloat16)
    with torch.no_grad():
        graph, _ = run_passes(
            module, ["canonicalize", "find_moe", "raise_moe"], torch.randn(B, S, H, dtype=torch.bfloat16)
        )
    (experts,) = [n for n in graph.graph.nodes if "moepdl.experts" in str(n.target)]
    assert experts.args[2].meta["val"].dtype == torch.float32
    assert experts.meta["val"].dtype == torch.bfloat16


def test_a_mask_that_is_taken_for_ids_holds_experts_and_needs_no_assertion():
    from moe_compiler.testing import run_passes

    with torch.no_grad():
        graph, report = run_passes(Scaled(), ["canonicalize", "find_moe", "raise_moe"], torch.randn(B, S, H))
    assert report.matches and "_assert_async" not in str(graph.graph)


def test_different_constants_are_refused():
    module, x = Scaled((0.8, 0.8, 0.5, 0.8)), torch.randn(B, S, H)
    assert "the rows of expert 0 are scaled by 0.8, those of expert 2 by 0.5" in reason(module, x)


def test_a_constant_behind_experts_that_are_weighted_before_is_refused():
    class Before(Scaled):
        def rows(self, expert: int, rows: Tensor, weights: Tensor) -> Tensor:
            return self.wo[expert](F.relu(self.wi[expert](rows * weights))) * 0.5

    assert "rows are scaled by 0.5 behind experts that are weighted elsewhere" in reason(Before(), torch.randn(B, S, H))


# A class more than there are experts


class Spare(Loop):
    """A class for ids that stand for no expert, which the ids given have or may have."""

    def __init__(self, known: bool) -> None:
        super().__init__(switch)
        self.known = known

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:  # type: ignore[override]
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        ids = chosen if self.known else ids
        masks = F.one_hot(ids, num_classes=E + 1).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in range(E):
            choice, token = torch.where(masks[expert])
            out.index_add_(0, token, self.rows(expert, x[token], weights[token, choice, None]))
        return out


def test_a_class_that_no_id_can_be_of_is_no_missing_expert():
    module, x = Spare(True), torch.randn(S, H)
    ids = torch.randint(0, E + 1, (S, 2))
    with torch.no_grad():
        (match,) = explain(module, x, ids).matches
        torch.testing.assert_close(compiled(module)(x, ids), module(x, ids))
    assert match.sizes["E"] == str(E)
    assert f"expert {E} of {E + 1} never picks its tokens" in reason(Spare(False), x, ids)
