"""What looks like a Mixture-of-Experts block and is none: no formulation may match any of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler import last_reports
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
    """The nearest row of a codebook; quantised experts are another matter, see test_quantised.py."""
    codes = torch.cdist(x, b.router).argmin(-1)
    return b.router[codes]


def product_keys(b: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Top-k in each of two sets of keys, and top-k among the pairs: scores and positions [T, K] of E * E keys."""
    left, ids_left = torch.topk(F.linear(x, b.router), K, dim=-1)
    right, ids_right = torch.topk(F.linear(x, b.router.flip(0)), K, dim=-1)
    scores = (left[:, :, None] + right[:, None, :]).flatten(1)
    positions = (ids_left[:, :, None] * E + ids_right[:, None, :]).flatten(1)
    best, place = torch.topk(scores, K, dim=-1)
    return best.softmax(-1), positions.gather(1, place)


def doge(b: Block, x: Tensor) -> Tensor:
    """Doge's experts: product keys choose rows of two embedding tables, a rank-one expert each."""
    scores, ids = product_keys(b, x)
    down, up = F.embedding(ids, b.gate.view(-1, H)[: E * E]), F.embedding(ids, b.up.view(-1, H)[: E * E])
    act = F.silu(torch.matmul(down, x.unsqueeze(-1)).squeeze(-1)) * scores
    return torch.matmul(act.unsqueeze(1), up).squeeze(1)


def key_value_memory(b: Block, x: Tensor) -> Tensor:
    """Product-key memory: the values are rows, summed with their scores; there is no expert."""
    scores, ids = product_keys(b, x)
    return torch.einsum("tk,tkh->th", scores, b.gate.view(-1, H)[ids])


def block_attention(b: Block, x: Tensor) -> Tensor:
    """Sparse attention: each query chooses blocks of keys and values, and attends to what is in them."""
    blocks = b.gate  # E blocks of I keys, from which the values are made
    _, ids = torch.topk(F.linear(x, blocks.mean(1)), K, dim=-1)
    keys = blocks[ids].flatten(1, 2)
    weights = torch.einsum("th,tkh->tk", x, keys).softmax(-1)
    return torch.einsum("tk,tkh->th", weights, b.up[ids].flatten(1, 2))


def beam_search(b: Block, x: Tensor) -> Tensor:
    """K continuations of each row, and the state of each one brought forward."""
    logits = F.linear(x, b.down.reshape(-1, I) @ b.gate[0]).log_softmax(-1)
    scores, ids = torch.topk(logits, K, dim=-1)
    state = F.silu(x.repeat_interleave(K, 0) + b.router[(ids % E).reshape(-1)])
    return (state * scores.reshape(-1, 1)).view(-1, K, H).sum(1)


def gathered_attention_experts(b: Block, x: Tensor) -> Tensor:
    """JetMoE's attention experts by sorted rows: queries by one expert's map, outputs by another, attention between."""
    weights, ids = torch.topk(F.linear(x, b.router).softmax(-1), K, dim=-1)
    perm = ids.flatten().argsort(stable=True)
    counts = F.one_hot(ids.flatten(), E).sum(0)
    ends = counts.cumsum(0)
    slots = (torch.arange(perm.numel())[:, None] >= ends[None, :]).sum(1)
    query = torch.bmm(b.gate[slots], x[perm // K].unsqueeze(-1)).squeeze(-1)
    query = torch.zeros_like(query).index_copy(0, perm, query).view(-1, K, I)
    mixed = F.scaled_dot_product_attention(query.transpose(0, 1), query.transpose(0, 1), query.transpose(0, 1))
    rows = torch.bmm(b.down[slots], mixed.transpose(0, 1).reshape(-1, I)[perm].unsqueeze(-1)).squeeze(-1)
    return torch.zeros_like(x).index_add(0, perm // K, rows * weights.flatten()[perm][:, None])


LOOKALIKES: dict[str, Model] = {
    function.__name__: function
    for function in (
        soft_moe, dense_ensemble, dense_with_bias, sampling, embedding_bag, mixture_of_depths, peer, auxiliary_loss,
        adapters, attention_experts, padding_masks, quantisation, doge, key_value_memory, block_attention,
        beam_search, gathered_attention_experts,
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


# Integers that are compared with a constant, which is neither a choice of tokens nor of experts.
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask_of_rows": lambda x, ids: x.masked_fill((ids == 0)[:, None], 0.0),
    "mask_of_columns": lambda x, ids: x.masked_fill(torch.arange(H) == 2, 0.0),
    "best_column": lambda x, ids: (x.argmax(-1) == 0).float()[:, None] * x,
    "where_of_three": lambda x, ids: torch.where((ids == 1)[:, None], x.exp(), torch.where((ids == 0)[:, None], x, 0)),
    "counts": lambda x, ids: torch.stack([(ids == e).sum() for e in range(E)]) + (ids == 0).float().mean(),
    "columns": lambda x, ids: x * (ids[:, None] == 1).float() + (ids[:, None] == 2).squeeze(1).float()[:, None],
    "cube": lambda x, ids: x.view(2, 3, H).masked_fill((ids.view(2, 3, 1) == 0), 0.0),
    "number": lambda x, ids: x * (ids[0] == 1) + (ids.sum() == 3) * (x.argmax() == 2),
}


def best_of_one(x: Tensor, ids: Tensor) -> Tensor:
    """A top-k of a number, which has no dimension."""
    best = torch.topk(x.sum(), 1, dim=0).indices.view(1)
    return torch.where(best == 0)[0].sum() + torch.where(best == 1)[0].sum()


COMPARISONS["best_of_one"] = best_of_one


@pytest.mark.parametrize("name", COMPARISONS)
def test_integers_may_be_compared_for_anything(name):
    x, ids = torch.randn(6, H), torch.randint(0, E, (6,))
    compiled = torch.compile(COMPARISONS[name], backend="moepdl", fullgraph=True, options={"remainder": "eager"})
    torch.testing.assert_close(compiled(x, ids), COMPARISONS[name](x, ids))
    assert not last_reports()[-1].matches and not last_reports()[-1].errors


def test_one_expert_a_token_by_masks_of_products_is_no_block():
    """Each expert runs on all tokens, and a mask keeps the rows of its own: multiplied, or by where."""

    def forward(x: Tensor, gate: Tensor, experts: Tensor, multiply: bool) -> Tensor:
        best, out = F.linear(x, gate).argmax(-1), torch.zeros_like(x)
        for e in range(E):
            mask, rows = (best == e)[:, None], F.silu(F.linear(x, experts[e]))
            out = out + mask.float() * rows if multiply else torch.where(mask, rows, out)
        return out

    operands = torch.randn(6, H), torch.randn(E, H), torch.randn(E, H, H)
    for multiply in (True, False):
        compiled = torch.compile(forward, backend="moepdl", fullgraph=True, options={"remainder": "eager"})
        torch.testing.assert_close(compiled(*operands, multiply), forward(*operands, multiply))
        assert not last_reports()[-1].matches


# What the report says of each; "" where nothing in the graph chooses among scores, so that nothing is a candidate.
REASONS = {
    "soft_moe": "",
    "dense_ensemble": "no top-k chose",
    "dense_with_bias": "bias",
    "sampling": "reads rows of a [64, 16] matrix",
    "beam_search": "reads rows of a [4, 16] matrix",
    "embedding_bag": "",
    "quantisation": "",
    "mixture_of_depths": "chooses among rows by one score each",
    "peer": "reads rows of a [32, 16] matrix",
    "doge": "reads rows of a [16, 16] matrix",
    "key_value_memory": "reads rows of a [32, 16] matrix",
    "block_attention": "in no product behind an activation of another one",
    "auxiliary_loss": "no expert picks its tokens",
    "adapters": "not a [T, K] choice",
    "attention_experts": "in no product behind an activation of another one",
    "gathered_attention_experts": "no expert picks its tokens from this one-hot encoding",
    "padding_masks": "adds its rows to a result 0 times",
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_the_reason_says_what_is_different(name):
    module = Block(lambda b, x, logits: LOOKALIKES[name](b, x))
    _, report = run_passes(module, ["canonicalize", "find_moe"], torch.randn(6, H))
    told = "; ".join(miss.reason for miss in report.misses)
    assert REASONS[name] in told and bool(told) == bool(REASONS[name]), told


def test_the_widths_of_the_block_are_those_that_the_lookalikes_need():
    assert I * 2 == H and E * K == I
