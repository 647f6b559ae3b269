"""Blocks of experts on several ranks, as models write them: other spellings than the examples of the formulations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_compiler.passes.formulations.one_hot_loop import Expert

E, K, H, I = 4, 2, 32, 16


class Exchanged(nn.Module):
    """What the spellings share; `local` is how many experts this rank has."""

    def __init__(self, *, experts: int = E, k: int = K, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.group = dist.group.WORLD
        assert self.group is not None
        self.ranks, self.experts, self.k = self.group.size(), experts, k
        self.local = experts // self.ranks
        self.router = nn.Linear(H, experts, bias=False, dtype=dtype)

    def send(self, rows: Tensor, received: Any = None, given: Any = None, group: Any = None) -> Tensor:
        return functional.all_to_all_single(rows, received, given, group or self.group)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(self.router(x), -1, dtype=torch.float32), self.k, -1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids

    def counts(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids.flatten(), self.experts).sum(0)

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and down of this rank's experts, stacked."""
        raise NotImplementedError


class Sorted(Exchanged):
    """Rows sorted by the own expert they are for, one module an expert, weighted sum in pair order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        dtype = self.router.weight.dtype
        self.own = nn.ModuleList(Expert(H, I, dtype) for _ in range(self.local))

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        parts = [[getattr(one, name).weight for one in self.own] for name in ("gate_proj", "up_proj", "down_proj")]
        return tuple(torch.stack(part) for part in parts)  # type: ignore[return-value]

    def compute(self, rows: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([one(part) for one, part in zip(self.own, rows.split(sizes), strict=True)])

    def numbers(self, theirs: Tensor) -> Tensor:
        own = torch.arange(self.local, device=theirs.device).repeat(self.ranks)
        return own.repeat_interleave(theirs.flatten())

    def received(self, theirs: Tensor, counts: Tensor) -> list[int]:
        return theirs.reshape(self.ranks, self.local).sum(-1).tolist()

    def given(self, counts: Tensor) -> list[int]:
        return counts.reshape(self.ranks, self.local).sum(-1).tolist()

    def back(self, rows: Tensor, given: list[int], received: list[int]) -> Tensor:
        return self.send(rows, given, received)

    def counts_from_all(self, counts: Tensor) -> Tensor:
        return self.send(counts, [self.local] * self.ranks, [self.local] * self.ranks)

    def sizes(self, theirs: Tensor) -> list[int]:
        return theirs.reshape(self.ranks, self.local).sum(0).tolist()

    def place(self, theirs: Tensor) -> Tensor:
        return self.numbers(theirs).argsort(stable=True)

    def returned(self, rows: Tensor, place: Tensor) -> Tensor:
        return rows[place.argsort()]

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        _, perm = ids.flatten().sort()
        counts = self.counts(ids)
        theirs = self.counts_from_all(counts)
        given, received = self.given(counts), self.received(theirs, counts)
        got = self.send(x[perm // self.k], received, given)
        place = self.place(theirs)
        done = self.compute(got[place], self.sizes(theirs))
        home = self.back(self.returned(done, place), given, received)
        return (home[perm.argsort()].view(x.shape[0], self.k, H) * weights[..., None]).sum(1)


class Packed(Exchanged):
    """With this rank's experts in two tensors, gate above up."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        dtype = self.router.weight.dtype
        self.gate_up = nn.Parameter(torch.randn(self.local, 2 * I, H, dtype=dtype) * H**-0.5)
        self.down = nn.Parameter(torch.randn(self.local, H, I, dtype=dtype) * I**-0.5)

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = self.gate_up.chunk(2, 1)
        return gate, up, self.down


class InParts(Packed):
    """Rows weighted before they are sent, numbers exchanged by themselves, parts put together expert by expert."""

    def expert(self, number: int, part: Tensor) -> Tensor:
        gate, up = F.linear(part, self.gate_up[number]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[number])

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        perm = ids.view(-1).argsort(stable=True)
        counts = self.counts(ids)
        theirs = self.send(counts.view(self.ranks, self.local))
        numbers = counts.view(self.ranks, self.local).sum(1)
        given, received = numbers.tolist(), self.send(numbers).tolist()
        token = perm // self.k
        rows = x[token] * weights.view(-1)[perm][:, None]
        pieces = self.send(rows, received, given).split(theirs.flatten().tolist())
        order = [rank * self.local + expert for expert in range(self.local) for rank in range(self.ranks)]
        rows = torch.cat([pieces[at] for at in order])
        parts = rows.split(theirs.sum(0).tolist())
        done = torch.cat([self.expert(number, part) for number, part in enumerate(parts)])
        pieces = done.split(theirs.t().flatten().tolist())
        order = [expert * self.ranks + rank for rank in range(self.ranks) for expert in range(self.local)]
        home = self.send(torch.cat([pieces[at] for at in order]), given, received)
        return torch.zeros_like(x).index_add(0, token, home)


class Masked(Packed):
    """transformers' expert parallelism: the ids of other ranks become E / R, results are added up by an all_reduce."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        first = dist.get_rank(self.group) * self.local
        other = (ids < first) | (ids >= first + self.local)
        weights = weights.masked_fill(other, 0.0)
        ids = (ids - first).masked_fill(other, self.local)
        flat = ids.reshape(-1)
        ordered, perm = flat.sort()
        rows = x[perm // self.k]
        # As transformers pairs a loop over its own experts with masked ids: the rest of the rows stays zero.
        result = torch.zeros_like(x)
        encoded = F.one_hot(ids, self.local + 1).permute(2, 1, 0)
        del rows, ordered
        for expert in range(self.local):
            choice, token = torch.where(encoded[expert])
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            done = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, choice, None]
            result.index_add_(0, token, done)
        return functional.all_reduce(result, "sum", self.group)


class Checkpointed(Sorted):
    """The whole block inside of an activation checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]
