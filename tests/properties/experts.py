"""The experts of a case, in each formulation: x [T, H], weights [T, K], ids [T, K] -> y [T, H].

Every function is one idea (gather weights, sort rows, ...) with the spellings that the case chose for its parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.properties.case import Case
from tests.properties.layouts import ExpertWeights

Formulation = Callable[[Case, ExpertWeights, Tensor, Tensor, Tensor], Tensor]


def fiddle(kind: str, t: Tensor) -> Tensor:
    """Something that changes no value."""
    if kind == "to":
        return t.to(t.dtype)
    if kind == "view":
        return t.reshape(t.shape)
    if kind == "flatten":
        return t.reshape(-1).view(t.shape)
    if kind == "unsqueeze":
        return t.unsqueeze(0).squeeze(0)
    if kind == "contiguous":
        return t.contiguous()
    if kind == "clone":
        return t.clone()
    if kind == "slice":
        return t[:]
    if kind == "widen":
        return t.float().to(t.dtype)
    return t


# The middle


def activation(c: Case, gate: Tensor) -> Tensor:
    if c.act_spelling == "written_out":
        return gate * torch.sigmoid(gate) if c.activation == "silu" else F.relu(gate) * F.relu(gate)
    if c.activation == "silu":
        return F.silu(gate)
    if c.activation == "relu2":
        return torch.square(F.relu(gate))
    if c.activation == "relu":
        return torch.relu(gate)
    return F.gelu(gate, approximate="tanh" if c.activation == "gelu_tanh" else "none")


def halves(c: Case, both: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up of a packed product."""
    if c.gate_order == "interleaved":
        return both[..., ::2], both[..., 1::2]
    if c.split == "split":
        first, second = both.split(c.inter, dim=-1)
    elif c.split == "slice":
        first, second = both[..., : c.inter], both[..., c.inter :]
    elif c.split == "tensor_split":
        first, second = torch.tensor_split(both, 2, dim=-1)
    else:
        first, second = both.chunk(2, dim=-1)
    return (first, second) if c.gate_order == "gate_up" else (second, first)


def join(c: Case, parts: list[Tensor]) -> Tensor:
    """act(gate) * up of the first products."""
    if not c.gated:
        return fiddle(c.fiddle_act, activation(c, parts[0]))
    gate, up = halves(c, parts[0]) if len(parts) == 1 else parts
    if c.activation == "swiglu_clamp":
        gate, up = gate.clamp(max=1.5), up.clamp(min=-1.5, max=1.5)
        return fiddle(c.fiddle_act, (up + 1) * (gate * torch.sigmoid(gate * 1.702)))
    act = activation(c, gate)
    return fiddle(c.fiddle_act, act * up if c.factors == "gate_up" else up * act)


# Pieces


def take(c: Case, x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [T, .] at index [N]."""
    if c.pick == "index_select":
        return torch.index_select(x, 0, index)
    if c.pick == "gather":
        return torch.gather(x, 0, index.long()[:, None].expand(-1, x.shape[1]))
    return x[index]


def zeros(c: Case, like: Tensor, dtype: torch.dtype) -> Tensor:
    if c.zeros == "zeros":
        return torch.zeros(like.shape, dtype=dtype, device=like.device)
    if c.zeros == "new_zeros":
        return like.new_zeros(like.shape, dtype=dtype)
    return torch.zeros_like(like, dtype=dtype)


def add_rows(c: Case, result: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    """result with rows added at token."""
    rows = rows.to(result.dtype)
    if c.combine == "scatter_add":
        return result.scatter_add(0, token.long()[:, None].expand_as(rows), rows)
    if c.combine == "index_put":
        return result.index_put_((token,), rows, accumulate=True)
    if c.combine == "plus_at":
        result[token] += rows
        return result
    return result.index_add(0, token, rows) if c.zeros == "zeros" else result.index_add_(0, token, rows)


def sum_pairs(c: Case, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over k of rows in pair order, [S, H] or [T, K, H]; rows that were weighted before are summed."""
    tokens = weights.shape[0]
    if c.weight_at != "output":
        return rows.view(tokens, c.k, c.hidden).sum(dim=1)
    if c.combine == "einsum":
        weights = weights.to(rows.dtype)
        return torch.einsum("tkh,tk->th", rows.view(tokens, c.k, c.hidden), weights)
    if c.combine == "bmm":
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), rows.view(tokens, c.k, c.hidden)).squeeze(1)
    if rows.dim() == 3:
        return (rows * weights.unsqueeze(-1)).sum(1)
    return (rows * weights.reshape(-1, 1)).view(tokens, c.k, c.hidden).sum(dim=1)


def scaled(rows: Tensor, weight: Tensor) -> Tensor:
    """rows * weight[:, None] in the rows' dtype: in front of a matmul."""
    return rows * weight.unsqueeze(-1).to(rows.dtype)


# Gathered weights


def batched(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    if c.repeat == "interleave":
        rows = x.repeat_interleave(c.k, dim=0)
    elif c.repeat == "expand":
        rows = x.unsqueeze(1).expand(-1, c.k, -1).reshape(-1, c.hidden)
    elif c.repeat == "counting":
        rows = take(c, x, torch.arange(flat.shape[0], device=x.device) // c.k)
    else:
        rows = take(c, x, torch.arange(x.shape[0], device=x.device).repeat_interleave(c.k))
    rows = fiddle(c.fiddle_rows, rows)
    per_pair = weights.reshape(-1)
    if c.weight_at == "input":
        rows = scaled(rows, per_pair)

    def product(rows: Tensor, role: str) -> Tensor:
        stacked = w.stacked(role)
        matrix = stacked.index_select(0, flat) if c.pick == "index_select" else stacked[flat]
        if c.product == "einsum":
            out = torch.einsum("si,sio->so" if w.in_out(role) else "si,soi->so", rows, matrix)
        elif c.product == "row":
            out = torch.bmm(rows.unsqueeze(1), matrix if w.in_out(role) else matrix.mT).squeeze(1)
        else:
            multiply = torch.matmul if c.product == "matmul" else torch.bmm
            out = multiply(matrix.transpose(1, 2) if w.in_out(role) else matrix, rows.unsqueeze(-1)).squeeze(-1)
        bias = w.biases(role)
        return out if bias is None else out + bias[flat]

    act = join(c, [product(rows, role) for role in w.roles[:-1]])
    if c.weight_at == "middle":
        act = scaled(act, per_pair)
    rows = product(act, "down")
    if c.combine not in ("index_add", "scatter_add"):
        return sum_pairs(c, rows, weights)
    token = torch.arange(x.shape[0], device=x.device).repeat_interleave(c.k)
    if c.weight_at == "output":
        rows = rows * per_pair[:, None]
    return add_rows(c, zeros(c, x, rows.dtype), token, rows)


def einsum(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    def product(rows: Tensor, role: str) -> Tensor:
        matrix, per_token = w.stacked(role)[ids], rows.dim() == 2
        if c.product == "einsum":
            equation = ("th" if per_token else "tkh") + (",tkhi->tki" if w.in_out(role) else ",tkih->tki")
            out = torch.einsum(equation, rows, matrix)
        else:
            column = rows[:, None, :, None] if per_token else rows.unsqueeze(-1)
            out = torch.matmul(matrix.mT if w.in_out(role) else matrix, column).squeeze(-1)
        bias = w.biases(role)
        return out if bias is None else out + bias[ids]

    rows = fiddle(c.fiddle_rows, x)
    if c.weight_at == "input":
        rows = scaled(rows.unsqueeze(1).expand(-1, c.k, -1), weights)
    act = join(c, [product(rows, role) for role in w.roles[:-1]])
    if c.weight_at == "middle":
        act = scaled(act, weights)
    return sum_pairs(c, product(act, "down"), weights)


# Sorted rows


def _counts(c: Case, ids: Tensor, ordered: Tensor) -> Tensor:
    if c.counts == "histc":
        return torch.histc(ordered.float(), bins=c.experts, min=0, max=c.experts - 1)
    if c.counts == "one_hot":
        return F.one_hot(ids.reshape(-1).long(), c.experts).sum(0)
    if c.counts == "scatter_add":
        flat = ids.reshape(-1).long()
        return torch.zeros(c.experts, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
    if c.counts == "compare":
        return (ids.reshape(-1, 1) == torch.arange(c.experts)).sum(dim=0)
    return torch.bincount(ids.reshape(-1), minlength=c.experts)


def _order(c: Case, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sorted ids, permutation, token of each sorted row)."""
    flat = ids.reshape(-1)
    if c.sort == "argsort":
        perm = torch.argsort(flat, stable=True)
        ordered = flat[perm]
    elif c.sort == "method":
        ordered, perm = flat.sort(stable=True)
    else:
        ordered, perm = torch.sort(flat)
    if c.token == "div":
        token = torch.div(perm, c.k, rounding_mode="floor")
    elif c.token == "trunc":
        token = perm.div(c.k, rounding_mode="trunc")
    elif c.token == "repeated":
        token = torch.arange(ids.shape[0]).unsqueeze(1).expand(-1, c.k).reshape(-1)[perm]
    else:
        token = perm // c.k
    return ordered, perm, token


def _inverse(c: Case, perm: Tensor) -> Tensor:
    if c.inverse == "written":
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device=perm.device)
        return inverse
    if c.inverse == "scatter":
        return torch.zeros_like(perm).scatter_(0, perm, torch.arange(perm.numel(), device=perm.device))
    return perm.argsort()


def _sorted(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor, product_of: Callable) -> Tensor:
    """Rows sorted by expert; `product_of(counts)` gives product(rows, role) of such rows."""
    ordered, perm, token = _order(c, ids)
    product = product_of(_counts(c, ids, ordered))
    rows = fiddle(c.fiddle_rows, take(c, x, token))
    per_row = weights.reshape(-1)[perm]
    if c.weight_at == "input":
        rows = scaled(rows, per_row)

    def run(rows: Tensor, role: str) -> Tensor:
        out, bias = product(rows, role), w.biases(role) if not w.modular else None
        return out if bias is None else out + bias[ordered]

    act = join(c, [run(rows, role) for role in w.roles[:-1]])
    if c.weight_at == "middle":
        act = scaled(act, per_row)
    rows = run(act, "down")
    if c.combine in ("home_sum", "einsum"):
        rows = take(c, rows, _inverse(c, perm))
        return sum_pairs(c, rows, weights)
    if c.weight_at == "output":
        rows = rows * per_row[:, None]
    if c.combine == "sum":
        return rows[_inverse(c, perm)].view(-1, c.k, c.hidden).sum(1)
    return add_rows(c, zeros(c, x, rows.dtype), token, rows)


def grouped(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    def product_of(counts: Tensor) -> Callable[[Tensor, str], Tensor]:
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)

        def product(rows: Tensor, role: str) -> Tensor:
            matrix = w.stacked(role) if w.in_out(role) else w.stacked(role).transpose(-2, -1)
            if c.matmul == "functional":
                return F.grouped_mm(rows, matrix, offs=offsets)
            if c.matmul == "fallback":
                return torch.ops.transformers.grouped_mm_fallback(rows.to(matrix.dtype), matrix, offs=offsets)
            return torch._grouped_mm(rows, matrix, offs=offsets)

        return product

    return _sorted(c, w, x, weights, ids, product_of)


def split(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A list of row counts on the host, and one linear layer for each expert's slice (Granite, JetMoE)."""

    def product_of(counts: Tensor) -> Callable[[Tensor, str], Tensor]:
        sizes = counts.to(torch.int64).tolist()

        def product(rows: Tensor, role: str) -> Tensor:
            pieces = rows.split(sizes, dim=0)
            return torch.cat([linear(w, piece, role, e) for e, piece in enumerate(pieces)], dim=0)

        return product

    return _sorted(c, w, x, weights, ids, product_of)


def linear(w: ExpertWeights, rows: Tensor, role: str, expert: int) -> Tensor:
    """One expert's layer; a packed bias is added by `_sorted` where rows of all experts are together."""
    matrix, bias, in_out = w.one(role, expert)
    bias = bias if w.modular or w.c.formulation in ("one_hot", "where") else None
    if not in_out:
        return F.linear(rows, matrix, bias)
    out = rows @ matrix
    return out if bias is None else out + bias


# All experts on all tokens


def dense(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """scores [T, E]: zero where an expert was not chosen."""
    if c.weight_at == "input":
        rows = x.unsqueeze(0) * scores.to(x.dtype).t().unsqueeze(-1)
        if c.dense_rows == "repeat":
            rows = (x.repeat(c.experts, 1) * scores.to(x.dtype).t().reshape(-1, 1)).view(c.experts, -1, c.hidden)
    elif c.dense_rows == "repeat":
        rows = x.repeat(c.experts, 1).view(c.experts, -1, c.hidden)
    else:
        rows = x.unsqueeze(0).expand(c.experts, -1, -1)
    rows = fiddle(c.fiddle_rows, rows)

    def product(rows: Tensor, role: str) -> Tensor:
        matrix = w.stacked(role)
        if c.dense_rows == "einsum":
            first = rows if role == "down" or c.weight_at == "input" else x
            equation = ("th" if first.dim() == 2 else "eth") + (",ehi->eti" if w.in_out(role) else ",eih->eti")
            out = torch.einsum(equation, first, matrix)
        else:
            matrix = matrix if w.in_out(role) else matrix.transpose(1, 2)
            out = torch.matmul(rows, matrix) if c.dense_rows == "matmul" else torch.bmm(rows, matrix)
        bias = w.biases(role)
        return out if bias is None else out + bias[:, None, :]

    act = join(c, [product(rows, role) for role in w.roles[:-1]])
    if c.weight_at == "middle":
        act = act * scores.to(act.dtype).t().unsqueeze(-1)
    rows = product(act, "down")
    if c.weight_at != "output":
        return rows.sum(dim=0)
    if c.combine == "einsum":
        return torch.einsum("eth,te->th", rows, scores.to(rows.dtype))
    return (rows * scores.t().unsqueeze(-1)).sum(dim=0)


# Loops


def _loop(
    c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, picks: Callable[[int], tuple[Tensor, Tensor]]
) -> Tensor:
    wide = torch.promote_types(x.dtype, weights.dtype) if c.weight_at == "output" else x.dtype
    result = zeros(c, x, wide)
    for expert in range(c.experts):
        token, choice = picks(expert)
        rows = fiddle(c.fiddle_rows, take(c, x, token))
        if c.weight_at == "input":
            rows = scaled(rows, weights[token, choice])
        act = join(c, [linear(w, rows, role, expert) for role in w.roles[:-1]])
        if c.weight_at == "middle":
            act = scaled(act, weights[token, choice])
        rows = linear(w, act, "down", expert)
        if c.weight_at == "output":
            rows = rows * weights[token, choice, None]
        result = add_rows(c, result, token, rows)
    return result


def _found(c: Case, mask: Tensor) -> tuple[Tensor, Tensor]:
    if c.where == "nonzero_tuple":
        first, second = mask.nonzero(as_tuple=True)
    elif c.where == "nonzero":
        first, second = torch.nonzero(mask).unbind(1)
    else:
        first, second = torch.where(mask)
    return first, second


def one_hot(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    encoded = F.one_hot(ids.long(), num_classes=c.experts)
    masks = encoded.permute(2, 1, 0) if c.mask == "ekt" else encoded.permute(2, 0, 1) if c.mask == "etk" else encoded

    def picks(expert: int) -> tuple[Tensor, Tensor]:
        first, second = _found(c, masks[..., expert] if c.mask == "tke" else masks[expert])
        return (second, first) if c.mask == "ekt" else (first, second)

    return _loop(c, w, x, weights, picks)


def where(c: Case, w: ExpertWeights, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return _loop(c, w, x, weights, lambda expert: _found(c, ids == expert))


FORMULATIONS: dict[str, Formulation] = {
    "batched": batched, "grouped": grouped, "einsum": einsum, "one_hot": one_hot, "where": where, "split": split,
}  # fmt: skip
