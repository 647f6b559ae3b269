"""One rank of tests/runtime_kernels/test_exchange.py: the operators of the exchange, eager, on several processes.

Every rank makes the data of all ranks from their seeds, so each can compute what the whole group should.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl
from moe_compiler.runtime_kernels.exchange.faults import CapacityFault, PeerFault
from moe_compiler.runtime_kernels.exchange.placement import owned
from moe_compiler.runtime_kernels.library import SecondDerivativeError
from tests.moe_compiler.blocks import assert_accurate
from tests.ranks import joined, run_scenarios

E, K, H, I = 10, 3, 16, 12
ops = torch.ops.moepdl


def tokens_of(rank: int) -> int:
    """Another number on each rank, none on the last but one."""
    return [9, 17, 0, 5, 1, 12, 30, 2][rank]


def data(rank: int, tokens: int, ids: Tensor | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    if ids is None:
        ids = torch.rand(tokens, E, generator=generator).topk(K, dim=1).indices if tokens else torch.empty(0, K).long()
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.1, E, ids)  # some choices are dropped
    return {
        "x": torch.randn(tokens, H, generator=generator, dtype=torch.float64).to(dtype),
        "ids": ids,
        "weights": torch.rand(tokens, K, generator=generator, dtype=torch.float64).to(dtype),
        "grad": torch.randn(tokens, H, generator=generator, dtype=torch.float64).to(dtype),
    }


def weights_of(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H)]
    return [0.3 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def experts(x: Tensor, ids: Tensor, scores: Tensor, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    gate, down, gate_bias, down_bias = parts
    return ops.experts(x, ids, scores, [gate], [], [down], [gate_bias], [], [down_bias], "silu", True, "output", dtype)


def alone(given: list[dict[str, Tensor]], dtype: torch.dtype) -> list[list[Tensor]]:
    """For each rank y, grad_x, grad_weights; and last the gradients of the experts, by the sum of all ranks' losses."""
    whole = [part.to(dtype).requires_grad_() for part in weights_of(torch.float32)]
    results, totals = [], [torch.zeros_like(part) for part in whole]
    for one in given:
        x, scores = (one[name].detach().to(dtype).requires_grad_() for name in ("x", "weights"))
        y = experts(x, one["ids"], scores, whole, dtype)
        grads = torch.autograd.grad(y, [x, scores, *whole], one["grad"].to(dtype))
        results.append([y.detach(), grads[0], grads[1]])
        totals = [total + grad for total, grad in zip(totals, grads[2:], strict=True)]
    return [*results, totals]


def spread(one: dict[str, Tensor], rank: int, ranks: int, placement: str, capacity: int) -> list[Tensor]:
    """y, grad_x, grad_weights and the gradients of this rank's experts, through the operators."""
    own = list(owned(E, ranks, rank, placement))
    local = [part[own].requires_grad_() for part in weights_of(one["x"].dtype)]
    x, scores = one["x"].clone().requires_grad_(), one["weights"].clone().requires_grad_()
    group = dist.group.WORLD.group_name
    rows, row_ids, row_scores, slots = ops.ep_dispatch(x, one["ids"], scores, group, E, placement, capacity)
    assert rows.shape == (ranks * capacity, H) and slots.shape == (len(x), ranks) and slots.dtype == torch.int32
    assert row_ids.dtype == torch.int64 and int(row_ids.min()) >= 0 and int(row_ids.max()) <= len(own)
    assert not row_scores[row_ids == len(own)].any()
    out = experts(rows, row_ids, row_scores, local, x.dtype)
    y = ops.ep_combine(out, slots, group, capacity, x.dtype, "a layer")
    grads = torch.autograd.grad(y, [x, scores, *local], one["grad"])
    return [y.detach(), *grads]


def check(given: list[dict[str, Tensor]], rank: int, ranks: int, placement: str, capacity: int) -> None:
    ours = spread(given[rank], rank, ranks, placement, capacity)
    dtype = given[rank]["x"].dtype
    *eager, eager_totals = alone(given, dtype)
    *exact, exact_totals = alone(given, torch.float64)
    own = list(owned(E, ranks, rank, placement))
    plain = [*eager[rank], *(total[own] for total in eager_totals)]
    right = [*exact[rank], *(total[own] for total in exact_totals)]
    for mine, theirs, true in zip(ours, plain, right, strict=True):
        assert_accurate(mine, theirs, true)


def contiguous(rank: int, ranks: int) -> None:
    check([data(r, tokens_of(r)) for r in range(ranks)], rank, ranks, "contiguous", 32)


def round_robin(rank: int, ranks: int) -> None:
    check([data(r, tokens_of(r)) for r in range(ranks)], rank, ranks, "round_robin", 30)


def bfloat16(rank: int, ranks: int) -> None:
    check([data(r, tokens_of(r), dtype=torch.bfloat16) for r in range(ranks)], rank, ranks, "contiguous", 32)


def all_tokens_to_one_rank(rank: int, ranks: int) -> None:
    """Every rank's slots for one owner are full: capacity is the number of tokens."""
    last = list(owned(E, ranks, ranks - 1, "contiguous"))
    ids = torch.tensor(last[:K] if len(last) >= K else (last * K)[:K]).expand(8, K).contiguous()
    check([data(r, 8, ids) for r in range(ranks)], rank, ranks, "contiguous", 8)


def no_tokens_at_all(rank: int, ranks: int) -> None:
    check([data(r, 0) for r in range(ranks)], rank, ranks, "contiguous", 16)


def no_expert_is_chosen(rank: int, ranks: int) -> None:
    ids = torch.full((5, K), E)
    ids[0, 0] = -1
    check([data(r, 5, ids) for r in range(ranks)], rank, ranks, "contiguous", 16)


def repeated_bit_for_bit(rank: int, ranks: int) -> None:
    one = data(rank, 25)
    first, second = (spread(one, rank, ranks, "contiguous", 32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def a_gradient_is_made_only_where_it_is_wanted(rank: int, ranks: int) -> None:
    one = data(rank, 4)
    group = dist.group.WORLD.group_name
    rows, _, scores, _ = ops.ep_dispatch(
        one["x"], one["ids"], one["weights"].requires_grad_(), group, E, "contiguous", 16
    )
    assert scores.requires_grad and not rows.requires_grad
    (grad,) = torch.autograd.grad(scores.sum(), one["weights"], create_graph=True)
    assert torch.equal(grad.detach(), (one["ids"] < E).float())
    with torch.no_grad():
        assert not ops.ep_dispatch(**{k: one[k] for k in ("x", "ids", "weights")}, group=group, experts=E,
                                   placement="contiguous", capacity=16)[2].requires_grad  # fmt: skip


def no_second_derivative(rank: int, ranks: int) -> None:
    one = data(rank, 4)
    x = one["x"].requires_grad_()
    group = dist.group.WORLD.group_name
    rows, *_, slots = ops.ep_dispatch(x, one["ids"], one["weights"], group, E, "contiguous", 16)
    y = ops.ep_combine(rows * rows, slots, group, 16, torch.float32)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError, match="ep_dispatch"):
        grad.sum().backward()


def gathered(rank: int, ranks: int) -> None:
    whole = weights_of(torch.float32)[0]
    group = dist.group.WORLD.group_name
    for placement in ("contiguous", "round_robin"):
        own = list(owned(E, ranks, rank, placement))
        local = whole[own].requires_grad_()
        found = ops.gather_experts(local, group, E, placement, "w1")
        assert torch.equal(found, whole)
        scale = torch.arange(1.0, E + 1).view(E, 1, 1) * (rank + 1)
        (grad,) = torch.autograd.grad((found * scale).sum(), local)
        total = sum(range(1, ranks + 1))
        torch.testing.assert_close(grad, (torch.arange(1.0, E + 1) * total)[own].view(-1, 1, 1).expand_as(local))
    for expert in range(ranks):
        mine = expert == rank
        local = (whole[expert] if mine else whole[:0, 0]).clone().requires_grad_()
        found = ops.gather_expert(local, group, expert, list(whole[expert].shape), "w1")
        assert torch.equal(found, whole[expert])
        (grad,) = torch.autograd.grad(found.sum() * (rank + 1), local)
        assert grad.shape == local.shape and (not mine or bool((grad == sum(range(1, ranks + 1))).all()))


def ranks_that_read_different_experts_are_told(rank: int, ranks: int) -> Any:
    """Both of one owner and one shape: the bytes of one would pass for the other."""
    group = dist.new_group(list(range(ranks)))
    whole = weights_of(torch.float32)[0][0]
    mine = whole if rank == 0 else whole[:0]
    name = "experts.1.weight" if rank == 1 else "experts.0.weight"
    with pytest.raises(PeerFault) as caught:
        ops.gather_expert(mine, group.group_name, 0, list(whole.shape), name)
    assert "gather of experts.0.weight" in str(caught.value) and "gather of experts.1.weight" in str(caught.value)
    return str(caught.value)


def too_many_tokens_are_told_on_every_rank(rank: int, ranks: int) -> Any:
    """The rank that has them says how many; the others do not wait for it but read why it cannot take part."""
    group = dist.new_group(list(range(ranks)))
    one = data(rank, 40 if rank == 1 else 3)
    with pytest.raises(CapacityFault if rank == 1 else PeerFault) as caught:
        ops.ep_dispatch(one["x"], one["ids"], one["weights"], group.group_name, E, "contiguous", 16, "layer 3", 20.0)
    text = str(caught.value)
    assert "40 tokens" in text and "layer 3" in text
    assert rank == 1 or (caught.value.ranks == (1,) and caught.value.phase == "dispatch")
    with pytest.raises(PeerFault, match="not used any more"):
        ops.ep_dispatch(one["x"], one["ids"], one["weights"], group.group_name, E, "contiguous", 64)
    return text


def different_exchanges_are_told_at_once(rank: int, ranks: int) -> Any:
    """One rank is in a combine while the others are in a dispatch; the sizes differ too."""
    group = dist.new_group(list(range(ranks)))
    one = data(rank, 4)
    if rank == 0:
        out, slots = torch.zeros(16 * ranks, H), torch.zeros(4, ranks, dtype=torch.int32)
        call, args = ops.ep_combine, (out, slots, group.group_name, 16, torch.float32, "layer 1", 20.0)
    else:
        tokens = (one["x"], one["ids"], one["weights"])
        call, args = ops.ep_dispatch, (*tokens, group.group_name, E, "contiguous", 16, "layer 2", 20.0)
    with pytest.raises(PeerFault) as caught:
        call(*args)
    text = str(caught.value)
    assert "dispatch of layer 2" in text and "combine of layer 1" in text
    assert (rank == 0) != (caught.value.ranks == (0,))
    return text


def a_late_rank_is_named_within_the_timeout(rank: int, ranks: int) -> Any:

    group = dist.new_group(list(range(ranks)))
    one = data(rank, 4)
    if rank == 1:
        time.sleep(5)
        return ""
    begun = time.monotonic()
    with pytest.raises(PeerFault) as caught:
        ops.ep_dispatch(one["x"], one["ids"], one["weights"], group.group_name, E, "contiguous", 16, "layer 5", 2.0)
    assert time.monotonic() - begun < 2.5
    assert (caught.value.ranks, caught.value.rank, caught.value.layer, caught.value.phase) == (
        (1,),
        1,
        "layer 5",
        "dispatch",
    )
    assert caught.value.epoch == 1
    return str(caught.value)


def a_dead_rank_is_named_within_the_timeout(rank: int, ranks: int) -> Any:

    one = data(rank, 4)
    group = dist.group.WORLD.group_name
    ops.ep_dispatch(one["x"], one["ids"], one["weights"], group, E, "contiguous", 16, "layer 6", 30.0)
    if rank == 1:
        os._exit(1)
    begun = time.monotonic()
    with pytest.raises(PeerFault) as caught:
        ops.ep_dispatch(one["x"], one["ids"], one["weights"], group, E, "contiguous", 16, "layer 6", 5.0)
    assert time.monotonic() - begun < 5.5
    assert 1 in caught.value.ranks and caught.value.layer == "layer 6"
    return str(caught.value)


SCENARIOS = (
    contiguous,
    round_robin,
    bfloat16,
    all_tokens_to_one_rank,
    no_tokens_at_all,
    no_expert_is_chosen,
    repeated_bit_for_bit,
    a_gradient_is_made_only_where_it_is_wanted,
    no_second_derivative,
    gathered,
    ranks_that_read_different_experts_are_told,
    too_many_tokens_are_told_on_every_rank,
    different_exchanges_are_told_at_once,
    a_late_rank_is_named_within_the_timeout,
    a_dead_rank_is_named_within_the_timeout,  # last: rank 1 does not live on
)

if __name__ == "__main__":
    folder = Path(sys.argv[3])
    joined(int(sys.argv[1]), int(sys.argv[2]), folder)
    run_scenarios(SCENARIOS, int(sys.argv[1]), int(sys.argv[2]), folder)
