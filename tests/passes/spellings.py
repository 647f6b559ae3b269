"""One MoE block written in many ways: every formulation in three or more spellings, and damaged copies of them.

A spelling is a function (block, x [T, H], logits [T, E]) -> y [T, H] over the parameters of `Block`. The damaged copies
compute something else, in a way that is easily overlooked; each says at which step the finder must stop, and with which
words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 - defines transformers::grouped_mm_fallback
from torch import Tensor
from torch.nn import functional as F

E, K, H, I = 4, 2, 16, 8

Spelling = Callable[[Any, Tensor, Tensor], Any]


class Expert(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(H, I, bias=False, dtype=dtype)
        self.w2 = torch.nn.Linear(I, H, bias=False, dtype=dtype)
        self.w3 = torch.nn.Linear(H, I, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(torch.nn.Module):
    """The parameters of a block in every layout that a spelling may want.

    `around(block, x, logits, y)` makes what the module returns of the block's result; by default the result itself.
    """

    def __init__(
        self, spelling: Spelling, dtype: torch.dtype = torch.float32, around: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.spelling, self.around = spelling, around

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, dtype=dtype) * shape[-1] ** -0.5)

        self.router = torch.nn.Parameter(torch.randn(E, H, dtype=dtype))
        self.bias = made(E)
        self.gate_up_bias, self.down_bias = made(E, 2 * I), made(E, H)
        self.gate_up, self.gate, self.up, self.down = made(E, 2 * I, H), made(E, I, H), made(E, I, H), made(E, H, I)
        self.gate_up_t, self.gate_t, self.up_t, self.down_t = (
            made(E, H, 2 * I),
            made(E, H, I),
            made(E, H, I),
            made(E, I, H),
        )
        self.experts = torch.nn.ModuleList(Expert(dtype) for _ in range(E))
        self.shared = Expert(dtype)

    def forward(self, x: Tensor) -> Any:
        logits = F.linear(x, self.router)
        y = self.spelling(self, x, logits)
        return y if self.around is None else self.around(self, x, logits, y)


def choose(x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """softmax in fp32, top-k, renormalised: the router of most spellings."""
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


# grouped_mm


def grouped_matmul(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped matmul; in fp32, which that does not compute when compiled, transformers' operator."""
    if rows.dtype == torch.float32:
        return torch.ops.transformers.grouped_mm_fallback(rows, weights, offs=offs)
    return torch._grouped_mm(rows, weights, offs=offs)


def offsets_of(ids: Tensor) -> Tensor:
    return torch.cumsum(torch.bincount(ids.reshape(-1), minlength=E), 0, dtype=torch.int32)


def grouped_index_add(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    perm = ids.flatten().argsort(stable=True)
    token = torch.div(perm, K, rounding_mode="floor")
    rows = x.index_select(0, token)
    offsets = F.one_hot(ids, E).sum((0, 1)).cumsum(0, dtype=torch.int32)
    gate = grouped_matmul(rows, b.gate.mT, offs=offsets)
    up = grouped_matmul(rows, b.up.mT, offs=offsets)
    rows = grouped_matmul(F.silu(gate) * up, b.down.mT, offs=offsets)
    rows = rows * weights.flatten()[perm][:, None]
    return torch.zeros_like(x).index_add(0, token, rows)


def grouped_selected(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Biases of the sorted ids, which are the ids at the permutation; rows selected by the inverse, one einsum."""
    weights, ids = choose(x, logits)
    flat = ids.flatten()
    perm = flat.argsort(stable=True)
    ordered = flat[perm]
    offsets = F.one_hot(flat, E).sum(0).cumsum(0).to(torch.int32)
    token = torch.arange(x.shape[0]).repeat_interleave(K)[perm]
    first = grouped_matmul(torch.index_select(x, 0, token), b.gate_up.mT, offs=offsets) + b.gate_up_bias[ordered]
    gate, up = first[:, ::2], first[:, 1::2]
    rows = grouped_matmul(F.silu(gate) * up, b.down.mT, offs=offsets)
    rows = rows + b.down_bias.index_select(0, ordered)
    inverse = torch.zeros_like(perm).scatter_(0, perm, torch.arange(perm.shape[0]))
    return torch.einsum("tkh,tk->th", torch.index_select(rows, 0, inverse).view(-1, K, H), weights)


def grouped_weighted_first(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The weights on the tokens; rows gathered element by element, with the inverse written at the permutation."""
    weights, ids = choose(x, logits)
    ordered, perm = ids.view(-1).sort(stable=True)
    offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    rows = x[perm // K] * weights.view(-1)[perm].unsqueeze(1)
    gate = grouped_matmul(rows, b.gate_t, offs=offsets)
    rows = grouped_matmul(F.gelu(gate) * grouped_matmul(rows, b.up_t, offs=offsets), b.down_t, offs=offsets)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return torch.gather(rows, 0, inverse[:, None].expand(-1, H)).view(x.shape[0], K, H).sum(1)


def grouped_weighted_at_home(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    ordered, perm = ids.view(-1).sort(stable=True)
    counts = torch.histc(ordered.float(), bins=E, min=0, max=E - 1)
    offsets = counts.cumsum(dim=0).to(torch.int32)
    gate, up = grouped_matmul(x[perm // K], b.gate_up_t, offs=offsets).split(I, dim=-1)
    rows = grouped_matmul(up * (gate * torch.sigmoid(gate)), b.down_t, offs=offsets)
    rows = rows[torch.argsort(perm)].unflatten(0, (-1, K))
    return (rows * weights.unsqueeze(2)).sum(dim=-2)


def grouped_descending(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    perm = ids.flatten().argsort(stable=True, descending=True)
    rows = x[perm // K]
    offsets = offsets_of(E - 1 - ids)
    gate, up = grouped_matmul(rows, b.gate_up.mT, offs=offsets).chunk(2, -1)
    rows = grouped_matmul(F.silu(gate) * up, b.down.mT, offs=offsets)
    return torch.zeros_like(x).index_add(0, perm // K, rows * weights.flatten()[perm][:, None])


def _grouped(
    b: Block, x: Tensor, logits: Tensor, *, k: int = K, counted=None, twice=False, home=None, scaled=False
) -> Tensor:
    weights, ids = choose(x, logits)
    perm = ids.flatten().argsort(stable=True)
    rows = x[perm // k]
    offsets = offsets_of(ids if counted is None else counted(ids))
    gate, up = grouped_matmul(rows, b.gate_up.mT, offs=offsets).chunk(2, -1)
    if twice:
        up = gate
    rows = grouped_matmul(F.silu(gate) * up, b.down.mT, offs=offsets)
    rows = rows * weights.flatten()[perm][:, None]
    if scaled:
        rows = rows * 2
    inverse = perm.argsort() if home is None else home(perm)
    return rows[inverse].view(-1, K, H).sum(1)


# batched_mm


def batched_transposed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    flat = ids.flatten()
    rows = x[torch.arange(flat.shape[0]) // K]
    first = torch.matmul(rows.unsqueeze(1), b.gate_up_t.index_select(0, flat)).squeeze(1)
    gate, up = first[:, :I], first[:, I:]
    rows = torch.bmm((up * F.silu(gate)).unsqueeze(1), torch.index_select(b.down_t, 0, flat)).view(-1, H)
    return (rows * weights.view(-1, 1)).reshape(-1, K, H).sum(dim=1)


def batched_einsum(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    flat = ids.view(-1)
    rows = x.unsqueeze(1).expand(-1, K, -1).reshape(-1, H)
    gate = torch.einsum("sh,sih->si", rows, b.gate[flat])
    up = torch.einsum("sab,sb->sa", b.up[flat], rows)
    rows = torch.einsum("pi,pih->ph", F.gelu(gate) * up, b.down_t[flat])
    return torch.sum(input=(weights.flatten()[:, None] * rows).view(-1, K, H), dim=1, keepdim=False)


def batched_clamped(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """transformers 5.17: ids clamped to 0 .. E-1, which changes nothing for a top-k over E scores."""
    weights, ids = choose(x, logits)
    token = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand(-1, K).reshape(-1)
    flat = ids.reshape(-1).clamp(0, E - 1)
    first = torch.bmm(b.gate_up[flat], x[token].unsqueeze(-1)).squeeze(-1)
    gate, up = torch.chunk(input=first, chunks=2, dim=-1)
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (rows * weights.reshape(-1).unsqueeze(-1)).view(-1, K, H).sum(dim=1).to(x.dtype)


def batched_not_gated(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    flat = ids.reshape(-1)
    act = F.relu(torch.bmm(b.up[flat], x.repeat_interleave(K, 0).unsqueeze(-1))).square()
    rows = torch.bmm(b.down[flat], act).squeeze(-1) * weights.reshape(-1, 1)
    return rows.view(-1, K, H).sum(1)


def batched_of_batch(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The router sees [B, S, H], so that ids and weights are [B, S, K]."""
    weights, ids = choose(x, logits.view(1, -1, E))
    flat = ids.reshape(-1)
    gate, up = torch.bmm(b.gate_up[flat], x.repeat_interleave(K, 0)[:, :, None]).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up)[:, :, None]).squeeze(-1)
    return (rows * weights.reshape(-1)[:, None]).view(-1, K, H).sum(1)


def batched_added(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Rows in pair order that are added at their tokens."""
    weights, ids = choose(x, logits)
    flat, token = ids.reshape(-1), torch.arange(x.shape[0]).repeat_interleave(K)
    gate, up = torch.bmm(b.gate_up[flat], x[token].unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return torch.zeros_like(x).index_add_(0, token, rows * weights.reshape(-1, 1))


def batched_scattered(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    flat, token = ids.reshape(-1), torch.arange(x.shape[0] * K) // K
    gate, up = torch.bmm(b.gate_up[flat], x[token].unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1)[:, None]
    return x.new_zeros(x.shape).scatter_add(0, token[:, None].expand_as(rows), rows)


def batched_added_at(
    b: Block, x: Tensor, logits: Tensor, index: Callable[[Tensor], Tensor], alpha: float = 1
) -> Tensor:
    weights, ids = choose(x, logits)
    flat, token = ids.reshape(-1), torch.arange(x.shape[0]).repeat_interleave(K)
    gate, up = torch.bmm(b.gate_up[flat], x[token].unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return torch.zeros_like(x).index_add_(0, index(token), rows, alpha=alpha)


def _batched(
    b: Block, x: Tensor, logits: Tensor, *, repeat=None, second=None, scaled=False, ids=None, bias=False, dim=1
) -> Tensor:
    weights, chosen = choose(x, logits)
    flat = chosen.reshape(-1) if ids is None else ids(chosen)
    rows = x.repeat_interleave(K, 0) if repeat is None else repeat(x)
    first = torch.bmm(b.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1)
    if bias:
        first = first + b.bias[flat][:, None]
    gate, up = first.chunk(2, -1)
    rows = torch.bmm(b.down[flat if second is None else second(flat)], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    rows = rows * weights.reshape(-1, 1)
    if scaled:
        rows = rows * 0.5
    return rows.view(-1, K, H).sum(1) if dim == 1 else rows.view(K, -1, H).sum(0)


# gather_einsum


def einsum_bmm_sum(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    gate, up = torch.einsum("bd,bknd->bkn", x, b.gate_up[ids]).chunk(2, dim=-1)
    rows = torch.einsum("bki,bkhi->bkh", up * F.silu(gate), b.down[ids])
    return torch.bmm(weights.unsqueeze(1), rows).squeeze(1)


def einsum_matmul(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    gate = b.gate[ids] @ x[:, None, :, None]
    up = torch.matmul(b.up[ids], x.view(-1, 1, H, 1))
    rows = torch.matmul(b.down[ids], F.silu(gate) * up).squeeze(-1)
    return (rows * weights[..., None]).sum(-2)


def einsum_transposed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    down = b.down_t[ids.view(-1)].view(-1, K, I, H)
    gate = torch.einsum("td, tkdi -> tki", x, b.gate_t[ids])
    up = torch.einsum("tkdi,tkd->tki", b.up[ids].transpose(-1, -2), x.unsqueeze(1).expand(-1, K, -1))
    rows = torch.einsum("tki,tkid->tkd", F.gelu(gate, approximate="tanh") * up, down)
    return torch.matmul(rows.transpose(1, 2), weights.unsqueeze(-1)).squeeze(-1)


def _einsum(
    b: Block, x: Tensor, logits: Tensor, *, first="ti,taoi->tao", last="tai,ta->ti", down_ids=None, weigh=None
) -> Tensor:
    weights, ids = choose(x, logits)
    gate = F.silu(torch.einsum(first, x, b.gate[ids]))
    up = torch.einsum(first, x, b.up[ids])
    rows = torch.einsum("tao,taio->tai", gate * up, b.down[ids if down_ids is None else down_ids(ids)])
    return torch.einsum(last, rows, weights) if weigh is None else weigh(rows, weights)


# dense_bmm


def kept_scores(logits: Tensor, fill: float = float("-inf"), largest: bool = True) -> Tensor:
    """Logits [T, E] of the chosen experts, `fill` elsewhere."""
    values, ids = torch.topk(logits, K, dim=1, largest=largest)
    return torch.full_like(logits, fill).scatter(1, ids, values)


def dense_softmax_output(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    scores = torch.softmax(kept_scores(logits).float(), dim=-1).to(x.dtype)
    rows = x.unsqueeze(0).expand(E, -1, -1)
    gate, up = torch.bmm(rows, b.gate_up.transpose(1, 2)).chunk(2, dim=-1)
    rows = torch.bmm(F.silu(gate) * up, b.down.transpose(1, 2))
    return (rows * scores.t().unsqueeze(-1)).sum(dim=0)


def dense_scattered_weights(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, ids, weights)
    gate = torch.einsum("th,ehi->eti", x, b.gate_t)
    up = torch.einsum("th,ehi->eti", x, b.up_t)
    rows = torch.einsum("eti,eih->eth", F.gelu(gate) * up, b.down_t)
    return torch.einsum("eth,te->th", rows, scores)


def dense_broadcast_input(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    scores = torch.sigmoid(kept_scores(logits).float()).to(x.dtype)
    rows = x[None] * scores.T[:, :, None]
    gate, up = torch.matmul(rows, b.gate_up_t).split(I, dim=-1)
    return torch.matmul(F.silu(gate) * up, b.down_t).sum(0)


def encoded_scores(x: Tensor, logits: Tensor) -> Tensor:
    """Scores [T, E] by a one-hot encoding of the ids, as tutorials write it."""
    weights, ids = choose(x, logits)
    return (F.one_hot(ids, E).to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)


def dense_one_hot(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    gate, up = torch.matmul(x.expand(E, -1, -1), b.gate_up_t).chunk(2, dim=-1)
    rows = torch.matmul(F.silu(gate) * up, b.down_t)
    return (rows * encoded_scores(x, logits).T[:, :, None]).sum(0)


def dense_sorted(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The experts by the first of a sort instead of a top-k."""
    scores = torch.softmax(logits, dim=-1)
    ids = torch.argsort(scores, dim=-1, descending=True)[:, :K]
    kept = torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids))
    gate, up = torch.einsum("th,ehi->eti", x, b.gate_up_t).chunk(2, dim=-1)
    return torch.einsum("eth,te->th", torch.einsum("eti,eih->eth", F.silu(gate) * up, b.down_t), kept)


def _dense(b: Block, x: Tensor, logits: Tensor, *, scores=None, bias=False, repeat=None, dim=0) -> Tensor:
    kept = torch.sigmoid(kept_scores(logits).float()).to(x.dtype) if scores is None else scores(logits)
    rows = x.repeat(E, 1) if repeat is None else repeat(x)
    rows = (rows * kept.transpose(0, 1).reshape(-1, 1)).view(E, -1, H)
    first = torch.bmm(rows, b.gate_up_t)
    if bias:
        first = first + b.bias[:, None, None]
    gate, up = first.chunk(2, dim=-1)
    rows = torch.bmm(up * F.silu(gate), b.down_t)
    return rows.sum(dim)


# one_hot_loop


def one_hot_packed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Packed weights, mask [E, T, K], index_select and functional index_add."""
    weights, ids = choose(x, logits)
    result = torch.zeros(x.shape, dtype=x.dtype)
    masks = F.one_hot(ids, num_classes=E).permute(2, 0, 1)
    for e in range(E):
        token, choice = torch.where(masks[e])
        gate, up = F.linear(x.index_select(0, token), b.gate_up[e]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, b.down[e]) * weights[token, choice].unsqueeze(-1)
        result = result.index_add(0, token, rows)
    return result


def one_hot_weighted_input(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """No permutation of the mask, the weight on the input, matrices stored [in, out]."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    masks = F.one_hot(ids, E)
    for e in range(E):
        token, choice = masks[..., e].nonzero(as_tuple=True)
        rows = x[token] * weights[token, choice, None]
        rows = (F.silu(rows @ b.gate_t[e]) * torch.mm(rows, b.up_t[e])) @ b.down_t[e]
        result.index_add_(0, token, rows.to(result.dtype))
    return result


def one_hot_bool(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    result = x.new_zeros(x.shape)
    masks = F.one_hot(ids, num_classes=E).movedim(-1, 0).bool()
    for e in reversed(range(E)):
        token, choice = torch.where(masks[e])
        rows = b.experts[e](x[token]) * weights[token, choice][:, None]
        result.index_put_((token,), rows, accumulate=True)
    return result


def _one_hot(
    b: Block,
    x: Tensor,
    logits: Tensor,
    *,
    experts=range(E),
    classes=E,
    swap=False,
    start=None,
    weigh=True,
    order=(2, 1, 0),
):
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x) if start is None else start(x)
    masks = F.one_hot(ids, num_classes=classes).permute(*order)
    for e in experts:
        choice, token = torch.where(masks[e])
        rows = b.experts[e](x[token])
        if weigh:
            rows = rows * (weights[choice, token, None] if swap else weights[token, choice, None])
        result.index_add_(0, token, rows)
    return result


# where_loop


def where_index_add(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e, expert in enumerate(b.experts):
        token, choice = (ids == e).nonzero(as_tuple=True)
        result = result.index_add(0, token, expert(x[token]) * weights[token, choice].view(-1, 1))
    return result


def where_unbound(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Packed weights unbound, nonzero as a matrix, out of order."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    gates, ups, downs = b.gate.unbind(0), b.up.unbind(0), b.down.unbind(0)
    for e in (2, 0, 3, 1):
        token, choice = torch.nonzero(torch.eq(ids, e)).unbind(1)
        rows = x[token]
        rows = F.linear(F.silu(F.linear(rows, gates[e])) * F.linear(rows, ups[e]), downs[e])
        result[token] = result[token] + rows * weights[token, choice, None]
    return result


def where_squared_relu(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """relu squared as a product of two."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e in range(E):
        token, choice = torch.where(ids == e)
        hidden = F.linear(x[token], b.up[e])
        rows = F.linear(F.relu(hidden) * F.relu(hidden), b.down[e])
        result.index_add_(0, token, weights[token, choice, None] * rows)
    return result


def where_plain_relu(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e in range(E):
        token, choice = torch.where(ids == e)
        rows = F.linear(F.relu(F.linear(x[token], b.up[e])), b.down[e])
        result.index_put_((token,), weights[token, choice, None] * rows, accumulate=True)
    return result


def _where(
    b: Block, x: Tensor, logits: Tensor, *, experts=range(E), keep=False, shift=0, compute=None, where_of=None
) -> Tensor:
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e in experts:
        token, choice = torch.where((ids if where_of is None else where_of(ids)) == e)
        read = (token + shift) % x.shape[0] if shift else token
        rows = (b.experts[e] if compute is None else compute(b, e))(x[read])
        rows = weights[token, choice, None] * rows
        if keep:
            result[token] = rows
        else:
            result[token] += rows
    return result


SPELLINGS: dict[str, dict[str, Spelling]] = {
    "grouped_mm": {
        "weighted_at_home": grouped_weighted_at_home,
        "selected": grouped_selected,
        "weighted_first": grouped_weighted_first,
    },
    "batched_mm": {
        "transposed": batched_transposed,
        "einsum": batched_einsum,
        "clamped": batched_clamped,
        "not_gated": batched_not_gated,
        "of_batch": batched_of_batch,
        "added": batched_added,
        "scattered": batched_scattered,
    },
    "gather_einsum": {"bmm_sum": einsum_bmm_sum, "matmul": einsum_matmul, "transposed": einsum_transposed},
    "dense_bmm": {
        "softmax_output": dense_softmax_output,
        "scattered_weights": dense_scattered_weights,
        "broadcast_input": dense_broadcast_input,
        "one_hot": dense_one_hot,
        "sorted": dense_sorted,
    },
    "one_hot_loop": {"packed": one_hot_packed, "weighted_input": one_hot_weighted_input, "bool": one_hot_bool},
    "where_loop": {
        "index_add": where_index_add,
        "unbound": where_unbound,
        "plain_relu": where_plain_relu,
        "squared_relu": where_squared_relu,
    },
}


@dataclass(frozen=True)
class Damaged:
    """A spelling that is none: the finder's step that must fail, and words of its reason."""

    formulation: str
    name: str
    spelling: Spelling
    step: str
    words: str
    dtype: torch.dtype = torch.float32


def _bf16(name: str, spelling: Spelling, step: str, words: str) -> Damaged:
    return Damaged("grouped_mm", name, spelling, step, words, torch.bfloat16)


def _plus_rows(b: Block, e: int) -> Callable[[Tensor], Tensor]:
    one = b.experts[e]
    return lambda x: one.w2(F.silu(one.w1(x)) * one.w3(x)) + x


def _relu_expert(b: Block) -> Callable[[Tensor], Tensor]:
    one = b.experts[0]
    return lambda x: one.w2(F.relu(one.w1(x)) * one.w3(x))


def _einsum_square(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Sums over the dimension that it should make and keeps the other; square matrices, so that shapes do not tell."""
    weights, ids = choose(x, logits)
    rows = x[:, :I]
    gate = torch.einsum("ti,taoi->tai", rows, b.gate[:, :, :I][ids])
    up = torch.einsum("ti,taoi->tao", rows, b.up[:, :, :I][ids])
    rows = torch.einsum("tao,taio->tai", F.silu(gate) * up, b.down[ids])
    return torch.einsum("tai,ta->ti", rows, weights)


DAMAGED: tuple[Damaged, ...] = (
    _bf16("descending", grouped_descending, "sort", "descending"),
    _bf16("another_k", lambda b, x, l: _grouped(b, x, l, k=K + 1), "sort", "perm // 3, but 2 experts a token"),
    _bf16(
        "other_counts",
        lambda b, x, l: _grouped(b, x, l, counted=lambda i: E - 1 - i),
        "count",
        "not of the sorted ids",
    ),
    _bf16("gate_twice", lambda b, x, l: _grouped(b, x, l, twice=True), "activate", "the same half of the matmul"),
    _bf16("not_inverted", lambda b, x, l: _grouped(b, x, l, home=lambda p: p), "gathered_home", "not the inverse"),
    _bf16(
        "other_inverse",
        lambda b, x, l: _grouped(b, x, l, home=lambda p: p.flip(0).argsort()),
        "gathered_home",
        "not the inverse",
    ),
    _bf16("scaled", lambda b, x, l: _grouped(b, x, l, scaled=True), "returned", "mul"),
    Damaged(
        "batched_mm",
        "tiled",
        lambda b, x, l: _batched(b, x, l, repeat=lambda t: t.repeat(K, 1)),
        "dispatch",
        "pair order",
    ),
    Damaged(
        "batched_mm",
        "modulo",
        lambda b, x, l: _batched(b, x, l, repeat=lambda t: t[torch.arange(t.shape[0] * K) % t.shape[0]]),
        "dispatch",
        "remainder",
    ),
    Damaged(
        "batched_mm",
        "other_down",
        lambda b, x, l: _batched(b, x, l, second=lambda f: f.view(-1, K).flip(1).flatten()),
        "activate",
        "other ids",
    ),
    Damaged("batched_mm", "scaled", lambda b, x, l: _batched(b, x, l, scaled=True), "combine_pairs", "mul"),
    Damaged("batched_mm", "bias", lambda b, x, l: _batched(b, x, l, bias=True), "activate", "add"),
    Damaged("batched_mm", "other_sum", lambda b, x, l: _batched(b, x, l, dim=0), "combine_pairs", "[T, k, H]"),
    Damaged(
        "batched_mm",
        "clamped_ids",
        lambda b, x, l: _batched(b, x, l, ids=lambda i: (i + 1).reshape(-1).clamp(0, E - 1)),
        "select",
        "nothing shows",
    ),
    Damaged(
        "batched_mm",
        "clamped_short",
        lambda b, x, l: _batched(b, x, l, ids=lambda i: i.reshape(-1).clamp(0, E - 2)),
        "select",
        "clamped to",
    ),
    Damaged(
        "batched_mm",
        "added_elsewhere",
        lambda b, x, l: batched_added_at(b, x, l, lambda t: t.flip(0)),
        "combine_pairs",
        "does not give the token",
    ),
    Damaged(
        "batched_mm",
        "added_twice_over",
        lambda b, x, l: batched_added_at(b, x, l, lambda t: t, alpha=2),
        "combine_pairs",
        "alpha",
    ),
    Damaged("gather_einsum", "other_letter", lambda b, x, l: _einsum_square(b, x, l), "activate", "does not contract"),
    Damaged(
        "gather_einsum",
        "other_down",
        lambda b, x, l: _einsum(b, x, l, down_ids=lambda i: i.flip(1)),
        "activate",
        "other ids",
    ),
    Damaged(
        "gather_einsum",
        "token_weight",
        lambda b, x, l: _einsum(b, x, l, weigh=lambda r, w: (r * w[:, :1, None]).sum(1)),
        "combine_pairs",
        "one number a row",
    ),
    Damaged(
        "gather_einsum",
        "sum_over_h",
        lambda b, x, l: _einsum(b, x, l, last="tai,ta->ta"),
        "combine_pairs",
        "not over k",
    ),
    Damaged(
        "gather_einsum",
        "maximum",
        lambda b, x, l: _einsum(b, x, l, weigh=lambda r, w: (r * w[..., None]).amax(1)),
        "combine_pairs",
        "amax",
    ),
    Damaged(
        "dense_bmm",
        "fill_zero",
        lambda b, x, l: _dense(b, x, l, scores=lambda l: torch.sigmoid(kept_scores(l, 0.0))),
        "choose",
        "another fill",
    ),
    Damaged(
        "dense_bmm",
        "no_choice",
        lambda b, x, l: _dense(b, x, l, scores=lambda l: torch.sigmoid(l)),
        "choose",
        "no top-k chose",
    ),
    Damaged(
        "dense_bmm",
        "smallest",
        lambda b, x, l: _dense(b, x, l, scores=lambda l: torch.sigmoid(kept_scores(l, largest=False))),
        "choose",
        "smallest",
    ),
    Damaged("dense_bmm", "bias", lambda b, x, l: _dense(b, x, l, bias=True), "activate", "bias"),
    Damaged(
        "none",
        "tokens_first",
        lambda b, x, l: _dense(b, x, l, repeat=lambda t: t.repeat_interleave(E, 0)),
        "anchor",
        "no matmul with expert weights",
    ),
    Damaged("dense_bmm", "sum_over_tokens", lambda b, x, l: _dense(b, x, l, dim=1), "sum_experts", "not over"),
    Damaged(
        "dense_bmm",
        "into_ones",
        lambda b, x, l: _dense(b, x, l, scores=lambda l: kept_scores(l, 1.0)),
        "choose",
        "something else than zeros",
    ),
    Damaged(
        "dense_bmm",
        "encoded_over_experts",
        lambda b, x, l: _dense(b, x, l, scores=lambda l: encoded_scores(x, l).cumsum(1)),
        "choose",
        "nothing shows",
    ),
    Damaged("one_hot_loop", "missing", lambda b, x, l: _one_hot(b, x, l, experts=(0, 1, 3)), "masks", "expert 2 of 4"),
    Damaged(
        "one_hot_loop", "twice", lambda b, x, l: _one_hot(b, x, l, experts=(0, 1, 2, 3, 1)), "masks", "expert 1 picks"
    ),
    Damaged(
        "one_hot_loop",
        "extra_class",
        lambda b, x, l: _one_hot(b, x, torch.cat([l, l[:, :1] + 1], -1), classes=E + 1),
        "masks",
        "expert 4 of 5",
    ),
    Damaged(
        "one_hot_loop",
        "from_x",
        lambda b, x, l: _one_hot(b, x, l, start=lambda t: t.clone()),
        "accumulate",
        "not to zeros",
    ),
    Damaged(
        "one_hot_loop", "not_weighted", lambda b, x, l: _one_hot(b, x, l, weigh=False), "compute", "never weighted"
    ),
    Damaged(
        "one_hot_loop", "weights_swapped", lambda b, x, l: _one_hot(b, x[:K], l[:K], swap=True), "weigh", "not w[t, j]"
    ),
    Damaged(
        "where_loop", "missing", lambda b, x, l: _where(b, x, l, experts=(0, 2, 3)), "comparisons", "expert 1 of 4"
    ),
    Damaged(
        "where_loop", "missing_last", lambda b, x, l: _where(b, x, l, experts=(0, 1, 2)), "comparisons", "expert 3 of 4"
    ),
    Damaged("where_loop", "replaces", lambda b, x, l: _where(b, x, l, keep=True), "accumulate", "replaces rows"),
    Damaged("where_loop", "neighbour", lambda b, x, l: _where(b, x, l, shift=1), "compute", "other tokens"),
    Damaged("where_loop", "residual", lambda b, x, l: _where(b, x, l, compute=_plus_rows), "compute", "added"),
    Damaged(
        "where_loop",
        "mixed",
        lambda b, x, l: _where(b, x, l, compute=lambda b, e: b.experts[e] if e else _relu_expert(b)),
        "compute",
        "differ in activation",
    ),
)
