"""Blocks with a capacity and one-hot masks of slots: spellings and damaged copies, as in `spellings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.passes.spellings import Block, Damaged, E, H, K, Spelling


def slotted(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    capacity: int = 2,
    order: Callable[[Tensor], Tensor] = lambda encoded: encoded.permute(1, 0, 2),
    ranked: Callable[[Tensor], Tensor] = lambda flat: flat.cumsum(dim=0) - 1,
    keep: Callable[[Tensor, int], Tensor] = lambda rank, capacity: rank < capacity,
    place_of: Callable[[Tensor, Tensor], Tensor] = lambda mask, rank: (mask * rank).sum(-1),
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda mask, probs: mask * probs.unsqueeze(0),
    truth: Callable[[Tensor], Tensor] = lambda slots: slots.bool(),
    act: Callable[[Tensor, Tensor], Tensor] = lambda gate, up: F.silu(gate) * up,
    home: Callable[[Tensor, Tensor], Tensor] | None = None,
    ids_of: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> Tensor:
    """nanoMoE's order of steps; the damaged copies change one of them. Some choices do not fit."""
    values, ids = logits.float().topk(K, dim=-1)
    probs = torch.softmax(torch.full_like(logits.float(), float("-inf")).scatter(-1, ids, values), dim=-1)
    mask = order(F.one_hot(ids_of(ids), num_classes=E))
    rank = ranked(mask.reshape(-1, E)).reshape(mask.shape)
    mask = mask * keep(rank, capacity)
    place = place_of(mask, rank)
    slots = (weigh(mask, probs).unsqueeze(3) * F.one_hot(place, num_classes=capacity).unsqueeze(2)).sum(dim=0)
    rows = truth(slots).permute(1, 2, 0).type_as(x) @ x
    rows = torch.bmm(act(torch.bmm(rows, b.gate_t), torch.bmm(rows, b.up_t)), b.down_t)
    if home is not None:
        return home(slots.to(x.dtype), rows)
    return slots.view(x.shape[0], -1).to(x.dtype) @ rows.view(-1, H)


def in_place(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The mask is multiplied in place, packed gate and up, the weight's matrices transposed."""
    values, ids = torch.topk(logits, K)
    probs = torch.full_like(logits, float("-inf")).scatter_(1, ids, values).float().softmax(-1)
    mask = F.one_hot(ids, E).transpose(0, 1)
    rank = (torch.cumsum(mask.reshape(K * x.shape[0], E), dim=0) - 1).view(K, x.shape[0], E)
    mask *= torch.lt(rank, 3)
    place = torch.sum(mask * rank, dim=-1)
    slots = torch.sum((mask * probs).unsqueeze(3) * F.one_hot(place, 3).unsqueeze(2), dim=0).to(x.dtype)
    rows = torch.matmul((slots != 0).permute(1, 2, 0).to(x.dtype), x)
    gate, up = torch.matmul(rows, b.gate_up.transpose(1, 2)).chunk(2, dim=-1)
    rows = torch.matmul(F.silu(gate) * up, b.down.mT)
    return torch.mm(slots.reshape(x.shape[0], -1), rows.reshape(-1, H))


def by_einsum(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Dispatch and combine as GShard writes them."""
    values, ids = torch.topk(logits, K)
    probs = torch.full_like(logits, float("-inf")).scatter(1, ids, values).softmax(-1)
    mask = F.one_hot(ids, E).permute(1, 0, 2)
    rank = (mask.reshape(-1, E).cumsum(0) - 1).view(K, -1, E)
    mask = mask * (rank < 2)
    slots = ((mask * probs)[..., None] * F.one_hot((mask * rank).sum(-1), 2)[:, :, None]).sum(0)
    rows = torch.einsum("tec,th->ech", slots.bool().to(x.dtype), x)
    rows = torch.einsum("eci,eih->ech", F.gelu(torch.einsum("ech,ehi->eci", rows, b.gate_t)), b.down_t)
    return torch.einsum("tec,ech->th", slots, rows)


# drop_and_pad


def flat_places(probs: Tensor, token: Tensor) -> Tensor:
    """Megatron's: the probabilities at e * T + token[e, c] of the flattened transposed matrix."""
    place = torch.arange(E).unsqueeze(-1) * probs.shape[0] + token
    return probs.T.contiguous().view(-1).index_select(0, place.view(-1))


def gathered(probs: Tensor, token: Tensor) -> Tensor:
    return probs.t().gather(1, token).reshape(-1)


def padded(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    rule: Callable[[Tensor, Tensor], Tensor] = lambda probs, chosen: probs,
    slots: Callable[[int], int] = lambda capacity: capacity,
    keep: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda probs, best, chosen: (
        torch.zeros_like(probs).scatter(0, best, 1).bool()
    ),
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda probs, kept: probs * kept,
    order: Callable[[Tensor], Tensor] = lambda turned: turned.argsort(dim=-1, descending=True, stable=True),
    at_slots: Callable[[Tensor, Tensor], Tensor] = flat_places,
    act: Callable[[Tensor, Tensor], Tensor] = lambda gate, up: F.silu(gate) * up,
    at: str = "after",
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, token, rows: torch.zeros_like(x).scatter_add(
        0, token.unsqueeze(1).expand(-1, H), rows
    ),
) -> Tensor:
    """Megatron's drop-and-pad; the damaged copies change one step. Half of the tokens fit into each expert."""
    values, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=1)
    probs = torch.zeros_like(logits, dtype=x.dtype).scatter(1, ids, values.to(x.dtype))
    chosen = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
    capacity = x.shape[0] // 2
    _, best = torch.topk(rule(probs, chosen), k=capacity, dim=0, sorted=False)
    kept = keep(probs, best, chosen)
    probs = weigh(probs, kept)
    token = order(kept.to(torch.int8).T.contiguous())[:, : slots(capacity)].contiguous()
    weights = at_slots(probs, token)
    rows = x.index_select(0, token.view(-1)).view(E, -1, H)
    hidden = act(torch.bmm(rows, b.gate_t), torch.bmm(rows, b.up_t))
    if at == "middle":
        hidden = hidden * weights.view(E, -1, 1)
    rows = torch.bmm(hidden, b.down_t).view(-1, H)
    return add(x, token.view(-1), rows if at == "middle" else rows * weights.unsqueeze(-1))


def padded_inside(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """By position, the probabilities before the second product and gathered along the tokens, index_add."""
    return padded(
        b, x, logits, rule=lambda probs, chosen: chosen.int(), at="middle", at_slots=gathered,
        order=lambda turned: turned.sort(-1, descending=True)[1],
        add=lambda x, token, rows: torch.zeros_like(x).index_add(0, token, rows),
    )  # fmt: skip


def padded_packed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Packed matrices by einsum; the result is added to a shared expert's."""
    values, ids = logits.float().softmax(-1).topk(K)
    probs = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, ids, values)
    capacity = max(x.shape[0] // 2, 1)
    best = torch.topk(probs, capacity, dim=0)[1]
    kept = torch.zeros_like(probs, dtype=torch.int32).scatter_(0, best, 1)
    probs = kept * probs
    token = torch.argsort(kept.t(), dim=1, descending=True)[:, :capacity]
    gate, up = torch.einsum("ech,eih->eci", x[token.reshape(-1)].view(E, capacity, H), b.gate_up).chunk(2, -1)
    rows = torch.einsum("eci,ehi->ech", F.silu(gate) * up, b.down).reshape(-1, H)
    rows = (rows * gathered(probs, token)[:, None]).to(x.dtype)
    return b.shared(x).index_add_(0, token.reshape(-1), rows)


def padded_parts(
    b: Block, x: Tensor, logits: Tensor, *, sizes: Callable[[int], Tensor] = lambda capacity: torch.full((E,), capacity)
) -> Tensor:
    """Megatron's SequentialMLP: one linear layer for each expert's slots."""
    values, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=1)
    probs = torch.zeros_like(logits, dtype=x.dtype).scatter(1, ids, values.to(x.dtype))
    capacity = x.shape[0] // 2
    kept = torch.zeros_like(probs).scatter(0, torch.topk(probs, k=capacity, dim=0, sorted=False)[1], 1).bool()
    probs = probs * kept
    token = kept.to(torch.int8).T.contiguous().argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
    number, rows = sizes(capacity).tolist(), x.index_select(0, token.view(-1))
    gate, up = torch.cat([F.linear(part, b.gate_up[e]) for e, part in enumerate(rows.split(number))]).chunk(2, -1)
    rows = (F.silu(gate) * up).split(number)
    rows = torch.cat([F.linear(part, b.down[e]) for e, part in enumerate(rows)])
    rows = rows * flat_places(probs, token).unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, token.view(-1, 1).expand(-1, H), rows)


SPELLINGS: dict[str, dict[str, Spelling]] = {
    "capacity": {"plain": slotted, "in_place": in_place, "einsum": by_einsum},
    "drop_and_pad": {"plain": padded, "inside": padded_inside, "packed": padded_packed, "parts": padded_parts},
}


def _slots(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return Damaged("capacity", name, lambda b, x, l: slotted(b, x, l, **changed), step, words)


def _padded(name: str, step: str, words: str, **changed: Any) -> Damaged:
    return Damaged("drop_and_pad", name, lambda b, x, l: padded(b, x, l, **changed), step, words)


DAMAGED: tuple[Damaged, ...] = (
    _padded("no_activation", "products", "not one activated operand", act=lambda gate, up: gate * up),
    Damaged(
        "drop_and_pad", "other_parts", lambda b, x, l: padded_parts(b, x, l, sizes=lambda c: torch.arange(E) * 0 + c),
        "activate", "other parts than each expert's slots",
    ),
    _padded("fewer_slots", "slots", "nothing shows that the map", slots=lambda capacity: capacity - 1),
    _padded("every_choice", "slots", "nothing shows that the map", keep=lambda probs, best, chosen: chosen),
    _padded("weights_of_all", "weigh", "not from a scatter times the map", weigh=lambda probs, kept: probs),
    _padded("other_weights", "weigh", "not multiplied by the map", weigh=lambda probs, kept: probs * kept.flip(0)),
    _padded("at_other_slots", "weigh", "at other places", at_slots=lambda probs, t: gathered(probs, t.flip(1))),
    _padded("not_turned", "weigh", "not of the transpose", at_slots=lambda p, t: p.view(E, -1).gather(1, t).view(-1)),
    _padded(
        "at_other_tokens", "added_home", "another index",
        add=lambda x, token, rows: torch.zeros_like(x).index_add(0, token.flip(0), rows),
    ),
    _padded(
        "overwrites", "added_home", "overwrite one another",
        add=lambda x, token, rows: torch.zeros_like(x).index_put((token,), rows),
    ),
    _slots("no_activation", "activate", "not one activated operand", act=lambda gate, up: gate * up),
    _slots("all_slots", "slots", "other slots", truth=lambda slots: slots >= 0),
    _slots("summed_otherwise", "slots", "not summed", home=lambda s, rows: torch.einsum("tec,ech->eh", s, rows)),
    _slots("largest", "slots", "not multiplied", home=lambda slots, rows: rows.amax(1).sum(0) + slots.sum()),
    _slots("weights_of_others", "rank", "different choices", weigh=lambda mask, probs: mask.flip(0) * probs),
    _slots("one_less", "rank", "another number", keep=lambda rank, capacity: rank < capacity - 1),
    _slots("one_more", "rank", "kept by le", keep=lambda rank, capacity: rank <= capacity - 1),
    _slots("by_token", "rank", "another rank", capacity=10, keep=lambda rank, c: rank.flip(0) < c),
    _slots("from_one", "choose", "minus one", ranked=lambda flat: flat.cumsum(dim=0) - 2 + flat),
    _slots("along_experts", "choose", "along the choices", ranked=lambda flat: flat.cumsum(dim=1) - 1),
    _slots("same_experts", "choose", "distinct", ids_of=lambda ids: ids // 2),
)  # fmt: skip
