"""What looks like a Mixture-of-Experts block and is none: no formulation may match any of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.testing import run_passes
from tests.passes.numerics import compile_eager
from tests.passes.spellings import Block, E, H, I, K

Model = Callable[[Block, Tensor], Tensor]


def soft_moe(b: Block, x: Tensor) -> Tensor:
    """Softmax over tokens and slots: nothing is selected."""
    logits = F.linear(x, b.router)
    slots = torch.einsum("te,th->eh", logits.softmax(0), x)[:, None]
    gate, up = torch.bmm(slots, b.gate_up_t).chunk(2, -1)
    rows = torch.bmm(F.silu(gate) * up, b.down_t)
    return torch.einsum("eh,te->th", rows[:, 0], logits.softmax(-1))


def dense_ensemble(b: Block, x: Tensor) -> Tensor:
    """All experts on all tokens, each with a weight that is not zero."""
    scores = F.linear(x, b.router).softmax(-1)
    gate, up = torch.bmm(x.expand(E, -1, -1), b.gate_up_t).chunk(2, -1)
    rows = torch.bmm(F.silu(gate) * up, b.down_t)
    return torch.einsum("eth,te->th", rows, scores)


def dense_with_bias(b: Block, x: Tensor) -> Tensor:
    """Llama 4's form with a bias: an expert of zero tokens does not give zero."""
    values, ids = torch.topk(F.linear(x, b.router), K, dim=1)
    scores = torch.full((x.shape[0], E), float("-inf")).scatter(1, ids, values).sigmoid()
    rows = (x.repeat(E, 1) * scores.t().reshape(-1, 1)).view(E, -1, H)
    gate, up = torch.baddbmm(b.bias.view(E, 1, 1), rows, b.gate_up_t).chunk(2, -1)
    return torch.bmm(F.silu(gate) * up, b.down_t).sum(0)


def sampling(b: Block, x: Tensor) -> Tensor:
    """Top-k sampling over a vocabulary, and the embedding of what was taken."""
    values, ids = torch.topk(F.linear(x, b.gate_up.view(-1, H)), K, dim=-1)
    weights = values.softmax(-1)
    return (b.gate_up.view(-1, H)[ids] * weights.unsqueeze(-1)).sum(1)


def embedding_bag(b: Block, x: Tensor) -> Tensor:
    ids = x[:, :K].abs().long() % E
    return F.embedding(ids, b.router).mean(1) + F.embedding_bag(ids, b.router)


def mixture_of_depths(b: Block, x: Tensor) -> Tensor:
    """Chooses tokens, not experts: one block runs on the chosen ones."""
    scores = F.linear(x, b.router)[:, 0].sigmoid()
    weights, token = torch.topk(scores, K)
    rows = b.experts[0](x[token]) * weights[:, None]
    return x.index_add(0, token, rows)


def peer(b: Block, x: Tensor) -> Tensor:
    """Product keys; each expert is one row of two embedding tables."""
    scores, ids = torch.topk(F.linear(x, b.router), K, dim=-1)
    down, up = b.gate.view(-1, H)[ids], b.up.view(-1, H)[ids]
    act = F.gelu(torch.einsum("th,tkh->tk", x, down)) * scores.softmax(-1)
    return torch.einsum("tk,tkh->th", act, up)


def auxiliary_loss(b: Block, x: Tensor) -> Tensor:
    """Scores, chooses and encodes once more, without experts."""
    scores = F.linear(x, b.router).softmax(-1)
    _, ids = torch.topk(scores, K, dim=-1)
    return (F.one_hot(ids, E).float().mean(0) * scores.mean(0)).sum() * E


def adapters(b: Block, x: Tensor) -> Tensor:
    """A low-rank pair for each row, by an id from outside: no activation, no weights."""
    ids = torch.arange(x.shape[0]) % E
    low = torch.bmm(b.gate[ids], x.unsqueeze(-1))
    return torch.bmm(b.down[ids], low).squeeze(-1)


def attention_experts(b: Block, x: Tensor) -> Tensor:
    """JetMoE's attention experts: routed query projections, no activation between two products."""
    weights, ids = torch.topk(F.linear(x, b.router).softmax(-1), K, dim=-1)
    query = torch.einsum("th,tkih->tki", x, b.gate[ids])
    mixed = (query @ query.transpose(1, 2)).softmax(-1) @ query
    return torch.einsum("tki,tkhi,tk->th", mixed, b.down[ids], weights)


def padding_masks(b: Block, x: Tensor) -> Tensor:
    """Comparisons of a matrix of integers with constants, as tokenised text has them."""
    ids = (x[:, :4] * 10).long()
    padding, start = torch.where(ids == 0), torch.where(ids == 1)
    return x.sum() + padding[0].sum() + start[1].sum()


def quantisation(b: Block, x: Tensor) -> Tensor:
    codes = torch.cdist(x, b.router).argmin(-1)
    return b.router[codes]


LOOKALIKES: dict[str, Model] = {
    function.__name__: function
    for function in (
        soft_moe, dense_ensemble, dense_with_bias, sampling, embedding_bag, mixture_of_depths, peer, auxiliary_loss,
        adapters, attention_experts, padding_masks, quantisation,
    )
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_never_matches(name, dynamic):
    module = Block(lambda b, x, logits: LOOKALIKES[name](b, x))
    passes = ["canonicalize", "find_moe", "raise_moe"]
    after, report = run_passes(module, passes, torch.randn(6, H), dynamic=dynamic)
    assert not report.matches
    assert all(miss.reason and miss.step for miss in report.misses)
    assert "moepdl" not in str(after.graph)


def test_a_lookalike_runs_as_it_is():
    module = Block(lambda b, x, logits: mixture_of_depths(b, x) + dense_ensemble(b, x))
    x = torch.randn(6, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))


@pytest.mark.parametrize(("name", "words"), [
    ("dense_ensemble", "no top-k chose"),
    ("dense_with_bias", "bias"),
    ("auxiliary_loss", "no expert picks its tokens"),
    ("adapters", "not a [T, K] choice"),
])  # fmt: skip
def test_the_reason_says_what_is_different(name, words):
    module = Block(lambda b, x, logits: LOOKALIKES[name](b, x))
    _, report = run_passes(module, ["canonicalize", "find_moe"], torch.randn(6, H))
    assert any(words in miss.reason for miss in report.misses)


def test_the_widths_of_the_block_are_those_that_the_lookalikes_need():
    assert I * 2 == H and E * K == I
