"""One rank of tests/moe_compiler/test_expert_parallel.py: sharded models, compiled and in eager, on several processes.

Every rank makes the data of all ranks from their seeds, so each can compute what the whole group should.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moe_compiler
from examples.train_char_moe import HIDDEN, MoE
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.errors import CapacityError, PeerError, PlanMismatchError, PrepareError
from tests.moe_compiler.blocks import assert_accurate, float64_block, float64_gpt_oss, gpt_oss_block, qwen3_block
from tests.ranks import joined, run_scenarios

EAGER: dict[str, Any] = {"remainder": "eager", "require_match": True, "timeout_s": 60}
Make = Callable[[], nn.Module]


def mesh(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,))


def inputs(rank: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + 7 * rank + tokens)
    x, grad = (torch.randn(1, tokens, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(dtype), grad


def gradients(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    """y, the gradient of x and those of every parameter; what is empty on this rank may have none."""
    x = x.clone().requires_grad_()
    y = call(x)
    sources = [x, *module.parameters()]
    found = torch.autograd.grad(y, sources, grad.to(y.dtype), allow_unused=True)
    assert all(made is not None or not source.numel() for source, made in zip(sources, found, strict=True))
    return [y.detach(), *(source if made is None else made for source, made in zip(sources, found, strict=True))]


def wanted(
    module: nn.Module, call: Callable[[Tensor], Tensor], given: Sequence[tuple[Tensor, Tensor]], rank: int
) -> dict[str, Tensor]:
    """On one process: this rank's y and x.grad, the router's gradient from it, the experts' from all ranks."""
    every = [gradients(module, call, x, grad) for x, grad in given]
    found = {"y": every[rank][0], "x": every[rank][1]}
    for place, (name, _) in enumerate(module.named_parameters(), start=2):
        shared = "experts" in name
        found[name] = sum(one[place] for one in every) if shared else every[rank][place]  # type: ignore[assignment]
    return found


def share(name: str, whole: Tensor, sharded: nn.Module, done: list[moe_compiler.Sharded]) -> Tensor:
    """What this rank has of a whole parameter or its gradient."""
    (one,) = done
    if name not in one.parameters:
        return whole
    if one.kind == "packed":
        return whole[list(one.own)]
    return whole if int(name.removeprefix(f"{one.path}.").split(".")[0]) in one.own else whole[:0]


def check(
    make: Make,
    exact: Callable[[nn.Module, Tensor], Tensor],
    rank: int,
    ranks: int,
    tokens: Sequence[int],
    width: int,
    compiled: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    placement: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    calls: int = 1,
) -> None:
    """Sharded and compiled against the whole block on one process, y and all gradients, by the accuracy rule."""
    whole, sharded = make(), make()
    done = moe_compiler.expert_parallel(sharded, mesh(ranks), placement=placement)
    call = compiled(sharded)
    for number in range(calls):
        given = [inputs(r, tokens[(r + number) % len(tokens)], width, dtype) for r in range(ranks)]
        ours = gradients(sharded, call, *given[rank])
        names = ["y", "x", *(name for name, _ in sharded.named_parameters())]
        eager = wanted(whole, whole, given, rank)
        true = wanted(whole, lambda x: exact(whole, x), given, rank)
        for name, mine in zip(names, ours, strict=True):
            theirs, right = (share(name, found[name], sharded, done) for found in (eager, true))
            assert_accurate(mine, theirs, right)
        with torch.no_grad():
            assert_accurate(call(given[rank][0]), eager["y"], true["y"])


def error_of(kind: type[Exception], call: Callable[..., Any], *given: Any) -> Any:
    """The error of `kind` that a call raises; Dynamo wraps what a backend raises."""
    with torch.no_grad(), pytest.raises(Exception) as caught:  # noqa: PT011
        call(*given)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, kind), error
    return error


def newest() -> moe_compiler.Report:
    return last_reports()[-1]


def with_backend(**options: Any) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    return lambda module: torch.compile(module, backend=moepdl, options={**EAGER, **options}, fullgraph=True)


def char_moe() -> nn.Module:
    """The example's block: a list of experts, run by a loop over all of them."""
    torch.manual_seed(0)
    return MoE()


def float64_char_moe(block: nn.Module, x: Tensor) -> Tensor:
    flat = x.reshape(-1, HIDDEN)
    ids = torch.topk(block.router(flat).softmax(-1), 2, dim=-1).indices
    wide = flat.double()
    scores = torch.nn.functional.linear(wide, block.router.weight.double()).softmax(-1)
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(wide)
    for e, expert in enumerate(block.experts):
        gate, up, down = (part.weight.double() for part in (expert.gate, expert.up, expert.down))
        out = (torch.nn.functional.silu(wide @ gate.t()) * (wide @ up.t())) @ down.t()
        y = y + out * (weights * (ids == e)).sum(-1, keepdim=True)
    return y.reshape(x.shape)


class Shared(nn.Module):
    """Packed experts beside a shared one, which an exchange may overlap with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = qwen3_block()
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    def float64(self, x: Tensor) -> Tensor:
        gate, up, down = (part.weight.double() for part in (self.gate, self.up, self.down))
        wide = x.double()
        return float64_block(self.mlp, x) + (torch.nn.functional.silu(wide @ gate.t()) * (wide @ up.t())) @ down.t()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = qwen3_block()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.mlp, x, use_reentrant=False)


def overlapped(rank: int, ranks: int) -> Any:
    """What is moved between a start and its wait, and what is cut in chunks, computes the same."""
    check(Shared, Shared.float64, rank, ranks, (33, 18), 32, with_backend(overlap="on"))
    report = next(r for r in reversed(last_reports()) if any(o.direction == "backward" for o in r.overlaps))
    return str(report)


def in_chunks(rank: int, ranks: int) -> Any:
    """Three chunks of another number of tokens on each rank; of two tokens the last chunk has none."""
    compiled = with_backend(overlap="on", chunks=3, verify="numeric")
    check(Shared, Shared.float64, rank, ranks, (33, 2), 32, compiled)
    text = str(newest())
    torch._dynamo.reset()

    def dynamic(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return torch.compile(module, backend=moepdl, options={**EAGER, "chunks": 2}, dynamic=True)

    check(Shared, Shared.float64, rank, ranks, (20, 31, 4), 32, dynamic, calls=3)
    torch._dynamo.reset()
    half = qwen3_block(torch.bfloat16)
    moe_compiler.expert_parallel(half, mesh(ranks))
    with_backend(chunks=2)(half)(inputs(rank, 8, 32, torch.bfloat16)[0])
    assert any("not cut in chunks" in note for note in newest().notes)
    return text


def checkpointed(rank: int, ranks: int) -> None:
    """The tokens do not travel a second time for the backward."""

    def exact(block: nn.Module, x: Tensor) -> Tensor:
        return float64_block(block.mlp, x)

    from moe_compiler.runtime_kernels.exchange.groups import group

    known = group(dist.group.WORLD.group_name)
    check(Checkpointed, exact, rank, ranks, (24, 11), 32, with_backend())
    before = known.epoch
    sharded = Checkpointed()
    moe_compiler.expert_parallel(sharded, mesh(ranks))
    call = with_backend()(sharded)
    call(inputs(rank, 24, 32)[0].requires_grad_()).sum().backward()
    # Out and back, and in the backward the gradients out and back, and those of the routing weights.
    assert known.epoch - before == 5


def packed_static(rank: int, ranks: int) -> Any:
    check(qwen3_block, float64_block, rank, ranks, (37, 12), 32, with_backend())
    report = next(r for r in last_reports() if r.exchanges)
    (exchange,) = report.exchanges
    assert exchange.capacity == 48 and exchange.ranks == ranks and exchange.experts == 8
    assert exchange.transport == "torch.distributed (gloo)"
    assert f"agreed by {ranks} ranks, the largest has 37 tokens" in str(report)
    return str(report)


def packed_bfloat16_round_robin(rank: int, ranks: int) -> None:
    def make() -> nn.Module:
        return qwen3_block(torch.bfloat16)

    check(make, float64_block, rank, ranks, (64, 50), 32, with_backend(), "round_robin", torch.bfloat16)


def biases_and_packed_in_turns(rank: int, ranks: int) -> None:
    """gpt-oss: views of the gathered weights and biases have to be made of the local ones."""

    def make() -> nn.Module:
        return gpt_oss_block(torch.float32, "grouped_mm")

    check(make, float64_gpt_oss, rank, ranks, (21, 40), 32, with_backend())


def one_module_an_expert(rank: int, ranks: int) -> Any:
    check(char_moe, float64_char_moe, rank, ranks, (19, 30), HIDDEN, with_backend())
    report = newest()
    assert report.exchanges and report.matches and not report.notes, report.notes
    return [str(report)]


def in_eager(rank: int, ranks: int) -> None:
    """The model's own code, with gathered weights."""
    check(qwen3_block, float64_block, rank, ranks, (9, 12), 32, lambda module: module)
    check(char_moe, float64_char_moe, rank, ranks, (9, 12), HIDDEN, lambda module: module)


def without_the_pass(rank: int, ranks: int) -> Any:
    check(qwen3_block, float64_block, rank, ranks, (16, 16), 32, with_backend(disable=["shard_experts"]))
    assert not newest().exchanges
    compiled = with_backend(disable=["find_moe"], require_match=False)
    check(qwen3_block, float64_block, rank, ranks, (16, 16), 32, compiled)
    return newest().notes


def through_inductor(rank: int, ranks: int) -> Any:
    """Static sizes, then a symbolic number of tokens, another on each rank and in each call."""

    def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return torch.compile(module, backend=moepdl, options={"require_match": True, "timeout_s": 120}, dynamic=True)

    check(qwen3_block, float64_block, rank, ranks, (40, 23, 3), 32, compiled, calls=3)
    return str(newest())


def sizes_that_change(rank: int, ranks: int) -> Any:
    """Without dynamic=True: the second size compiles anew, with a symbolic number of tokens; nobody is asked."""
    sharded, whole = qwen3_block(), qwen3_block()
    moe_compiler.expert_parallel(sharded, mesh(ranks))
    call = torch.compile(sharded, backend=moepdl, options=EAGER)
    known = len(last_reports())
    for tokens in (33, 20, 0, 48, 1):
        x = inputs(rank, tokens if rank else 30, 32)[0]
        with torch.no_grad():
            torch.testing.assert_close(call(x), whole(x), rtol=1e-4, atol=1e-5)
    # Rank 0 compiles once, the others also for the sizes that come later.
    capacities = {exchange.capacity for report in last_reports()[known:] for exchange in report.exchanges}
    assert len(capacities) == 1
    return len(last_reports()) - known


def too_many_tokens_at_compile_time(rank: int, ranks: int) -> Any:
    sharded = qwen3_block()
    moe_compiler.expert_parallel(sharded, dist.new_group(list(range(ranks))))
    call = torch.compile(sharded, backend=moepdl, options=EAGER, dynamic=False)
    with torch.no_grad():
        call(inputs(rank, 16, 32)[0])
    error = error_of(CapacityError, call, inputs(rank, 40, 32)[0])
    assert (error.tokens, error.capacity) == (40, 16)
    assert 'options={"capacity": 48}' in str(error)
    torch._dynamo.reset()
    roomy = torch.compile(sharded, backend=moepdl, options={**EAGER, "capacity": 40}, dynamic=False)
    with torch.no_grad():
        assert roomy(inputs(rank, 16, 32)[0]).shape == (1, 16, 32)
        assert roomy(inputs(rank, 40, 32)[0]).shape == (1, 40, 32)
    assert newest().exchanges[0].agreed == 'given by options["capacity"]'
    return str(error)


def too_many_tokens_in_a_call(rank: int, ranks: int) -> Any:
    """The number of tokens is symbolic: the operator checks it, on every rank an error comes at once."""
    sharded = qwen3_block()
    moe_compiler.expert_parallel(sharded, dist.new_group(list(range(ranks))))
    call = torch.compile(sharded, backend=moepdl, options=EAGER, dynamic=True)
    begun = time.monotonic()
    with torch.no_grad():
        call(inputs(rank, 16, 32)[0])
    error = error_of(CapacityError if rank == 0 else PeerError, call, inputs(rank, 17 if rank == 0 else 5, 32)[0])
    assert time.monotonic() - begun < 50
    return str(error)


def ranks_that_disagree(rank: int, ranks: int) -> Any:
    sharded = qwen3_block()
    moe_compiler.expert_parallel(sharded, dist.new_group(list(range(ranks))))
    capacity = 64 if rank == ranks - 1 else 32
    call = torch.compile(sharded, backend=moepdl, options={**EAGER, "capacity": capacity})
    error = error_of(PlanMismatchError, call, inputs(rank, 16, 32)[0])
    assert (error.field, error.rank) == ("capacity", ranks - 1)
    assert error.values == ("32",) * (ranks - 1) + ("64",)
    return str(error)


def a_rank_that_does_not_compile(rank: int, ranks: int) -> Any:
    sharded = qwen3_block()
    moe_compiler.expert_parallel(sharded, dist.new_group(list(range(ranks))))
    call = torch.compile(sharded, backend=moepdl, options={**EAGER, "timeout_s": 2})
    if rank == 0:
        time.sleep(4)
        return ""
    error = error_of(PeerError, call, inputs(rank, 16, 32)[0])
    assert (error.ranks, error.phase) == ((0,), "compile")
    return str(error)


def states(rank: int, ranks: int) -> None:
    for make in (qwen3_block, char_moe):
        whole, sharded, other = make(), make(), make()
        done = moe_compiler.expert_parallel(sharded, mesh(ranks), placement="round_robin")
        own, before = sharded.state_dict(), whole.state_dict()
        assert list(own) == list(before)
        for name, value in own.items():
            assert torch.equal(value, share(name, before[name], sharded, done))
        with torch.no_grad():
            for value in (*sharded.parameters(), *other.parameters()):
                value.zero_()
        sharded.load_state_dict(before)  # whole tensors
        for name, value in moe_compiler.full_state_dict(sharded).items():
            assert torch.equal(value, before[name])
        sharded.load_state_dict(own)  # this rank's own
        sharded.load_state_dict(before, assign=True)
        assert all(torch.equal(value, own[name]) for name, value in sharded.state_dict().items())
        other.load_state_dict(moe_compiler.full_state_dict(sharded))
        x = inputs(rank, 8, 32 if make is qwen3_block else HIDDEN)[0]
        assert torch.equal(other(x), whole(x))


def refusals(rank: int, ranks: int) -> list[str]:
    texts = []

    def refused(model: nn.Module, *given: Any, **more: Any) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PrepareError) as caught:
            moe_compiler.expert_parallel(model, *(given or (mesh(ranks),)), **more)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        texts.append(str(caught.value))

    refused(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    refused(qwen3_block(), modules=["expert"])
    refused(qwen3_block(), placement="nearest")
    refused(qwen3_block(), "ep")
    refused(qwen3_block(), init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "dp")))
    twice = qwen3_block()
    moe_compiler.expert_parallel(twice, mesh(ranks))
    refused(twice)
    quantised = qwen3_block()
    for name, value in list(quantised.experts.named_parameters()):
        setattr(quantised.experts, name, nn.Parameter(value.to(torch.int8), requires_grad=False))
    refused(quantised)
    tied = char_moe()
    tied.head = nn.Linear(1, 1, bias=False)
    tied.head.weight = tied.experts[1].up.weight
    refused(tied)
    return texts


def a_rank_that_dies_before_its_backward(rank: int, ranks: int) -> Any:
    """The survivors' error comes out of autograd, within the timeout, and every later call raises too."""
    sharded = qwen3_block()
    moe_compiler.expert_parallel(sharded, mesh(ranks))
    call = torch.compile(sharded, backend=moepdl, options={**EAGER, "timeout_s": 30})
    x = inputs(rank, 16, 32)[0].requires_grad_()
    call(x).sum().backward()  # compiled on every rank
    call = torch.compile(sharded, backend=moepdl, options={**EAGER, "timeout_s": 5})
    y = call(x).sum()
    if rank == 1:
        os._exit(1)
    begun = time.monotonic()
    with pytest.raises(PeerError) as caught:
        y.backward()
    assert time.monotonic() - begun < 12  # the backward is compiled first
    assert 1 in caught.value.ranks and caught.value.phase == "backward of combine"
    assert error_of(PeerError, call, x).ranks == ()
    return str(caught.value)


SCENARIOS = (
    packed_static,
    overlapped,
    in_chunks,
    checkpointed,
    packed_bfloat16_round_robin,
    biases_and_packed_in_turns,
    one_module_an_expert,
    in_eager,
    without_the_pass,
    sizes_that_change,
    through_inductor,
    states,
    refusals,
    too_many_tokens_at_compile_time,
    too_many_tokens_in_a_call,
    ranks_that_disagree,
    a_rank_that_does_not_compile,
    a_rank_that_dies_before_its_backward,  # last: rank 1 does not live on
)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    me, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    joined(me, count, folder, 120)
    chosen = [scenario for scenario in SCENARIOS if not sys.argv[4:] or scenario.__name__ in sys.argv[4:]]
    run_scenarios(chosen, me, count, folder)
