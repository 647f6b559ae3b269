"""MoE blocks written so that Dynamo cannot make one graph of them: what people's code does, in small.

Each takes x [B, S, H] and returns a tensor of that shape, or that and the router's logits. The router is a top-k of a
softmax, divided by its sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

E, K, H, I = 6, 2, 16, 12


class Mlp(nn.Module):
    """One expert."""

    def __init__(self, hidden: int = H, intermediate: int = I) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, intermediate, bias=False)
        self.w3 = nn.Linear(hidden, intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A router and a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(flat)
        weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(flat.dtype), ids


class HitLoop(Block):
    """Iterates over the experts that were hit; jitter in training; returns the logits too (transformers 4)."""

    jitter = 0.0

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden.shape
        if self.training and self.jitter > 0:
            hidden = hidden * torch.empty_like(hidden).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        hidden = hidden.view(-1, width)
        logits, chosen_weights, chosen = self.route(hidden)
        final = torch.zeros((batch * length, width), dtype=hidden.dtype, device=hidden.device)
        mask = F.one_hot(chosen, num_classes=E).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            expert = self.experts[number]
            place, token = torch.where(mask[number].squeeze(0))
            rows = hidden[None, token].reshape(-1, width)
            rows = expert(rows) * chosen_weights[token, place, None]
            final.index_add_(0, token, rows.to(hidden.dtype))
        return final.reshape(batch, length, width), logits


class RangeSkip(Block):
    """All experts in turn; those without rows are skipped."""

    def forward(self, hidden: Tensor) -> Tensor:
        shape = hidden.shape
        hidden = hidden.reshape(-1, shape[-1])
        _, weights, ids = self.route(hidden)
        out = torch.zeros_like(hidden)
        mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        for number in range(E):
            layer = self.experts[number]
            place, token = torch.where(mask[number])
            if token.shape[0] == 0:
                continue
            out.index_add_(0, token, layer(hidden[token]) * weights[token, place, None])
        return out.reshape(shape)


class NumelBranch(Block):
    """A method of its own for the experts, [E, T, K] masks, sums in the weights' dtype, a shared expert beside."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Mlp()

    def moe(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(hidden, dtype=weights.dtype)
        mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 0, 1)
        for number in range(len(self.experts)):
            expert = self.experts[number]
            tokens, places = torch.where(mask[number])
            if tokens.numel() > 0:
                rows = expert(hidden[tokens]) * weights[tokens, places].unsqueeze(-1)
                final.index_add_(0, tokens, rows)
        return final.type(hidden.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = hidden.shape
        flat = hidden.view(-1, shape[-1])
        _, weights, ids = self.route(flat)
        return self.moe(flat, ids, weights.float()).view(*shape) + self.shared(hidden)


class MoeInfer(Block):
    """Sorted rows and counts in numpy for inference, boolean rows for training (DeepSeek's own code)."""

    def forward(self, hidden: Tensor) -> Tensor:
        same, shape = hidden, hidden.shape
        hidden = hidden.view(-1, shape[-1])
        _, weights, ids = self.route(hidden)
        if not self.training:
            y = self.moe_infer(hidden, ids, weights).view(*shape)
        else:
            flat = ids.view(-1)
            hidden = hidden.repeat_interleave(K, dim=0)
            y = torch.empty_like(hidden)
            for number, expert in enumerate(self.experts):
                y[flat == number] = expert(hidden[flat == number])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
            y = y.to(same.dtype).view(*shape)
        return y

    @torch.no_grad()
    def moe_infer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = ids.new_zeros((ids.shape[0], len(self.experts)))
        counts.scatter_(1, ids, 1)
        counts = counts.sum(dim=0)
        perm = ids.view(-1).argsort()
        rows = x[perm // ids.shape[1]]
        outputs = []
        start = 0
        for number, count in enumerate(counts.cpu().numpy()):
            end = start + int(count)
            if count == 0:
                continue
            outputs.append(self.experts[number](rows[start:end]))
            start = end
        rows = torch.cat(outputs, dim=0) if outputs else rows.new_empty(0)
        home = torch.empty_like(rows)
        home[perm] = rows
        return (home.view(*ids.shape, -1).type(weights.dtype) * weights.unsqueeze(-1)).sum(1).type(home.dtype)


class FlatInfer(Block):
    """The older moe_infer: flat ids and weights, counts by bincount, scatter_reduce."""

    def forward(self, hidden: Tensor) -> Tensor:
        shape = hidden.shape
        flat = hidden.view(-1, shape[-1])
        _, weights, ids = self.route(flat)
        return self.moe_infer(flat, ids.view(-1), weights.view(-1, 1)).view(*shape)

    def moe_infer(self, x: Tensor, flat_ids: Tensor, flat_weights: Tensor) -> Tensor:
        cache = torch.zeros_like(x)
        order = flat_ids.argsort()
        ends = flat_ids.bincount().cpu().numpy().cumsum(0)
        tokens = order // K
        for number, end in enumerate(ends):
            start = 0 if number == 0 else ends[number - 1]
            if start == end:
                continue
            own = tokens[start:end]
            rows = self.experts[number](x[own]).mul(flat_weights[order[start:end]])
            cache.scatter_reduce_(0, own.view(-1, 1).repeat(1, x.shape[-1]), rows, reduce="sum")
        return cache


class PackedExperts(nn.Module):
    """Packed parameters and the loop over the experts that were hit, without any library around it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) * I**-0.5)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(hidden)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=E + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            number = number[0]
            if number == E:
                continue
            place, token = torch.where(mask[number])
            gate, up = F.linear(hidden[token], self.gate_up_proj[number]).chunk(2, dim=-1)
            rows = F.linear(self.act_fn(gate) * up, self.down_proj[number])
            rows = rows * weights[token, place, None]
            final.index_add_(0, token, rows.to(final.dtype))
        return final


class PackedLoop(Block):
    """A block around packed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = PackedExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        _, weights, ids = self.route(flat)
        return self.experts(flat, ids, weights).reshape(hidden.shape)


class BiasedPackedLoop(Block):
    """Packed experts with biases, halves interleaved, in the block itself: no form of ours knows it."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.gate_up = nn.Parameter(torch.randn(E, H, 2 * I) * H**-0.5)
        self.gate_up_bias = nn.Parameter(torch.randn(E, 2 * I))
        self.down = nn.Parameter(torch.randn(E, I, H) * I**-0.5)
        self.down_bias = nn.Parameter(torch.randn(E, H))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        _, weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for number in torch.unique(ids):
            token, place = torch.where(ids == number)
            both = flat[token] @ self.gate_up[number] + self.gate_up_bias[number]
            gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
            rows = (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ self.down[number] + self.down_bias[number]
            out.index_add_(0, token, rows * weights[token, place, None])
        return out.view(hidden.shape)


class FlatExperts(nn.Module):
    """Packed parameters [E * I, H], of which an expert gets its part (dbrx)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(E * I, H) * H**-0.5) for _ in range(3))

    def forward(self, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        return (F.silu(x.matmul(w1.T)) * x.matmul(v1.T)).matmul(w2)


class FlatLoop(Block):
    """dbrx: the loop over the experts that were hit, with a class for none, over views of flat parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = FlatExperts()
        self.num_experts, self.num_experts_per_tok = E, K

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        _, weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        mask = F.one_hot(ids, num_classes=self.num_experts + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            number = number[0]
            place, token = torch.where(mask[number])
            parts = [w.view(-1, I, H)[number] for w in (self.experts.w1, self.experts.v1, self.experts.w2)]
            rows = self.experts(flat[token], *parts) * weights[token, place, None]
            out.index_add_(0, token, rows)
        return out.view(hidden.shape)


BLOCKS = {
    cls.__name__: cls
    for cls in (HitLoop, RangeSkip, NumelBranch, MoeInfer, FlatInfer, PackedLoop, BiasedPackedLoop, FlatLoop)
}
