"""What transformers' packed experts add to the plain block: norms behind the experts, ids filled in, batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.backend import last_reports
from moe_compiler.report import Report
from moe_compiler.testing import run_passes
from tests.fast_part import covering
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.spellings import Block, E, H, K, choose

CAPTURE = ("canonicalize", "find_moe", "raise_moe")
Behind = Callable[[Block, Tensor], Tensor]


def found(report: Report) -> list[str]:
    return [match.formulation for match in report.matches]


def grouped(b: Block, x: Tensor, weights: Tensor, ids: Tensor, behind: Behind, sorting: str = "sort") -> Tensor:
    """Sorted rows; `behind` is what each row goes through before it is weighted."""
    if sorting == "sort":
        ordered, perm = torch.sort(ids.reshape(-1), stable=True)
    else:
        perm = ids.reshape(-1).argsort(stable=True)
        ordered = ids.reshape(-1)
    counts = torch.histc(ordered.float(), bins=E, min=0, max=E - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[perm // K], b.gate_up.transpose(-2, -1), offs=offsets).chunk(2, -1)
    rows = behind(b, torch._grouped_mm(F.silu(gate) * up, b.down.transpose(-2, -1), offs=offsets))
    rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return rows[inverse].view(x.shape[0], K, H).sum(dim=1).to(x.dtype)


def batched(b: Block, x: Tensor, weights: Tensor, ids: Tensor, behind: Behind) -> Tensor:
    """Gathered weights; `behind` as above."""
    flat = ids.reshape(-1)
    gate, up = torch.bmm(b.gate_up[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    rows = behind(b, torch.bmm(b.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1))
    return (rows * weights.reshape(-1).unsqueeze(-1)).view(x.shape[0], K, H).sum(dim=1).to(x.dtype)


def scaled_norm(b: Block, rows: Tensor) -> Tensor:
    """The row scaled, then divided by its root mean square: muse_spark."""
    scaled = rows.float() * (1.0 + b.router[0]).float()
    return (scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(rows)


def plain_norm(b: Block, rows: Tensor) -> Tensor:
    return F.rms_norm(rows, (H,), b.router[0])


def layer_norm(b: Block, rows: Tensor) -> Tensor:
    return F.layer_norm(rows, (H,))


NORMS = {"scaled": scaled_norm, "rms_norm": plain_norm, "layer_norm": layer_norm}


@pytest.mark.parametrize(("norm", "spelling"), covering([*NORMS], [grouped, batched]))
def test_a_norm_behind_the_experts_stays_outside_of_the_block(norm, spelling):
    """The experts are rewritten row by row; the norm, the weights and the sum over k stay as they were."""
    name, dtype = ("grouped_mm", torch.bfloat16) if spelling is grouped else ("batched_mm", torch.float32)
    module = Block(lambda b, x, l: spelling(b, x, *choose(x, l), NORMS[norm]), dtype)
    report = raised_agrees(module, torch.randn(37, H, dtype=dtype))
    (match,) = report.matches
    assert match.formulation == name and match.router is None and "normalised first" in match.router_why
    assert match.sizes["T"] == str(37 * K) and match.sizes["k"] == "1"


@pytest.mark.parametrize("spelling", [grouped, batched])
def test_a_norm_behind_the_experts_leaves_any_number_of_tokens_open(spelling):
    dtype = torch.bfloat16 if spelling is grouped else torch.float32
    module = Block(lambda b, x, l: spelling(b, x, *choose(x, l), scaled_norm), dtype)
    compiled = compile_eager(module, dynamic=True)
    for count in (7, 37, 2):
        (match,) = raised_agrees(module, torch.randn(count, H, dtype=dtype), compiled=compiled).matches
    assert "s" in match.sizes["T"]


def test_rows_that_are_normalised_need_the_ids_in_their_order():
    module = Block(
        lambda b, x, l: grouped(b, x, *choose(x, l), scaled_norm, sorting="argsort"), torch.bfloat16
    ).requires_grad_(False)
    _, report = run_passes(module, CAPTURE, torch.randn(5, H).bfloat16())
    (miss,) = report.misses
    assert (miss.formulation, miss.step) == ("grouped_mm", "weigh") and "sorted ids" in miss.reason and miss.hint


def test_rows_of_parts_that_are_normalised_are_as_many_as_the_data_says():
    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        sizes = F.one_hot(ids, E).sum((0, 1)).tolist()
        _, perm = ids.reshape(-1).sort(stable=True)
        gate = torch.cat([F.linear(part, b.gate[e]) for e, part in enumerate(x[perm // K].split(sizes))])
        rows = torch.cat([F.linear(part, b.down[e]) for e, part in enumerate(F.silu(gate).split(sizes))])
        rows = F.rms_norm(rows, (H,)) * weights.reshape(-1)[perm].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, perm // K, rows)

    module, x = Block(spelling), torch.randn(7, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    (miss,) = last_reports()[-1].misses
    assert not last_reports()[-1].matches
    assert (miss.formulation, miss.step) == ("split_linear", "weigh") and "comes from the data" in miss.reason


def doubled(b: Block, rows: Tensor) -> Tensor:
    return rows * 2


@pytest.mark.parametrize("spelling", [grouped, batched])
def test_what_is_no_norm_is_refused_as_before(spelling):
    dtype = torch.bfloat16 if spelling is grouped else torch.float32
    module = Block(lambda b, x, l: spelling(b, x, *choose(x, l), doubled), dtype)
    _, report = run_passes(module, CAPTURE, torch.randn(5, H, dtype=dtype))
    assert not report.matches and "constant" in report.misses[0].reason


def test_an_operand_that_gives_only_its_dtype_is_not_read_by_the_block():
    """gemma4: the norm in front of the experts casts back with type_as(x), after the router has seen another norm."""

    def after_norm(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        plain = F.linear(x, b.experts[0].w1.weight.T @ b.experts[0].w1.weight)
        rows = F.rms_norm(plain.float(), (H,)).type_as(plain)
        return batched(b, rows, *choose(x, logits), lambda b, rows: rows.type_as(plain))

    assert found(raised_agrees(Block(after_norm), torch.randn(19, H))) == ["batched_mm"]


# Ids that stood for no expert


class Skipping(torch.nn.Module):
    """A router with one class more than there are experts: who chooses it runs expert 0 with the weight 0 (zaya)."""

    def __init__(self, none: Callable[[Tensor], Tensor], classes: int = E + 1, instead: int = 0) -> None:
        super().__init__()
        self.block = Block(lambda b, x, l: x)
        self.router = torch.nn.Parameter(torch.randn(classes, H))
        self.none, self.instead = none, instead

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(F.linear(x, self.router), -1), K, dim=-1)
        none = self.none(ids)
        weights, ids = weights.masked_fill(none, 0), ids.masked_fill(none, self.instead)
        return batched(self.block, x, weights, ids, lambda b, rows: rows)


@pytest.mark.parametrize("none", [lambda ids: ids == E, lambda ids: ids >= E], ids=["eq", "ge"])
def test_a_skipped_choice_that_is_filled_with_an_expert_is_in_range(none):
    module = Skipping(none)
    with torch.no_grad():
        module.router[E] *= 3
    (match,) = raised_agrees(module, torch.randn(37, H)).matches
    assert match.formulation == "batched_mm"


@pytest.mark.parametrize(
    ("module", "errs"),
    [
        (Skipping(lambda ids: ids == E, classes=E + 2), True),
        (Skipping(lambda ids: ids == E - 1), True),
        (Skipping(lambda ids: ids > E), True),
        (Skipping(lambda ids: ids == E, instead=-1), False),
        (Skipping(lambda ids: ids == E, instead=E), True),
    ],
    ids=["two_more_classes", "another_class", "above", "negative", "beyond"],
)
def test_a_filled_choice_that_may_be_out_of_range_means_what_the_gather_means(module, errs):
    """Expert -1 is the last one; an expert that does not exist is an error before and after."""
    module.requires_grad_(False).router[E:] = -9.0  # nobody chooses them in the run that traces the module
    compiled, x = compile_eager(module), torch.rand(5, H)
    torch.testing.assert_close(compiled(x), module(x))
    assert found(last_reports()[-1]) == ["batched_mm"]
    module.router[-1] = 9.0
    if errs:
        for run in (module, compiled):
            with pytest.raises(IndexError):
                run(x)
    else:
        torch.testing.assert_close(compiled(x), module(x))


def test_a_router_over_more_classes_than_experts_stays_an_error_where_weights_are_gathered():
    class Wider(Skipping):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = torch.topk(torch.softmax(F.linear(x, self.router), -1), K, dim=-1)
            return batched(self.block, x, weights, ids, lambda b, rows: rows)

    module, x = Wider(lambda ids: ids).requires_grad_(False), torch.rand(5, H)
    module.router[E] = -9.0
    compiled = compile_eager(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert last_reports()[-1].matches[0].router == "R3 softmax, top-k"
    module.router[E] = 9.0
    for run in (module, compiled):
        with pytest.raises(IndexError):
            run(x)


# Dense experts inside a model


def test_dense_experts_behind_a_linear_over_a_batch_are_found():
    """A batch [B, S, H] times a plain matrix reads as B matrices for S rows: it hides no block behind it."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.Linear(H, H, bias=False)
            self.block = Block(dense)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.before(x.view(2, -1, H))
            return self.block(hidden.reshape(-1, H))

    def dense(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        values, ids = torch.topk(logits, K, dim=1)
        scores = torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, ids, values).float()).to(x.dtype)
        rows = (x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)).view(E, -1, H)
        gate, up = torch.bmm(rows, b.gate_up_t).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), b.down_t).view(-1, H).reshape(E, -1, H).sum(dim=0)

    report = raised_agrees(Model(), torch.randn(38, H))
    assert found(report) == ["dense_bmm"] and not report.misses and report.matches[0].router is not None
