"""One rank of tests/passes/test_exchanges_on_ranks.py: blocks with exchanges of their own, compiled and in eager.

Every rank makes the experts and the tokens of all ranks from their seeds, so each can compute what the group should.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_compiler.backend import last_reports, moepdl
from moe_compiler.passes.formulations.capacity import weights_in_slots
from moe_compiler.passes.formulations.exchanged_rows import ExchangedExperts
from moe_compiler.passes.formulations.exchanged_slots import ExchangedSlots
from tests.moe_compiler.blocks import assert_accurate
from tests.passes.exchange_models import Checkpointed, E, H, I, InParts, K, Masked, Sorted
from tests.ranks import joined, run_scenarios

# The capacity is given: one group, and blocks that all have no path, would agree on that of the first of them.
EAGER: dict[str, Any] = {"remainder": "eager", "require_match": True, "timeout_s": 60, "capacity": 48}
Dense = Callable[[nn.Module, Tensor, "list[Tensor]"], Tensor]


# What a block is in float64, with the experts of all ranks: weights [T, E] and experts of every token


def chosen_weights(model: nn.Module, x: Tensor, renormalise: bool) -> Tensor:
    """[T, E] in float64, by the ids that the model chooses in its own dtype."""
    ids = torch.topk(torch.softmax(model.router(x.to(model.router.weight.dtype)).float(), -1), K, -1).indices
    scores = torch.softmax(F.linear(x, model.router.weight.double()), -1)
    picked = torch.zeros_like(scores).scatter(1, ids, 1.0) * scores
    return picked / picked.sum(-1, keepdim=True) if renormalise else picked


def swiglu(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.silu(torch.einsum("th,eih->tei", x, gate)) * torch.einsum("th,eih->tei", x, up)
    return torch.einsum("tei,ehi,te->th", hidden, down, weights)


def titan(model: nn.Module, x: Tensor, experts: list[Tensor]) -> Tensor:
    w1, w3, w2 = experts
    return swiglu(x, chosen_weights(model, x, False), w1, w3, w2)


def renormalised(model: nn.Module, x: Tensor, experts: list[Tensor]) -> Tensor:
    gate, up, down = experts
    return swiglu(x, chosen_weights(model, x, True), gate, up, down)


def slotted(model: nn.Module, x: Tensor, experts: list[Tensor]) -> Tensor:
    w1, w2 = experts
    weights = weights_in_slots(F.linear(x, model.w_g.weight.double()), model.top_k).sum(-1)
    return torch.einsum("tei,eih,te->th", F.gelu(torch.einsum("th,ehi->tei", x, w1)), w2, weights)


# Comparison


def stacked(model: nn.Module) -> list[Tensor]:
    """This rank's experts, each role one tensor."""
    if isinstance(model, ExchangedExperts):
        return [model.w1, model.w3, model.w2]
    return [model.c_fc, model.c_proj] if isinstance(model, ExchangedSlots) else list(model.whole())


def of_rank(make: Callable[[], nn.Module], rank: int, skew: bool) -> nn.Module:
    """The block as rank `rank` has it: a router that all have, experts of its own."""
    torch.manual_seed(99)
    router = next(make().children()).weight.detach().clone()
    if skew:  # the last expert is chosen by every token, and those of the first rank by nobody
        router[: E // 2] = -router[E // 2 :].abs() * 4
        router[E - 1] = router[E - 1].abs() * 8
    torch.manual_seed(rank)
    model = make()
    next(model.children()).weight.data.copy_(router)
    return model


def tokens(rank: int, count: int, skew: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + 7 * rank + count)
    x, grad = (torch.randn(count, H, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.abs() if skew else x, grad


def gradients(leaves: list[Tensor], y: Tensor, grad: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros_like(leaf) if made is None else made for leaf, made in zip(leaves, found, strict=True)),
    ]


def exact(models: Sequence[nn.Module], dense: Dense, given: Sequence[tuple[Tensor, Tensor]], rank: int) -> list[Tensor]:
    """y, and the gradients of x, of the router and of this rank's experts, in float64."""
    experts = [torch.cat(parts).detach().double() for parts in zip(*map(stacked, models), strict=True)]
    dtype = stacked(models[0])[0].dtype
    model, own = models[rank], len(stacked(models[rank])[0])
    router = next(model.children()).weight
    total = [torch.zeros_like(part) for part in experts]
    for place, (x, grad) in enumerate(given):
        x = x.to(dtype).double().requires_grad_()
        leaves = [part.requires_grad_() for part in experts]
        y = dense(model, x, leaves)
        made = gradients([x, router, *leaves], y, grad.to(dtype).double())
        if place == rank:
            mine = made[:3]
        total = [a + b for a, b in zip(total, made[3:], strict=True)]
    return [*mine, *(part[rank * own : (rank + 1) * own] for part in total)]


def measured(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    x = x.to(dtype).requires_grad_()
    y = call(x)
    parameters = list(model.parameters())
    y, *found = gradients([x, *parameters], y, grad)
    for parameter, one in zip(parameters, found[1:], strict=True):
        parameter.grad = one
    router = next(model.children()).weight
    experts = [_stack_of_grads(model, role) for role in range(len(stacked(model)))]
    return [y, found[0], router.grad, *experts]


def _stack_of_grads(model: nn.Module, role: int) -> Tensor:
    """The gradients of one role of `stacked`."""
    values = {id(p): p.grad for p in model.parameters()}
    before = [(p, p.data) for p in model.parameters()]
    for parameter, _ in before:
        parameter.data = values[id(parameter)]
    found = stacked(model)[role].detach().clone()
    for parameter, data in before:
        parameter.data = data
    return found


def check(
    make: Callable[[], nn.Module],
    dense: Dense,
    rank: int,
    ranks: int,
    counts: Sequence[int],
    *,
    skew: bool = False,
    oracle: Callable[[], nn.Module] | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    calls: int = 1,
    **options: Any,
) -> str:
    """Compiled against eager on the same processes, and both against float64; oracle: what runs in eager instead."""
    models = [of_rank(make, r, skew) for r in range(ranks)]
    eager = models[rank] if oracle is None else of_rank(oracle, rank, skew)
    settings = {**EAGER, **options}
    compiled = torch.compile(models[rank], backend=moepdl, options=settings, fullgraph=fullgraph, dynamic=dynamic)
    for number in range(calls):
        given = [tokens(r, counts[(r + number) % len(counts)], skew) for r in range(ranks)]
        right = exact(models, dense, given, rank)
        theirs = measured(eager, eager, *given[rank])
        ours = measured(models[rank], compiled, *given[rank])
        for mine, plain, true in zip(ours, theirs, right, strict=True):
            assert_accurate(mine, plain, true)
    report = next(r for r in reversed(last_reports()) if r.matches)
    assert len(report.exchanges) == 1 and not report.misses
    return str(report)


# Scenarios


def functional(rank: int, ranks: int) -> str:
    return check(lambda: ExchangedExperts(E, K, H, I, torch.bfloat16), titan, rank, ranks, (37, 37))


def autograd(rank: int, ranks: int) -> str:
    def make() -> nn.Module:
        return ExchangedExperts(E, K, H, I, torch.bfloat16, spelling="autograd")

    return check(make, titan, rank, ranks, (16, 16))


def in_place(rank: int, ranks: int) -> str:
    """In eager the in-place exchange has no gradient: the functional one is what it is compared with."""
    return check(
        lambda: ExchangedExperts(E, K, H, I, torch.bfloat16, spelling="in place"),
        titan,
        rank,
        ranks,
        (23, 23),
        oracle=lambda: ExchangedExperts(E, K, H, I, torch.bfloat16),
    )


def one_module_an_expert(rank: int, ranks: int) -> str:
    return check(Sorted, renormalised, rank, ranks, (19, 19))


def in_parts(rank: int, ranks: int) -> str:
    return check(InParts, renormalised, rank, ranks, (21, 21))


def skewed(rank: int, ranks: int) -> str:
    """No token is for an expert of the first rank."""
    return check(Sorted, renormalised, rank, ranks, (32, 32), skew=True)


def in_a_checkpoint(rank: int, ranks: int) -> str:
    return check(Checkpointed, renormalised, rank, ranks, (20, 20), oracle=Sorted)


def different_numbers_of_tokens(rank: int, ranks: int) -> str:
    """Each rank has another T, and another one in the next call."""
    return check(Sorted, renormalised, rank, ranks, (40, 7, 18), dynamic=True, calls=3)


def equal_parts(rank: int, ranks: int) -> str:
    return check(lambda: ExchangedSlots(E, K, H, I, torch.float32), slotted, rank, ranks, (24, 24))


def equal_parts_skewed(rank: int, ranks: int) -> str:
    """Most choices of the last expert find no slot."""
    return check(lambda: ExchangedSlots(E, K, H, I, torch.float32), slotted, rank, ranks, (32, 32), skew=True)


def through_inductor(rank: int, ranks: int) -> str:
    check(Sorted, renormalised, rank, ranks, (26, 26), remainder="inductor", timeout_s=120)

    def make() -> nn.Module:
        return ExchangedExperts(E, K, H, I, torch.bfloat16)

    return check(make, titan, rank, ranks, (26, 26), remainder="inductor", timeout_s=120)


def without_the_pass(rank: int, ranks: int) -> list[str]:
    """Weights are gathered in place of the tokens; and without raising the model's own exchange runs."""
    options: dict[str, Any] = {"fullgraph": True, "backend": moepdl}
    notes = []
    for disable in ("shard_experts", "raise_moe", "find_moe"):
        options["options"] = {**EAGER, "disable": [disable], "require_match": False}
        model = of_rank(Sorted, rank, False)
        x = tokens(rank, 20, False)[0].float()
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, **options)(x), model(x), rtol=1e-4, atol=1e-5)
        notes += last_reports()[-1].notes
    return notes


def masked(rank: int, ranks: int) -> list[str]:
    """Every rank has the same tokens: masked ids, local experts, an all_reduce that stays."""
    models = [of_rank(Masked, r, False) for r in range(ranks)]
    x, grad = tokens(0, 29, False)
    given = [(x, grad if r == 0 else torch.zeros_like(grad)) for r in range(ranks)]
    right = exact(models, renormalised, given, 0)[0]
    compiled = torch.compile(models[rank], backend=moepdl, options=EAGER, fullgraph=True)
    with torch.no_grad():
        assert_accurate(compiled(x.float()), models[rank](x.float()), right)
    report = last_reports()[-1]
    assert not report.exchanges
    return [match.formulation for match in report.matches]


SCENARIOS: tuple[Callable[[int, int], Any], ...] = (
    functional, autograd, in_place, one_module_an_expert, in_parts, in_a_checkpoint, skewed,
    different_numbers_of_tokens, equal_parts, equal_parts_skewed, through_inductor, without_the_pass, masked,
)  # fmt: skip


if __name__ == "__main__":
    number, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    joined(number, size, folder)
    wanted = set(sys.argv[4:])
    run_scenarios([s for s in SCENARIOS if not wanted or s.__name__ in wanted], number, size, folder)
