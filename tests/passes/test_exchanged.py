"""Exchanges that a model wrote around its experts: found once, replaced whole, or missed at a step that says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.nn import functional as F

from moe_compiler.capture import capture
from moe_compiler.collective_order import changed_order, collectives
from moe_compiler.graph_pass import insert
from moe_compiler.moe_ir import op_name
from moe_compiler.numeric import copy_graph
from moe_compiler.passes.formulations.collectives import is_collective
from moe_compiler.passes.formulations.exchanged_rows import ExchangedExperts
from moe_compiler.passes.formulations.exchanged_slots import ExchangedSlots
from moe_compiler.passes.formulations.grouped_mm import GroupedExperts
from moe_compiler.passes.formulations.registry import EXCHANGES, exchange_names
from moe_compiler.testing import assert_same_graph, exchange_examples, run_passes
from tests.passes.exchange_models import E, Exchanged, H, I, InParts, K, Masked, Sorted
from tests.passes.ranks_in_threads import run_ranks
from tests.passes.test_damage import damages

FIND = ("canonicalize", "find_moe", "raise_moe")
ALL = (*FIND, "shard_experts")
BF16 = torch.bfloat16
RANKS = 2


def long(*keys: Any) -> list[Any]:
    """Parameters of a test that is run only at length."""
    return [pytest.param(key, marks=pytest.mark.slow, id=getattr(key, "__name__", str(key))) for key in keys]


STEPS = {f.name: {step.__name__ for step in f.steps} | {"finish", "closed"} for f in EXCHANGES}


@pytest.fixture(autouse=True)
def group() -> Iterator[Any]:
    """A group of two ranks of which the other does not exist."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="this torch has no fake groups")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def rows(spelling: str = "functional") -> nn.Module:
    return ExchangedExperts(E, K, H, I, BF16, spelling=spelling)


def slots() -> nn.Module:
    return ExchangedSlots(E, K, H, I, torch.float32)


def tokens(model: nn.Module, count: int = 12) -> Tensor:
    return torch.randn(count, H, dtype=next(model.parameters()).dtype)


class _CapturedError(Exception):
    pass


def capture_graph(model: nn.Module, *inputs: Tensor, dynamic: bool | None = None) -> GraphModule:
    """As moe_compiler.testing has it, without running the model: no other rank is there to send anything."""
    found: list[GraphModule] = []

    def backend(module: GraphModule, example_inputs: Any) -> Any:
        found.append(capture(module, example_inputs))
        raise _CapturedError

    torch._dynamo.reset()
    with pytest.raises(Exception, match="CapturedError"):
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return found[-1]


def captured(model: nn.Module, count: int = 12, dynamic: bool | None = None) -> GraphModule:
    return capture_graph(model, tokens(model, count), dynamic=dynamic)


def called(graph: GraphModule) -> list[str]:
    return [op_name(node) for node in graph.graph.nodes if node.op == "call_function"]


# What is found, and what stands there then

MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "functional": ("exchanged_rows", rows),
    "autograd": ("exchanged_rows", lambda: rows("autograd")),
    "in place": ("exchanged_rows", lambda: rows("in place")),
    "one module an expert": ("exchanged_rows", Sorted),
    "in parts": ("exchanged_rows", InParts),
    "equal parts": ("exchanged_slots", slots),
}


LATER = ("autograd", "in parts", "one module an expert")


@pytest.mark.parametrize("key", [*(key for key in MODELS if key not in LATER), *long(*LATER)])
def test_an_exchange_is_found_once_and_replaced_by_one_of_ours(key):
    name, make = MODELS[key]
    graph = captured(make())
    after, report = run_passes(graph, ALL)
    assert [match.formulation for match in report.matches] == [name] and not report.misses
    names = called(after)
    assert [n for n in names if n.startswith("ep_") or n == "experts"] == ["ep_dispatch", "experts", "ep_combine"]
    gone = ("all_to_all_single", "wait_tensor", "item", "_assert_scalar", "repeat_interleave", "gather_experts")
    assert not set(gone) & set(names)
    assert all(node.meta.get("stack_trace") for node in after.graph.nodes if op_name(node).startswith("ep_"))
    (exchange,) = report.exchanges
    assert (exchange.experts, exchange.ranks, exchange.placement) == (E, RANKS, "contiguous")
    kind = "uneven" if name == "exchanged_rows" else "equal"
    assert f"exchange: {kind} all-to-all, group {dist.group.WORLD.group_name} of 2: replaced" in str(report)
    again, second = run_passes(after, ALL)
    assert_same_graph(again, after)
    assert not second.matches


@pytest.mark.parametrize("make", [rows, *long(Sorted, slots)])
def test_a_symbolic_number_of_tokens(make):
    after, report = run_passes(captured(make(), dynamic=True), ALL)
    assert len(report.matches) == 1 and "ep_combine" in called(after) and "all_to_all_single" not in called(after)


@pytest.mark.parametrize("name", exchange_names())
def test_no_other_formulation_finds_an_example(name):
    example = exchange_examples()[name]()
    graph = capture_graph(example.module, *example.inputs(8))
    after, report = run_passes(graph, ALL, options={"disable": [name]})
    assert not report.matches and report.misses
    assert report.misses[0].formulation == name and report.misses[0].step == "disabled"
    assert collectives(after.graph).keys() == collectives(graph.graph).keys()


def test_the_operators_of_torch_2_11_are_read_too():
    """It writes the exchange with autograd as an operator of its own name."""
    graph = captured(rows())
    other = torch.ops._c10d_functional_autograd.all_to_all_single.default
    for node in graph.graph.nodes:
        if op_name(node) == "all_to_all_single":
            node.target = other
    after, report = run_passes(graph, ALL)
    assert len(report.matches) == 1 and "ep_dispatch" in called(after)


@pytest.mark.parametrize("make", [Sorted, *long(rows, slots)])
def test_four_ranks_with_one_expert_each(make):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=E)
    after, report = run_passes(captured(make()), ALL)
    assert len(report.matches) == 1 and called(after).count("ep_dispatch") == 1


def test_what_is_left_alone_keeps_its_exchange():
    """Without the pass that raises, nothing changes."""
    graph = captured(Sorted())
    after, report = run_passes(graph, ["canonicalize", "find_moe"])
    assert not report.matches and not report.misses
    assert called(after).count("all_to_all_single") == 3


# Other ways to write parts of it


class FromWide(ExchangedExperts):
    """Rows and parameters in fp32, matmuls in bf16, as torchtitan casts them."""

    def __init__(self) -> None:
        super().__init__(E, K, H, I, torch.float32)

    def own_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        w1, w3, w2 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w3, self.w2))
        gate = torch._grouped_mm(rows.bfloat16(), w1, offs=offsets)
        up = torch._grouped_mm(rows.bfloat16(), w3, offs=offsets)
        return torch._grouped_mm(F.silu(gate) * up, w2, offs=offsets).type_as(rows)


class OverMesh(Sorted):
    def __init__(self) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (RANKS,))

    def send(self, rows: Tensor, received: Any = None, given: Any = None, group: Any = None) -> Tensor:
        return functional.all_to_all_single(rows, received, given, self.mesh)


class NumbersOneByOne(Sorted):
    def given(self, counts: Tensor) -> list[int]:
        return [int(number) for number in counts.view(self.ranks, -1).sum(1).cpu()]


class CountedByBincount(Sorted):
    def counts(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids.flatten(), minlength=self.experts)


class CopiedHome(Sorted):
    def returned(self, rows: Tensor, place: Tensor) -> Tensor:
        return torch.zeros_like(rows).index_copy(0, place, rows)


class OfSequences(nn.Module):
    """Tokens are a view of a batch, behind a norm, and the sum goes to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(H), Sorted()

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, H)
        return x + self.block(self.norm(x).view(-1, H)).view(x.shape)


class UnderAutocast(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [FromWide, OverMesh, NumbersOneByOne, CountedByBincount, CopiedHome, OfSequences, UnderAutocast],
    ids=lambda kind: kind.__name__,
)
def test_other_ways_to_write_parts_of_it(make):
    after, report = run_passes(captured(make()), ALL)
    assert [match.formulation for match in report.matches] == ["exchanged_rows"] and not report.misses
    assert [n for n in called(after) if n.startswith("ep_")] == ["ep_dispatch", "ep_combine"]
    assert "all_to_all_single" not in called(after)


# What ranks compute


def values(graph: GraphModule, rank: int) -> list[Tensor]:
    """The inputs of one rank: a router that all have, tokens and experts of its own."""
    generator = torch.Generator()
    made = []
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta["val"]
        generator.manual_seed(place if tuple(value.shape) == (4, 16) else 100 + 10 * rank + place)
        scale = value.shape[-1] ** -0.5 if value.dim() == 3 else 1.0
        made.append((torch.randn(tuple(value.shape), generator=generator) * scale).to(value.dtype))
    return made


def ranks_of(graph: GraphModule) -> list[list[Tensor]] | None:
    return run_ranks(graph, [values(graph, rank) for rank in range(RANKS)])


def small(name: str) -> GraphModule:
    dtype = BF16 if name == "exchanged_rows" else torch.float32
    example = exchange_examples()[name](dtype, experts=4, top_k=2, hidden=16, intermediate=8)
    return capture_graph(example.module, *example.inputs(7))


@pytest.mark.parametrize("name", exchange_names())
def test_a_damaged_example_misses_or_means_what_it_says(name):
    check_damages(name, every=31)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", exchange_names())
def test_every_damage_of_an_example_misses_or_means_what_it_says(name):
    check_damages(name, every=1)


def check_damages(name: str, every: int) -> None:
    """As tests/passes/test_damage.py, on two ranks."""
    graph = small(name)
    undamaged = ranks_of(graph)
    assert undamaged is not None
    after, _ = run_passes(graph, FIND)
    close(ranks_of(after), undamaged, 2e-2, "undamaged")
    tried = missed = changed = 0
    for damage in [damage for node in graph.graph.nodes for damage in damages(node)][::every]:
        damaged = copy_graph(graph)
        (target,) = [n for n in damaged.graph.nodes if n.name == damage.node]
        before = ranks_of(copy_graph(damaged)) if damage.apply(target) else None
        if before is None:
            continue
        tried += 1
        changed += not all(torch.equal(a, b) for a, b in zip(flat(before), flat(undamaged), strict=True))
        what = f"{name}: {damage.node} {damage.what}"
        after, report = run_passes(damaged, FIND)
        if not report.matches:
            missed += 1
            assert report.misses, f"{what}: missed without a word"
            for miss in report.misses:
                assert miss.reason and miss.step in STEPS.get(miss.formulation, {miss.step}), what
            continue
        bound = 5e-2 if damage.what == "rounded" else 2e-2 if name == "exchanged_rows" else 1e-5
        close(ranks_of(after), before, bound, f"{what}: matched as {report.matches[0].formulation}")
    assert tried > 60 // every and changed > tried // 2 and missed > tried // 4, (tried, changed, missed)


def flat(found: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for rank in found for tensor in rank]


def close(mine: list[list[Tensor]] | None, theirs: list[list[Tensor]], bound: float, what: str) -> None:
    assert mine is not None, f"{what}: the raised graph does not run"
    for a, b in zip(flat(mine), flat(theirs), strict=True):
        error, scale = (a.double() - b.double()).norm(), b.double().norm() + 1e-6
        assert error <= bound * scale or not b.isfinite().all(), f"{what}: error {error / scale:.1e}"


# What is missed, and at which step


class CountsReturned(Sorted):
    """The load of each own expert, as a balancing rule wants it."""

    def counts_from_all(self, counts: Tensor) -> Tensor:
        self.load = super().counts_from_all(counts)
        return self.load

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.load


class OwnNumbersReceived(Sorted):
    """As many rows are expected from each rank as are sent to it."""

    def received(self, theirs: Tensor, counts: Tensor) -> list[int]:
        return (counts * 1).reshape(self.ranks, self.local).sum(-1).tolist()


class AnotherGroupBack(Sorted):
    def __init__(self) -> None:
        super().__init__()
        self.other = dist.new_group(list(range(RANKS)))

    def back(self, rows: Tensor, given: list[int], received: list[int]) -> Tensor:
        return self.send(rows, given, received, self.other)


class AnotherGroupForCounts(AnotherGroupBack):
    def back(self, rows: Tensor, given: list[int], received: list[int]) -> Tensor:
        return self.send(rows, given, received)

    def counts_from_all(self, counts: Tensor) -> Tensor:
        return self.send(counts, [self.local] * self.ranks, [self.local] * self.ranks, self.other)


class RoundRobin(Sorted):
    """Expert e is on rank e % R."""

    def given(self, counts: Tensor) -> list[int]:
        return counts.reshape(self.local, self.ranks).sum(0).tolist()


class NotMirrored(Sorted):
    def back(self, rows: Tensor, given: list[int], received: list[int]) -> Tensor:
        return self.send(rows, received, given)


class SortedByRank(Sorted):
    def numbers(self, theirs: Tensor) -> Tensor:
        return torch.arange(self.ranks).repeat_interleave(self.local).repeat_interleave(theirs.flatten())


class NotInverted(Sorted):
    def returned(self, rows: Tensor, place: Tensor) -> Tensor:
        return rows[place]


class NotSorted(Sorted):
    """The rows of one expert do not lie together."""

    def place(self, theirs: Tensor) -> Tensor:
        return torch.arange(theirs.sum().item())


class Clipped(Sorted):
    def returned(self, rows: Tensor, place: Tensor) -> Tensor:
        return rows.clamp(-1, 1)[place.argsort()]


class Dropped(Sorted):
    """Rows beyond a capacity of the expert's rank are set to zero there."""

    def compute(self, rows: Tensor, sizes: list[int]) -> Tensor:
        return super().compute(rows * (torch.arange(rows.shape[0]) < 16)[:, None], sizes)


class OtherSizes(Sorted):
    def sizes(self, theirs: Tensor) -> list[int]:
        return theirs.reshape(self.local, self.ranks).sum(1).tolist()


class CountsChanged(Sorted):
    def counts_from_all(self, counts: Tensor) -> Tensor:
        return super().counts_from_all(counts.flip(0))


class ReducedInBetween(Sorted):
    """A shared expert's sum over the same group, between the way out and the way back."""

    def back(self, rows: Tensor, given: list[int], received: list[int]) -> Tensor:
        self.extra = functional.all_reduce(self.router.weight * 2, "sum", self.group)
        return self.send(rows, given, received)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.extra


class SlotsInAnotherOrder(ExchangedSlots):
    def __init__(self) -> None:
        super().__init__(E, K, H, I, torch.float32)

    def exchange(self, rows: Tensor) -> Tensor:
        return super().exchange(rows.flip(0))


MISSED: dict[type[nn.Module], tuple[str, str]] = {
    CountsReturned: ("closed", "which the exchange brought, is also used by output"),
    OwnNumbersReceived: ("lists", "not from all_to_all_single"),
    AnotherGroupBack: ("way_out", "the rows come in group"),
    AnotherGroupForCounts: ("lists", "the counts are exchanged in group"),
    RoundRobin: ("lists", "summed over the wrong dimension"),
    NotMirrored: ("way_out", "not the mirror of the way out"),
    SortedByRank: ("local_order", "not sorted by the number of the own expert"),
    NotInverted: ("way_out", "is not the inverse"),
    NotSorted: ("local_order", "brought together by arange"),
    Clipped: ("local_experts", "the rows that are sent back come from clamp"),
    Dropped: ("way_out", "the experts read mul, not the rows that came"),
    OtherSizes: ("lists", "summed over the wrong dimension"),
    CountsChanged: ("lists", "are not those of the rows that are sent"),
    ReducedInBetween: ("closed", "all_reduce of the same group stands between"),
    SlotsInAnotherOrder: ("way_back", "come from flip, not from a product over slots"),
}


TOLD = (
    CountsReturned,
    OwnNumbersReceived,
    AnotherGroupBack,
    RoundRobin,
    Dropped,
    ReducedInBetween,
)


@pytest.mark.parametrize("kind", [*TOLD, *long(*(kind for kind in MISSED if kind not in TOLD))])
def test_what_differs_is_missed_at_its_step(kind):
    step, reason = MISSED[kind]
    graph = captured(kind())
    after, report = run_passes(graph, ALL)
    assert not report.matches and not report.exchanges
    (miss,) = report.misses
    assert (miss.formulation, miss.step) == (
        "exchanged_slots" if issubclass(kind, ExchangedSlots) else "exchanged_rows", step,
    ), miss  # fmt: skip
    assert reason in miss.reason and miss.at and miss.hint and miss.node
    assert changed_order(collectives(graph.graph), collectives(after.graph)) is None
    assert called(after).count("all_to_all_single") == called(graph).count("all_to_all_single")


# What is none


class SequenceParallel(nn.Module):
    """Attention over all of the sequence for some of the heads: exchanges of equal parts around it, no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H, 3 * H)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], 3, RANKS, -1).permute(2, 0, 1, 3)
        heads = functional.all_to_all_single(heads.contiguous(), None, None, dist.group.WORLD)
        q, k, v = heads.reshape(1, -1, 3, H // RANKS).unbind(2)
        out = torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)
        return functional.all_to_all_single(out.view(RANKS, -1, H // RANKS), None, None, dist.group.WORLD)


class GatheredWeights(nn.Module):
    """FSDP: weights are gathered, gradients are scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.randn(H // RANKS, H))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, functional.all_gather_tensor(self.share, 0, dist.group.WORLD))


class Resharded(nn.Module):
    """DTensor's change of the sharded dimension."""

    def forward(self, x: Tensor) -> Tensor:
        name = dist.group.WORLD.group_name
        moved = torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, name)
        return torch.ops._dtensor.shard_dim_alltoall(moved.relu(), 1, 0, name)


class Pipeline(nn.Module):
    """Activations go to the next rank: an exchange of which all parts but one are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.permute_tensor(self.one(x), [1, 0], dist.group.WORLD)
        return functional.permute_tensor(self.two(x), [1, 0], dist.group.WORLD)


class RaggedTokens(Exchanged):
    """Uneven exchanges there and back around one dense layer: the load is balanced, nothing is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(H, H)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        mine, theirs = given.tolist(), self.send(given).tolist()
        rows = self.dense(self.send(x, theirs, mine))
        return self.send(rows, mine, theirs)


@pytest.mark.parametrize("make", [SequenceParallel, GatheredWeights, Resharded, Pipeline])
def test_other_collectives_are_left_alone(make):
    graph = capture_graph(make(), torch.randn(8, H))
    after, report = run_passes(graph, ALL)
    assert not report.matches and not report.misses
    assert_same_graph(after, graph)


def test_rows_that_are_balanced_between_ranks_are_no_experts():
    graph = capture_graph(RaggedTokens(), torch.randn(8, H), torch.tensor([3, 5]))
    after, report = run_passes(graph, ALL)
    assert not report.matches and not report.misses and called(after).count("all_to_all_single") == 3


class Stack(nn.Module):
    """Collectives of other kinds around two blocks, of the same group and of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sorted(), InParts()
        self.share = nn.Parameter(torch.randn(H // RANKS, H))
        self.other = dist.new_group(list(range(RANKS)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(x, functional.all_gather_tensor(self.share, 0, dist.group.WORLD))
        x = functional.all_reduce(self.first(x), "sum", dist.group.WORLD)
        x = functional.all_reduce(x, "sum", self.other) + self.second(x)
        return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def test_other_collectives_stay_where_they_are():
    graph = captured(Stack())
    after, report = run_passes(graph, ALL)
    assert len(report.matches) == 2 and not report.misses
    found = {name: [op_name(n) for n in nodes] for name, nodes in collectives(after.graph).items()}
    block = ["ep_dispatch", "ep_combine"]
    assert list(found.values()) == [
        ["all_gather_into_tensor", *block, "all_reduce", *block, "reduce_scatter_tensor"], ["all_reduce"],
    ]  # fmt: skip
    waits = [n for n in after.graph.nodes if is_collective(n) and op_name(n) == "wait_tensor"]
    assert len(waits) == 4


# transformers: every rank has all tokens


class MaskedGrouped(GroupedExperts):
    """Sorted rows with the ids of other ranks' experts set to E / R, behind all that are here; then an all_reduce."""

    def __init__(self) -> None:
        super().__init__(E // RANKS, K, H, I, BF16)
        self.router = nn.Linear(H, E, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(self.router(x).float(), -1), K, -1)
        first = dist.get_rank() * self.experts
        other = (ids < first) | (ids >= first + self.experts)
        weights, ids = weights.masked_fill(other, 0.0).to(x.dtype), (ids - first).masked_fill(other, self.experts)
        ordered, perm = torch.sort(ids.reshape(-1))
        rows = x[perm // K]
        counts = torch.histc(ordered.float(), bins=self.experts, min=0, max=self.experts - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows, self.gate_up.mT, offs=offsets).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down.mT, offs=offsets)
        rows = (rows * weights.reshape(-1)[perm].unsqueeze(-1)).masked_fill((ordered >= self.experts)[:, None], 0.0)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel())
        rows = rows[inverse].view(x.shape[0], K, H).sum(1)
        return functional.all_reduce(rows, "sum", dist.group.WORLD)


@pytest.mark.parametrize("make", [MaskedGrouped, *long(Masked)])
def test_masked_ids_are_experts_of_this_rank_and_the_sum_over_ranks_stays(make):
    """Every rank has every token, so nothing has to be sent: the experts are raised, the all_reduce is left."""
    after, report = run_passes(captured(make()), ALL)
    assert len(report.matches) == 1 and not report.misses and not report.exchanges
    assert report.matches[0].sizes["E"] == str(E // RANKS)
    names = called(after)
    assert names.count("experts") == names.count("all_reduce") == 1
    assert names.index("experts") < names.index("all_reduce") and "all_to_all_single" not in names


# The order of collectives


class TwoSums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.all_reduce(x, "sum", dist.group.WORLD) + functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_reduce(x, "sum", dist.group.WORLD)


def test_a_changed_order_of_collectives_is_told():
    graph = capture_graph(TwoSums(), torch.randn(4, H)).graph
    before = collectives(graph)
    (name, *_), nodes = before, next(iter(before.values()))
    assert changed_order(before, collectives(graph)) is None
    kept = {name: list(nodes)}
    moved = {name: [nodes[1], nodes[0], *nodes[2:]]}
    told = changed_order(kept, moved)
    assert told is not None and "change their order" in told[0] and told[1] in nodes
    with graph.inserting_after(nodes[0]):
        added = insert(nodes[0], nodes[0].target, nodes[0].args, dict(nodes[0].kwargs))
    told = changed_order(kept, {name: [nodes[0], added, *nodes[1:]]})
    assert told == (f"a collective of group {name} stands where none stood before", added)
    assert changed_order(kept, {name: [nodes[0], added, *nodes[2:]]}) is None
    assert changed_order(kept, {name: nodes[1:]}) is None
