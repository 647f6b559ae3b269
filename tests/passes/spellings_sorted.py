"""Blocks whose rows are sorted by expert, in the ways that differ from transformers': spellings and damaged copies.

As in `spellings`; `sizes` that come from the data make these need `fullgraph=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.passes.spellings import Block, Damaged, E, H, I, K, Spelling, choose, grouped_index_add, grouped_matmul

BF16 = torch.bfloat16


def choose_wide(logits: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    """Scores in fp32, as torchtitan keeps them."""
    return torch.topk(torch.softmax(logits.float(), dim=-1), k, dim=-1)


def ends(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0, dtype=torch.int32)


def rows_of(index: Tensor) -> Tensor:
    return index.reshape(-1, 1).expand(-1, H)


# How the ids are counted: each gives [E]


def by_histc(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.histc(ids.view(-1).float(), bins=E, min=0, max=E)


def by_histc_int32(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.histc(ids.flatten().to(torch.int32).float(), bins=E, min=0, max=E - 1).to(torch.int64)


def by_bincount(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.bincount(ids.flatten().int(), minlength=E)


def by_one_hot(ids: Tensor, logits: Tensor) -> Tensor:
    return F.one_hot(ids, num_classes=E).sum(dim=(0, 1))


def by_one_hot_flat(ids: Tensor, logits: Tensor) -> Tensor:
    return F.one_hot(ids.reshape(-1), E).to(torch.int32).sum(0)


def by_one_hot_twice(ids: Tensor, logits: Tensor) -> Tensor:
    return F.one_hot(ids, E).sum(1).sum(0)


def by_comparison(ids: Tensor, logits: Tensor) -> Tensor:
    return (ids.view(-1)[:, None] == torch.arange(E, device=ids.device)).sum(0)


def by_map(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True).sum(0)


def by_map_in_place(ids: Tensor, logits: Tensor) -> Tensor:
    chosen = torch.zeros(ids.shape[0], E, dtype=torch.int64)
    chosen.scatter_(dim=1, index=ids, src=torch.ones_like(ids))
    return chosen.sum(dim=0)


def by_scatter_add(ids: Tensor, logits: Tensor) -> Tensor:
    flat = ids.flatten()
    return torch.zeros(E, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))


def by_index_add(ids: Tensor, logits: Tensor) -> Tensor:
    flat = ids.flatten()
    return torch.zeros(E, dtype=torch.int32).index_add(0, flat, torch.ones(flat.shape, dtype=torch.int32))


COUNTS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    by_histc, by_histc_int32, by_bincount, by_one_hot, by_one_hot_flat, by_one_hot_twice, by_comparison, by_map,
    by_map_in_place, by_scatter_add, by_index_add,
)  # fmt: skip


# grouped_scatter


def grouped(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    counts: Callable[[Tensor, Tensor], Tensor] = by_map,
    at: str = "after",
    sort: Callable[[Tensor], Tensor] = lambda flat: torch.argsort(flat, stable=True),
    token_of: Callable[[Tensor], Tensor] = lambda perm: perm // K,
    read: Callable[[Tensor, Tensor], Tensor] = lambda x, token: x[token],
    weight_of: Callable[[Tensor, Tensor], Tensor] = lambda scores, perm: scores.view(-1)[perm],
    act: Callable[[Tensor, Tensor], Tensor] = lambda gate, up: F.silu(gate) * up,
    rows_for_up: Callable[[Tensor], Tensor] = lambda rows: rows,
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, token, rows: torch.zeros_like(x).scatter_add(
        0, rows_of(token), rows
    ),
) -> Tensor:
    """torchtitan's order of steps; the damaged copies change one of them."""
    scores, ids = choose_wide(logits)
    offsets = ends(counts(ids, logits))
    perm = sort(ids.view(-1))
    token = token_of(perm)
    rows = read(x, token)
    column = weight_of(scores, perm).reshape(-1, 1)
    if at == "before":
        rows = (rows.to(torch.float32) * column).to(x.dtype)
    gate = grouped_matmul(rows, b.gate.mT, offs=offsets)
    up = grouped_matmul(rows_for_up(rows), b.up.mT, offs=offsets)
    hidden = act(gate, up)
    if at == "middle":
        hidden = (hidden * column).to(x.dtype)
    rows = grouped_matmul(hidden, b.down.mT, offs=offsets)
    if at == "after":
        rows = (rows.to(torch.float32) * column).to(x.dtype)
    return add(x, token, rows)


def scores_before(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    return grouped(b, x, logits, at="before", counts=by_histc)


def gathered_tokens(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The older torchtitan: rows by `gather` with an index for every element, scatter_add_ in place."""
    return grouped(
        b,
        x,
        logits,
        counts=by_one_hot,
        read=lambda x, token: torch.gather(x, dim=0, index=rows_of(token)),
        add=lambda x, token, rows: torch.zeros_like(x).scatter_add_(dim=0, index=rows_of(token), src=rows),
    )


def token_of_pair(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The token of each pair is a list of its own, sorted with the ids; index_put that accumulates."""

    def token_of(perm: Tensor) -> Tensor:
        pairs = torch.arange(x.shape[0]).unsqueeze(1).expand(-1, K).reshape(-1)
        return pairs[perm]

    return grouped(
        b, x, logits, token_of=token_of, counts=by_one_hot_twice,
        sort=lambda flat: flat.sort(dim=0, stable=True)[1],
        add=lambda x, token, rows: torch.zeros_like(x).index_put((token,), rows, accumulate=True),
    )  # fmt: skip


def onto_shared_expert(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The older torchtitan adds the rows to the shared expert's result."""
    return grouped(b, x, logits, add=lambda x, token, rows: b.shared(x).scatter_add_(0, rows_of(token), rows))


def packed_gate_up(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    scores, ids = choose_wide(logits)
    offsets = by_comparison(ids, logits).cumsum(dim=0).to(dtype=torch.int32)
    perm = ids.flatten().argsort(stable=True)
    token = torch.div(perm, K, rounding_mode="floor")
    gate, up = grouped_matmul(torch.index_select(x, 0, token), b.gate_up_t, offs=offsets).split(I, dim=-1)
    rows = grouped_matmul(up * F.silu(gate), b.down_t, offs=offsets)
    rows = rows * scores.flatten().index_select(0, perm)[:, None].to(x.dtype)
    return x.new_zeros(x.shape).scatter_add(0, token.unsqueeze(-1).expand_as(rows), rows)


def grouped_repeated_bias(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """torchtitan's gpt-oss: each expert's bias repeated for its rows, addcmul; megablocks' token of each pair."""
    scores, ids = choose_wide(logits)
    counts = by_one_hot(ids, logits)
    offsets, total = ends(counts), ids.numel()
    perm = ids.view(-1).argsort(stable=True)
    rows = grouped_matmul(x[perm // K], b.gate_up.mT, offs=offsets)
    rows = rows + b.gate_up_bias.repeat_interleave(counts, dim=0, output_size=total).to(rows.dtype)
    gate, up = rows[..., ::2], rows[..., 1::2]
    glu = gate * torch.sigmoid(gate * 1.702)
    rows = grouped_matmul(torch.addcmul(glu, glu, up), b.down.mT, offs=offsets)
    rows = rows + torch.repeat_interleave(b.down_bias, counts, dim=0, output_size=total)
    rows = (rows.float() * scores.view(-1)[perm].unsqueeze(1)).to(x.dtype)
    token = torch.arange(x.shape[0]).repeat_interleave(K)[perm]
    return torch.zeros_like(x).index_add(0, token, rows)


# grouped_top1


def top1(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    k: int = 1,
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda x, w: x * w,
    read: Callable[[Tensor, Tensor], Tensor] = lambda rows, perm: rows[perm],
    home: Callable[[Tensor], Tensor] = torch.argsort,
    counts: Callable[[Tensor], Tensor] = lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E - 1),
    after: bool = False,
) -> Tensor:
    values, ids = torch.topk(logits, k)
    weights, flat = torch.sigmoid(values.float()).to(x.dtype), ids.squeeze(1)
    perm = torch.argsort(flat, stable=True)
    offsets = ends(counts(flat))
    rows = read(x if after else weigh(x, weights), perm)
    gate, up = grouped_matmul(rows, b.gate_up.mT, offs=offsets).chunk(2, -1)
    rows = grouped_matmul(F.silu(gate) * up, b.down.mT, offs=offsets)
    rows = rows[home(perm)]
    return weigh(rows, weights) if after else rows


def top1_written_back(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The inverse permutation by writing arange at perm; index_select."""

    def inverse(perm: Tensor) -> Tensor:
        found = torch.empty_like(perm)
        found[perm] = torch.arange(perm.shape[0], device=perm.device)
        return found

    return top1(b, x, logits, home=inverse, read=lambda rows, perm: rows.index_select(0, perm))


def top1_sorted_weights(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The weight of each row is gathered like the row, and argsort is called twice."""
    values, ids = logits.topk(k=1, dim=-1)
    weights, flat = values.sigmoid(), ids.view(-1)
    perm = flat.argsort(stable=True)
    offsets = ends(F.one_hot(flat, E).sum(0))
    rows = x[perm] * weights.view(-1)[perm].unsqueeze(-1)
    gate, up = grouped_matmul(rows, b.gate_t, offs=offsets), grouped_matmul(rows, b.up_t, offs=offsets)
    rows = grouped_matmul(F.silu(gate) * up, b.down_t, offs=offsets)
    return rows.index_select(0, flat.argsort(stable=True).argsort())


# split_linear


def parts(rows: Tensor, sizes: list[int], weight: Any, order: Any = range(E)) -> Tensor:
    """One linear layer a part of the rows."""
    pieces = rows.split(sizes, dim=0)
    return torch.cat([F.linear(pieces[e], weight[order[e]]) for e in range(E)], dim=0)


def split(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    sizes: Callable[[Tensor, Tensor], list[int]] = lambda ids, logits: by_map(ids, logits).tolist(),
    sort: Callable[[Tensor], Tensor] = lambda flat: flat.sort(0)[1],
    divide: Callable[[Tensor], Tensor] = lambda perm: perm.div(K, rounding_mode="trunc"),
    order: Any = range(E),
    act: Callable[[Tensor], Tensor] | None = None,
    weight_of: Callable[[Tensor, Tensor], Tensor] = lambda weights, perm: weights.flatten()[perm],
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, t, rows: torch.zeros_like(x).index_add(0, t, rows),
) -> Tensor:
    weights, ids = choose(x, logits)
    number = sizes(ids, logits)
    perm = sort(ids.flatten())
    token = divide(perm)
    hidden = parts(x[token], number, b.gate_up, order)
    gate, up = hidden.chunk(2, dim=-1)
    rows = parts(F.silu(gate) * up if act is None else act(hidden), number, b.down)
    return add(x, token, rows * weight_of(weights, perm)[:, None])


def split_modules(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """A ModuleList, gate and up apart, counts by scatter_add, matmul."""
    weights, ids = choose(x, logits)
    sizes = by_scatter_add(ids, logits).tolist()
    perm = ids.view(-1).argsort(stable=True)
    token = perm // K
    pieces = torch.split(x.index_select(0, token), sizes)
    gate = torch.cat([one.w1(piece) for one, piece in zip(b.experts, pieces, strict=True)])
    up = torch.cat([torch.matmul(piece, one.w3.weight.t()) for one, piece in zip(b.experts, pieces, strict=True)])
    hidden = torch.split(F.silu(gate) * up, sizes)
    rows = torch.cat([one.w2(piece) for one, piece in zip(b.experts, hidden, strict=True)])
    rows = rows * weights.view(-1)[perm].unsqueeze(1)
    return torch.zeros_like(x).index_add_(0, token, rows)


def split_transposed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Matrices stored [in, out] as Aria's, a one-hot sum, scatter_add."""
    weights, ids = choose(x, logits)
    sizes = F.one_hot(ids, E).sum((0, 1)).tolist()
    perm = ids.flatten().argsort(stable=True)
    token = perm // K
    pieces = x[token].split(sizes)
    gate, up = torch.cat([pieces[e] @ b.gate_up_t[e] for e in range(E)]).chunk(2, -1)
    pieces = (F.silu(gate) * up).split(sizes)
    rows = torch.cat([pieces[e] @ b.down_t[e] for e in range(E)]) * weights.flatten()[perm, None]
    return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, H), rows)


def split_biased(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """A bias in each part's product; JetMoE's result adds one more, which is not the block's."""
    weights, ids = choose(x, logits)
    sizes = by_map(ids, logits).tolist()
    perm = ids.flatten().sort(0)[1]
    pieces = x[perm // K].split(sizes)
    both = torch.cat([F.linear(pieces[e], b.gate_up[e], b.gate_up_bias[e]) for e in range(E)])
    gate, up = both.chunk(2, -1)
    pieces = (F.silu(gate) * up).split(sizes)
    rows = torch.cat([pieces[e] @ b.down[e].T + b.down_bias[e] for e in range(E)])
    return torch.zeros_like(x).index_add(0, perm // K, rows * weights.flatten()[perm, None]) + b.down_bias[0]


def split_sorted_bias(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    index: Callable[[Tensor, Tensor], Tensor] = lambda ordered, flat: ordered,
    first: Callable[[Tensor, Tensor], Tensor] = lambda rows, bias: rows + bias,
    hidden: Callable[[Tensor, Tensor], Tensor] = lambda act, column: act,
    bias_of: Callable[[Block, int], Tensor | None] = lambda b, e: None,
    repeats: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """The bias of each row's expert behind the parts, by the sorted ids and repeated; rows copied home."""
    weights, ids = choose(x, logits)
    counts = by_map(ids, logits)
    sizes = counts.tolist()
    ordered, perm = ids.flatten().sort()
    rows = first(parts(x[perm // K], sizes, b.gate_up), b.gate_up_bias[index(ordered, ids.flatten())])
    gate, up = rows.to(x.dtype).chunk(2, -1)
    pieces = hidden(F.silu(gate) * up, weights.flatten()[perm, None]).split(sizes)
    rows = torch.cat([F.linear(pieces[e], b.down[e], bias_of(b, e)) for e in range(E)])
    rows = rows + b.down_bias.repeat_interleave(repeats(counts), 0, output_size=ordered.shape[0])
    home = torch.zeros(rows.shape, dtype=rows.dtype).index_copy_(0, perm, rows)
    return (home.view(x.shape[0], K, H) * weights[..., None]).sum(1)


# split_experts


def titan_expert(b: Block, e: int, part: Tensor) -> Tensor:
    """torchtitan's loop: matrices transposed, two products and one."""
    hidden = F.silu(torch.matmul(part, b.gate[e].transpose(-2, -1)))
    return torch.matmul(hidden * torch.matmul(part, b.up[e].transpose(-2, -1)), b.down[e].transpose(-2, -1))


def biased_expert(b: Block, e: int, part: Tensor) -> Tensor:
    hidden = torch.addmm(b.gate_up_bias[e, :I], part, b.gate_t[e])
    return F.linear(F.relu(hidden), b.down[e], b.down_bias[e])


def split_whole(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    at: str = "after",
    sizes: Callable[[Tensor, Tensor], list[int]] = lambda ids, logits: by_map(ids, logits).tolist(),
    sort: Callable[[Tensor], Tensor] = lambda flat: flat.argsort(stable=True),
    read: Callable[[Tensor, Tensor], Tensor] = lambda x, token: x[token],
    expert: Callable[[Block, int, Tensor], Tensor] = titan_expert,
    order: Any = range(E),
    weight_of: Callable[[Tensor, Tensor], Tensor] = lambda weights, perm: weights.flatten()[perm],
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, t, rows: torch.zeros_like(x).scatter_add(
        0, rows_of(t), rows
    ),
) -> Tensor:
    weights, ids = choose(x, logits)
    number = sizes(ids, logits)
    perm = sort(ids.view(-1))
    token = perm // K
    column = weight_of(weights, perm)[:, None]
    rows = read(x, token)
    if at == "before":
        rows = rows * column
    pieces = torch.split(rows, number, dim=0)
    rows = torch.cat([expert(b, e, pieces[order[e]]) for e in range(E)], dim=0)
    return add(x, token, rows if at == "before" else rows * column)


def split_written_back(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """DeepSeek's: results written at perm, weighted in pair order in the weights' dtype."""

    weights, ids = choose(x, logits)
    sizes = by_map(ids, logits).tolist()
    perm = ids.view(-1).argsort(stable=True)
    rows = torch.cat([one(piece) for one, piece in zip(b.experts, x[perm // K].split(sizes), strict=True)])
    pairs = torch.empty_like(rows)
    pairs[perm] = rows
    return (pairs.view(x.shape[0], K, H).type(weights.dtype).mul_(weights.unsqueeze(-1))).sum(dim=1).type(x.dtype)


# routing_map


def transposed(chosen: Tensor) -> Tensor:
    return chosen.T.contiguous()


def mapped(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    chosen_of: Callable[[Tensor, Tensor], Tensor] = lambda ids, logits: (
        torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
    ),
    number_of: Callable[[Tensor], Tensor] = lambda x: torch.arange(x.shape[0])[None].expand(E, -1),
    turn: Callable[[Tensor], Tensor] = transposed,
    mask_of_weights: Callable[[Tensor], Tensor] = transposed,
    counted: Callable[[Tensor], Tensor] = lambda chosen: chosen.sum(0),
    probs_of: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda logits, ids, w: torch.zeros_like(
        logits, dtype=w.dtype
    ).scatter(1, ids, w),
    act: Callable[[Tensor], Tensor] | None = None,
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, t, rows: torch.zeros_like(x).index_add(0, t, rows),
) -> Tensor:
    weights, ids = choose(x, logits)
    chosen = chosen_of(ids, logits)
    token = number_of(x).masked_select(turn(chosen))
    probs = probs_of(logits, ids, weights).T.contiguous().masked_select(mask_of_weights(chosen))
    sizes = counted(chosen).tolist()
    hidden = parts(x[token], sizes, b.gate_up)
    gate, up = hidden.chunk(2, -1)
    rows = parts(F.silu(gate) * up if act is None else act(hidden), sizes, b.down)
    return add(x, token, rows * probs[:, None])


def mapped_one_hot(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The map as a sum of one-hot encodings, gate and up apart, a repeated row of numbers."""
    weights, ids = choose(x, logits)
    turned = F.one_hot(ids, num_classes=E).sum(dim=1).bool().transpose(0, 1).contiguous()
    token = torch.masked_select(torch.arange(x.shape[0]).unsqueeze(0).repeat(E, 1), turned)
    sizes = turned.sum(-1).tolist()
    rows = torch.index_select(x, 0, token)
    pieces = rows.split(sizes)
    gate = torch.cat([F.linear(piece, b.gate[e]) for e, piece in enumerate(pieces)])
    up = torch.cat([F.linear(piece, b.up[e]) for e, piece in enumerate(pieces)])
    pieces = (F.silu(gate) * up).split(sizes)
    rows = torch.cat([piece @ b.down_t[e] for e, piece in enumerate(pieces)])
    dense = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, ids, weights)
    rows = rows * dense.t().masked_select(turned).unsqueeze(-1)
    return x.new_zeros(x.shape).scatter_add(0, token.unsqueeze(1).expand(-1, H), rows)


def mapped_grouped(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Grouped matmuls over the map's rows, a bias repeated, the probabilities before the second product."""
    weights, ids = choose(x, logits)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    counts, turned = chosen.sum(0), chosen.T.contiguous()
    token = torch.arange(x.shape[0])[None].expand(E, -1).masked_select(turned)
    probs = torch.zeros_like(logits, dtype=weights.dtype).scatter(1, ids, weights).T.masked_select(turned)
    offsets = ends(counts)
    rows = grouped_matmul(x[token], b.gate_up.mT, offs=offsets)
    rows = rows + b.gate_up_bias.repeat_interleave(counts, dim=0, output_size=token.shape[0])
    gate, up = rows.chunk(2, -1)
    rows = grouped_matmul(F.silu(gate) * up * probs[:, None], b.down.mT, offs=offsets)
    return torch.zeros_like(x).index_add(0, token, rows)


def best_third(scores: Tensor) -> Tensor:
    """Megatron's mask of the tokens with the largest scores, for each expert."""
    _, best = torch.topk(scores, k=scores.shape[0] // 3, dim=0, sorted=False)
    return torch.zeros_like(scores).scatter(0, best, 1).bool()


def first_ones(probs: Tensor, chosen: Tensor) -> Tensor:
    """The first tokens of each expert fit, as far as its capacity goes."""
    return torch.cumsum(chosen.int(), dim=0) <= 9


def mapped_dropped(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    fits: Callable[[Tensor, Tensor], Tensor] = lambda probs, chosen: best_third(probs),
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda probs, kept: probs * kept,
    counted: Callable[[Tensor, Tensor], Tensor] = lambda chosen, kept: kept.sum(dim=0),
    at: str = "after",
) -> Tensor:
    """Megatron with a capacity and without padding: each expert keeps the choices that fit."""
    weights, ids = choose(x, logits)
    probs = torch.zeros_like(logits, dtype=weights.dtype).scatter(1, ids, weights)
    chosen = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
    kept = torch.logical_and(chosen, fits(probs, chosen))
    probs, turned = weigh(probs, kept), kept.T.contiguous()
    token = torch.arange(x.shape[0]).unsqueeze(0).expand(E, -1).masked_select(turned)
    column = probs.T.contiguous().masked_select(turned).unsqueeze(-1)
    rows = x.index_select(0, token)
    rows = rows * column if at == "before" else rows
    sizes = counted(chosen, kept).tolist()
    gate, up = parts(rows, sizes, b.gate_up).chunk(2, dim=-1)
    act = F.silu(gate) * up
    rows = parts(act * column if at == "middle" else act, sizes, b.down)
    rows = rows * column if at == "after" else rows
    return torch.zeros_like(x).scatter_add(0, token.unsqueeze(1).expand(-1, H), rows)


SPELLINGS: dict[str, dict[str, Spelling]] = {
    "grouped_scatter": {
        "before": scores_before,
        "gathered": gathered_tokens,
        "token_of_pair": token_of_pair,
        "packed": packed_gate_up,
        "onto_shared": onto_shared_expert,
        "index_add": grouped_index_add,
        "repeated_bias": grouped_repeated_bias,
    },
    "grouped_top1": {
        "sorted_weights": top1_sorted_weights,
        "written_back": top1_written_back,
        "after": lambda b, x, l: top1(b, x, l, after=True),
    },
    "split_linear": {
        "modules": split_modules,
        "transposed": split_transposed,
        "biased": split_biased,
        "sorted_bias": split_sorted_bias,
    },
    "split_experts": {
        "titan": split_whole,
        "before": lambda b, x, l: split_whole(b, x, l, at="before"),
        "written_back": split_written_back,
        "biased": lambda b, x, l: split_whole(b, x, l, expert=biased_expert),
    },
    "routing_map": {
        "after": mapped,
        "one_hot": mapped_one_hot,
        "grouped": mapped_grouped,
        "dropped": mapped_dropped,
        "dropped_by_position": lambda b, x, l: mapped_dropped(
            b, x, l, fits=lambda probs, chosen: best_third(chosen.int()), at="middle"
        ),
    },
}


def _bf16(formulation: str, name: str, spelling: Spelling, step: str, words: str) -> Damaged:
    return Damaged(formulation, name, spelling, step, words, BF16)


def _scatter(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return _bf16("grouped_scatter", name, lambda b, x, l: grouped(b, x, l, **changed), step, words)


def _top1(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return _bf16("grouped_top1", name, lambda b, x, l: top1(b, x, l, **changed), step, words)


def _split(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return Damaged("split_linear", name, lambda b, x, l: split(b, x, l, **changed), step, words)


def _whole(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return Damaged("split_experts", name, lambda b, x, l: split_whole(b, x, l, **changed), step, words)


def _map(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return Damaged("routing_map", name, lambda b, x, l: mapped(b, x, l, **changed), step, words)


def _dropped(name: str, step: str, words: str, **changed: Any) -> Damaged:
    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        return mapped_dropped(b, x, logits, fits=first_ones, **changed)

    return Damaged("routing_map", f"dropped_{name}", spelling, step, words)


def _bias(name: str, words: str, dtype: torch.dtype = torch.float32, step: str = "activate", **changed: Any) -> Damaged:
    return Damaged(
        "split_linear", f"bias_{name}", lambda b, x, l: split_sorted_bias(b, x, l, **changed), step, words, dtype
    )


def relu_expert(one: Any, part: Tensor) -> Tensor:
    return one.w2(one.w1(part).relu() * one.w3(part))


def attend(hidden: Tensor) -> Tensor:
    """JetMoE's attention experts: routed projections with attention, not an activation, between them."""
    return (hidden[:, :I] @ hidden[:, I:].t()).softmax(-1) @ hidden[:, I:]


def _twice(ids: Tensor, logits: Tensor) -> Tensor:
    return torch.bincount((ids + 1).flatten() % E, minlength=E)


DAMAGED: tuple[Damaged, ...] = (
    _scatter("modulo", "dispatch", "not from a gather", read=lambda x, token: x.repeat_interleave(K, 0)),
    _scatter("descending", "sort", "descending", sort=lambda flat: flat.argsort(stable=True, descending=True)),
    _scatter("other_k", "sort", "perm // 3", token_of=lambda perm: perm // (K + 1)),
    _scatter("remainder", "sort", "permutation comes from remainder", token_of=lambda perm: perm % K),
    _scatter("other_ids", "count", "not of the sorted ids", counts=_twice),
    _scatter(
        "map_of_others", "count", "another choice",
        counts=lambda ids, logits: torch.zeros_like(logits, dtype=torch.float32).scatter(1, E - 1 - ids, 1.0).sum(0),
    ),
    _scatter(
        "map_in_bf16", "count", "counted in torch.bfloat16",
        counts=lambda ids, logits: torch.zeros_like(logits).scatter(1, ids, 1.0).sum(0),
    ),
    _scatter(
        "histogram_too_wide", "count", "not one for each id",
        counts=lambda ids, logits: torch.histc(ids.view(-1).float(), bins=E, min=-1, max=E - 1),
    ),
    _scatter(
        "counted_twice", "count", "ones are written",
        counts=lambda ids, logits: torch.zeros(E, dtype=torch.int64).index_put(
            (ids.flatten(),), torch.ones_like(ids.flatten()), accumulate=False
        ),
    ),
    _scatter(
        "counts_of_experts", "count", "summed over the experts",
        counts=lambda ids, logits: F.one_hot(ids[:, :1].expand(-1, E), E).sum((0, 2)),
    ),
    _scatter("other_rows_for_up", "activate", "read different rows", rows_for_up=lambda rows: rows.flip(0)),
    _scatter("no_activation", "activate", "not one activated operand", act=lambda gate, up: gate * up),
    _scatter("sorted_otherwise", "weigh", "another index", weight_of=lambda s, perm: s.view(-1)[perm.argsort()]),
    _scatter("weights_in_pair_order", "weigh", "not from w[perm]", weight_of=lambda s, perm: s.view(-1)),
    _scatter(
        "at_other_tokens", "added_home", "another index",
        add=lambda x, token, rows: torch.zeros_like(x).scatter_add(0, rows_of(token.flip(0)), rows),
    ),
    _scatter(
        "half_of_the_columns", "added_home", "another index",
        add=lambda x, token, rows: torch.zeros_like(x).scatter_add(0, rows_of(token)[:, :1].expand(-1, H // 2), rows),
    ),
    _scatter(
        "half_of_the_tokens", "dispatch", "not from a gather",
        read=lambda x, token: F.pad(torch.gather(x, 0, rows_of(token)[:, :1].expand(-1, H // 2)), (0, H // 2)),
    ),
    _scatter(
        "overwrites", "added_home", "overwrite one another",
        add=lambda x, token, rows: torch.zeros_like(x).index_put((token,), rows),
    ),
    _scatter(
        "replaces", "added", "consumed by scatter",
        add=lambda x, token, rows: torch.zeros_like(x).scatter(0, rows_of(token), rows),
    ),
    _scatter(
        "scaled", "added_home", "alpha",
        add=lambda x, token, rows: torch.zeros_like(x).index_add(0, token, rows, alpha=0.5),
    ),
    _scatter(
        "largest", "added", "scatter_reduce",
        add=lambda x, token, rows: torch.zeros_like(x).scatter_reduce(0, rows_of(token), rows, "amax"),
    ),
    _top1("no_order", "dispatch", "not from a gather", read=lambda rows, perm: rows),
    _top1("other_order", "sort", "comes from flip", read=lambda rows, perm: rows[perm.flip(0)]),
    _top1("other_counts", "count", "not of the sorted ids", counts=lambda i: torch.bincount(E - 1 - i, minlength=E)),
    _top1("stays_sorted", "gathered_home", "not the inverse", home=lambda perm: perm),
    _split("descending", "sort", "descending", sort=lambda flat: flat.sort(0, descending=True)[1]),
    _split("other_k", "sort", "perm // 3", divide=lambda perm: perm.div(K + 1, rounding_mode="trunc")),
    _split(
        "other_sizes", "count", "size of expert", sizes=lambda ids, logits: by_map(ids, logits).tolist()[::-1]
    ),
    _split(
        "sizes_of_others", "count", "another choice is encoded",
        sizes=lambda ids, logits: by_one_hot(E - 1 - ids, logits).tolist()
    ),
    Damaged(
        "none", "routed_attention", lambda b, x, l: split(b, x, l, act=attend), "anchor", "no matmul with expert"
    ),
    _split("weights_in_pair_order", "weigh", "not from w[perm]", weight_of=lambda weights, perm: weights.flatten()),
    _split(
        "overwrites", "home", "overwrite one another",
        add=lambda x, token, rows: torch.zeros_like(x).index_put((token,), rows),
    ),
    _split(
        "onto_its_result", "home", "another index",
        add=lambda x, token, rows: torch.zeros_like(x).index_add(0, (token + 1) % x.shape[0], rows),
    ),
    _map("no_numbers", "select", "numbers of tokens", number_of=lambda x: torch.arange(E * x.shape[0]).view(E, -1) % 5),
    _map(
        "tokens_first", "select", "numbers of tokens",
        number_of=lambda x: torch.arange(x.shape[0])[:, None].expand(-1, E), turn=lambda chosen: chosen,
    ),
    _map("of_twos", "select", "does not hold ones", chosen_of=lambda i, l: torch.zeros_like(l).scatter(1, i, 2).bool()),
    _map("other_counts", "count", "does not make a map", counted=lambda chosen: (~chosen).sum(0)),
    _map("no_up", "activate", "not an activation", act=lambda hidden: hidden[:, :I].tanh()),
    _map("other_map", "weigh", "another map", mask_of_weights=lambda chosen: chosen.flip(1).T.contiguous()),
    _map(
        "other_ids", "weigh", "at other ids",
        probs_of=lambda logits, ids, w: torch.zeros_like(logits).scatter(1, E - 1 - ids, w),
    ),
    _map(
        "into_ones", "weigh", "into zeros", probs_of=lambda logits, ids, w: torch.ones_like(logits).scatter(1, ids, w)
    ),
    _map(
        "overwrites", "added_home", "overwrite one another",
        add=lambda x, token, rows: torch.zeros_like(x).index_put((token,), rows),
    ),
    _bias("of_pairs", "not gathered by the sorted ids", index=lambda ordered, flat: flat),
    _bias("of_others", "not gathered by the sorted ids", index=lambda ordered, flat: E - 1 - ordered),
    _bias("scaled", "scaled (alpha)", first=lambda rows, bias: torch.add(rows, bias, alpha=0.5)),
    _bias("wider", "added in torch.float32", BF16, first=lambda rows, bias: rows + bias.float()),
    _bias("other_repeats", "does not count the ids", repeats=lambda counts: counts.flip(0)),
    _bias("twice", "two biases", bias_of=lambda b, e: b.down_bias[e]),
    _bias("of_some", "not all have a bias", step="dispatch", bias_of=lambda b, e: b.down_bias[e] if e else None),
    _bias("unweighted", "whose bias it does not weight", hidden=lambda act, column: act * column),
    _dropped("weights_of_all", "weigh", "not multiplied by the map", weigh=lambda probs, kept: probs),
    _dropped("other_weights", "weigh", "not multiplied by the map", weigh=lambda probs, kept: probs * kept.flip(0)),
    _dropped("counts_of_all", "count", "not of the choices that are kept", counted=lambda chosen, kept: chosen.sum(0)),
    _dropped("weighted_before", "activate", "weighted before the experts", at="before"),
    _whole("other_parts", "experts", "reads part 3", order=(3, 2, 1, 0)),
    _whole(
        "of_all_rows", "experts", "not a part of the rows",
        expert=lambda b, e, part: F.linear(F.silu(F.linear(part, b.gate[e])) * F.linear(part * 2, b.up[e]), b.down[e]),
    ),
    _whole("not_gathered", "dispatch", "not from a gather", read=lambda x, token: x.repeat_interleave(K, 0)),
    _whole("descending", "sort", "descending", sort=lambda flat: flat.argsort(stable=True, descending=True)),
    _whole("other_sizes", "count", "size of expert", sizes=lambda ids, logits: by_map(ids, logits).tolist()[::-1]),
    _whole(
        "mixed", "alike", "differ in activation",
        expert=lambda b, e, part: b.experts[e](part) if e else relu_expert(b.experts[0], part),
    ),
    _whole("weights_in_pair_order", "weigh", "not from w[perm]", weight_of=lambda weights, perm: weights.flatten()),
    _whole(
        "scaled", "home", "alpha",
        add=lambda x, token, rows: torch.zeros_like(x).index_add(0, token, rows, alpha=2),
    ),
    _whole(
        "written_at_tokens", "home", "overwrite one another",
        add=lambda x, token, rows: torch.zeros_like(x).index_put((token,), rows),
    ),
)  # fmt: skip
