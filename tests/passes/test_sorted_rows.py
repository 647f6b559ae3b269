"""Sorted rows and slots that differ from transformers' ways: which step refuses what, and how ids are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.backend import last_reports
from moe_compiler.passes.formulations.registry import formulation_names
from moe_compiler.report import Report
from moe_compiler.testing import capture_graph, run_passes
from tests.fast_part import first_of_each
from tests.passes import spellings_masks
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.spellings import Block, Damaged, E, H, K, choose
from tests.passes.spellings_sorted import BF16, COUNTS, DAMAGED, grouped, rows_of

CAPTURE = ("canonicalize", "find_moe", "raise_moe")


def only(name: str) -> dict[str, object]:
    return {"disable": [other for other in formulation_names() if other != name]}


def tokens(count: int = 5) -> Tensor:
    return torch.randn(count, H, dtype=BF16)


def refused(module: torch.nn.Module, x: Tensor, name: str = "") -> str:
    _, report = run_passes(module, CAPTURE, x, options=only(name) if name else {})
    assert not report.matches
    return "; ".join(f"{miss.step}: {miss.reason}" for miss in report.misses)


def found(report: Report) -> list[str]:
    return [match.formulation for match in report.matches]


DAMAGES = first_of_each(
    [*DAMAGED, *spellings_masks.DAMAGED], lambda d: (d.formulation, d.step), lambda d: f"{d.formulation}-{d.name}"
)


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_damaged_copy_never_matches_and_its_own_formulation_names_the_step(damaged: Damaged):
    """The formulations that sort rows share steps: with all of them on, the nearest may be another one."""
    captured = capture_graph(Block(damaged.spelling, damaged.dtype), torch.randn(5, H, dtype=damaged.dtype))
    _, report = run_passes(captured, CAPTURE)
    assert not report.matches and report.misses
    _, report = run_passes(captured, CAPTURE, options=only(damaged.formulation))
    # A top-k that chooses tokens for each expert is a candidate of its own.
    (miss,) = [miss for miss in report.misses if miss.formulation == damaged.formulation]
    assert not report.matches and miss.step == damaged.step
    assert damaged.words in miss.reason and miss.steps_passed < miss.steps_total
    assert "spellings" in miss.where


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: counts.__name__)
def test_every_way_to_count_the_ids_is_one(counts):
    module = Block(lambda b, x, l: grouped(b, x, l, counts=counts), BF16)
    for dynamic in (None, True):
        _, report = run_passes(module, CAPTURE, tokens(), dynamic=dynamic)
        assert found(report) == ["grouped_scatter"] and not report.misses


def with_ids(ids_of) -> Block:
    """Grouped matmuls over ids that are made of the top-k's."""

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        ids = ids_of(ids)
        offsets = torch.cumsum(torch.zeros_like(logits).bool().scatter(1, ids, True).sum(0), 0, dtype=torch.int32)
        perm = torch.argsort(ids.flatten(), stable=True)
        gate, up = torch._grouped_mm(x[perm // K], b.gate_up.mT, offs=offsets).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, b.down.mT, offs=offsets) * weights.flatten()[perm][:, None]
        return torch.zeros_like(x).scatter_add(0, rows_of(perm // K), rows)

    return Block(spelling, BF16)


def test_a_map_counts_only_choices_that_are_distinct():
    assert "chooses it only once" in refused(with_ids(lambda ids: ids // 2), tokens(), "grouped_scatter")
    assert "chooses it only once" in refused(with_ids(lambda ids: (ids + 1) % E), tokens(), "grouped_scatter")


def test_ids_of_an_unknown_range_would_shift_the_sorted_rows():
    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        return grouped(b, x, logits, counts=lambda ids, logits: torch.histc(ids.float(), E, 0, E))

    class Wide(torch.nn.Module):
        """A router over more experts than there are."""

        def __init__(self) -> None:
            super().__init__()
            self.block = Block(spelling, BF16)
            self.router = torch.nn.Parameter(torch.randn(E + 1, H, dtype=BF16))

        def forward(self, x: Tensor) -> Tensor:
            return self.block.spelling(self.block, x, F.linear(x, self.router))

    assert "count: nothing shows that the ids lie in 0..3" in refused(Wide(), tokens(), "grouped_scatter")


def test_a_weight_on_the_input_and_one_on_the_output_are_two():
    def twice(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        def add(x: Tensor, token: Tensor, rows: Tensor) -> Tensor:
            return torch.zeros_like(x).index_add(0, token, rows * scale[:, None])

        weights, ids = choose(x, logits)
        scale = weights.flatten()[ids.flatten().argsort(stable=True)]
        return grouped(b, x, logits, at="before", add=add)

    assert "added: the rows are consumed by mul" in refused(Block(twice, BF16), tokens(), "grouped_scatter")


def added_by_index_add(x: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, token, rows)


@pytest.mark.parametrize(
    ("options", "name"), [({}, "grouped_scatter"), ({"add": added_by_index_add}, "grouped_scatter")]
)
def test_a_routing_weight_in_the_middle_is_one_on_the_output(options, name):
    module = Block(lambda b, x, l: grouped(b, x, l, at="middle", **options), BF16)
    report = raised_agrees(module, tokens(37))
    assert found(report) == [name] and report.matches[0].attributes["weight_at"] == "output"


def test_rows_that_are_added_to_an_input_in_place_leave_it_to_the_model():
    """The caller's tensor is written: raised, it would not be."""

    class InPlace(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(lambda b, x, l: None, BF16)

        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            logits = F.linear(x, self.block.router)
            return grouped(self.block, x, logits, add=lambda x, token, rows: out.scatter_add_(0, rows_of(token), rows))

    module, x, ours = InPlace(), tokens(), tokens()
    eager = ours.clone()
    with torch.no_grad():
        y = compile_eager(module)(x, ours)
        expected = module(x, eager)
    (miss,) = last_reports()[-1].misses
    assert miss.step == "closed" and "not the block's" in miss.reason
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ours, eager)


def test_rows_that_are_cut_on_the_way_are_refused():
    """Each row as two of half the width, with half of the columns of every matrix: offsets that are twice as many."""

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        offsets = torch.cumsum(torch.bincount(ids.flatten(), minlength=E), 0, dtype=torch.int32)
        perm = torch.argsort(ids.flatten(), stable=True)
        rows = x[perm // K].view(-1, H // 2)
        gate, up = torch._grouped_mm(rows, b.gate_up[:, :, : H // 2].mT, offs=offsets).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, b.down[:, : H // 2].mT, offs=offsets).view(-1, H)
        return torch.zeros_like(x).scatter_add(0, rows_of(perm // K), rows * weights.flatten()[perm][:, None])

    assert "reshaped" in refused(Block(spelling, BF16), tokens(), "grouped_scatter")


def biased(down: bool, up: bool, whole: bool) -> Block:
    """Linear layers of the parts, some with a bias."""

    def layer(b: Block, weight: Tensor, e: int, rows: Tensor, has: bool) -> Tensor:
        return F.linear(rows, weight[e], b.router.flatten()[: weight.shape[1]] if has else None)

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        sizes = F.one_hot(ids, E).sum((0, 1)).tolist()
        perm = ids.flatten().argsort(stable=True)
        parts = x[perm // K].split(sizes)
        first = [layer(b, b.gate, e, parts[e], False) for e in range(E)]
        second = [layer(b, b.up, e, parts[e], up) for e in range(E)]
        if whole:
            act = [F.silu(gate) * up for gate, up in zip(first, second, strict=True)]
        else:
            act = (F.silu(torch.cat(first)) * torch.cat(second)).split(sizes)
        rows = torch.cat([layer(b, b.down, e, act[e], down) for e in range(E)])
        return torch.zeros_like(x).index_add(0, perm // K, rows * weights.flatten()[perm][:, None])

    return Block(spelling)


@pytest.mark.parametrize(
    ("down", "up", "whole"),
    [(True, False, True), (False, True, True), (True, False, False)],
    ids=["whole-down", "whole-up", "apart-down"],
)
def test_a_bias_of_every_part_is_the_experts(down, up, whole):
    """One and the same vector for all experts, on one projection alone."""
    (match,) = raised_agrees(biased(down, up, whole), torch.randn(19, H)).matches
    assert match.formulation == ("split_experts" if whole else "split_linear")
    assert match.attributes["biases"] == ("down" if down else "up")


def test_slices_between_cumulated_counts_are_refused_with_a_remedy():
    """Aria in transformers 4: a loop that cuts the sorted rows by hand and copies each result to its place."""

    def gemm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros(rows.shape[0], weight.shape[-1], dtype=rows.dtype, device=rows.device)
        ends = torch.cat((torch.zeros(1, dtype=torch.long), torch.cumsum(counts, dim=0)))
        for e in range(E):
            start, end = ends[e], ends[e + 1]
            out[start:end] = torch.matmul(rows[start:end], weight[e])
        return out

    def aria(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        counts = torch.histc(ids.flatten().to(torch.float32), bins=E, min=0, max=E - 1).to(ids.dtype)
        perm = torch.argsort(ids.view(-1))
        gate, up = torch.chunk(gemm(x.index_select(0, perm // K), b.gate_up_t, counts), 2, dim=-1)
        rows = gemm(F.silu(gate) * up, b.down_t, counts)
        home = torch.zeros((x.shape[0] * K, H), dtype=rows.dtype).index_copy_(0, perm, rows)
        return (home.view(-1, K, H) * weights.unsqueeze(-1)).sum(dim=1)

    module, x = Block(aria).requires_grad_(False), torch.randn(7, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    (miss,) = last_reports()[-1].misses
    assert not last_reports()[-1].matches
    assert (miss.formulation, miss.step) == ("split_linear", "dispatch") and "cumulated counts" in miss.reason
    assert "torch.split(rows, counts.tolist())" in miss.hint and "out[start:end]" in miss.at


def slots_by_grouped_matmul(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Megatron's drop-and-pad with grouped matmuls: as many rows for each expert as there are slots."""
    values, ids = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=1)
    probs = torch.zeros_like(logits, dtype=x.dtype).scatter(1, ids, values.to(x.dtype))
    capacity = x.shape[0] // 2
    kept = torch.zeros_like(probs).scatter(0, torch.topk(probs, k=capacity, dim=0, sorted=False)[1], 1).bool()
    probs = probs * kept
    token = kept.to(torch.int8).T.contiguous().argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
    offsets = torch.cumsum(torch.full((E,), capacity), 0, dtype=torch.int32)
    rows = x.index_select(0, token.view(-1))
    gate, up = torch._grouped_mm(rows, b.gate_up_t, offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, b.down_t, offs=offsets)
    rows = rows * spellings_masks.flat_places(probs, token).unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, token.view(-1, 1).expand(-1, H), rows)


@pytest.mark.parametrize("dynamic", [False, True])
def test_slots_through_grouped_matmuls(dynamic):
    module = Block(slots_by_grouped_matmul, BF16)
    compiled = compile_eager(module, dynamic=dynamic)
    report = raised_agrees(module, torch.randn(38, H, dtype=BF16), compiled=compiled)
    assert [match.formulation for match in report.matches] == ["drop_and_pad"]
