"""Blocks that look like one that the finder knows and compute another value: refused, or matched with the right one."""

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
from tests.passes.numerics import compile_eager
from tests.passes.spellings import Block, E, H, I, K, choose

T = 7


def einsum(
    b: Block, x: Tensor, weights: Tensor, ids: Tensor, keep: Callable[..., Tensor] = lambda t: t, at: str = ""
) -> Tensor:
    """The plain block; `keep` is applied to what `at` names."""
    of = {at: keep}

    def role(name: str, value: Tensor) -> Tensor:
        return of[name](value) if name in of else value

    x = role("x", x)
    gate = torch.einsum("ti,taoi->tao", x, role("gathered", b.gate[ids]))
    act = role("act", F.silu(gate) * torch.einsum("ti,taoi->tao", x, b.up[ids]))
    return torch.einsum("tai,ta->ti", role("rows", torch.einsum("tao,taio->tai", act, b.down[ids])), weights)


def loop(b: Block, x: Tensor, weights: Tensor, ids: Tensor, keep: Callable[..., Tensor] = lambda t: t) -> Tensor:
    result = torch.zeros_like(x)
    for e, m in enumerate(b.experts):
        token, choice = torch.where(ids == e)
        act = F.silu(F.linear(x[token], keep(m.w1.weight))) * F.linear(x[token], m.w3.weight)
        result = result.index_add(0, token, F.linear(act, m.w2.weight) * weights[token, choice, None])
    return result


def grouped(
    b: Block, x: Tensor, weights: Tensor, ids: Tensor, alpha: float = 1, counted: Callable[..., Tensor] = Tensor.float
) -> Tensor:
    ordered, perm = ids.flatten().sort(stable=True)
    counts = torch.histc(counted(ordered), E, 0, E - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[perm // K], b.gate_up.mT, offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, b.down.mT, offs=offsets) * weights.flatten()[perm][:, None]
    return torch.zeros_like(x).index_add(0, perm // K, rows, alpha=alpha)


def dense(b: Block, x: Tensor, scores: Tensor) -> Tensor:
    act = F.silu(torch.einsum("th,ehi->eti", x, b.gate_t)) * torch.einsum("th,ehi->eti", x, b.up_t)
    return torch.einsum("eth,te->th", torch.einsum("eti,eih->eth", act, b.down_t), scores)


def agrees(module: torch.nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> Report:
    """Compile without gradients, compare every result with the module's own, and give the report."""
    module.requires_grad_(False)
    expected = module(*inputs)
    got, report = _compiled(module, *inputs)
    for a, b in zip(_flat(got), _flat(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return report


def _compiled(module: torch.nn.Module, *inputs: Tensor) -> tuple[object, Report]:
    result = compile_eager(module)(*inputs)
    return result, last_reports()[-1]


def _flat(value: object) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)  # type: ignore[call-overload]


def reasons(report: Report) -> str:
    return "; ".join(miss.reason for miss in report.misses)


def fp8(t: Tensor) -> Tensor:
    return t.to(torch.float8_e4m3fn).to(t.dtype)


def bf16(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16).to(t.dtype)


class Rounded(torch.nn.Module):
    """Logits in fp32, rounded to bf16, of rows that lie close together: the rounding decides who is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(lambda b, x, logits: None, torch.bfloat16)
        spread = 1 + torch.arange(E)[:, None] * 5e-4
        self.router = torch.nn.Parameter(torch.randn(1, H) * spread)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.float(), self.router).to(torch.bfloat16)
        weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), K, -1)
        return einsum(self.block, x, weights.to(x.dtype), ids), ids


def test_a_rounding_before_the_softmax_decides_who_is_chosen():
    torch.manual_seed(0)
    report = agrees(Rounded(), torch.randn(64, H).bfloat16(), tolerance=3e-2)
    assert report.matches


def test_gate_and_up_in_another_dtype_than_down_are_refused():
    def mixed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        act = F.silu(torch.einsum("ti,taoi->tao", x, b.gate[ids])) * torch.einsum("ti,taoi->tao", x, b.up[ids])
        rows = torch.einsum("tao,taio->tai", act.bfloat16(), b.down.bfloat16()[ids])
        return torch.einsum("tai,ta->ti", rows.float(), weights)

    report = agrees(Block(mixed), torch.randn(T, H))
    assert not report.matches
    assert "gate and up compute in torch.float32, down in torch.bfloat16" in reasons(report)


@pytest.mark.parametrize(("at", "keep"), covering(["x", "gathered", "act", "rows"], [fp8, bf16]))
def test_a_fake_quantisation_stays(at: str, keep: Callable[..., Tensor]):
    report = agrees(Block(lambda b, x, l: einsum(b, x, *choose(x, l), keep, at)), torch.randn(T, H))
    assert bool(report.matches) == (at == "x")


@pytest.mark.parametrize("keep", [fp8, bf16])
def test_fake_quantised_matrices_of_a_loop_stay(keep: Callable[..., Tensor]):
    agrees(Block(lambda b, x, l: loop(b, x, *choose(x, l), keep)), torch.randn(T, H))


def test_a_rounding_that_type_promotion_widens_again_is_refused():
    def promoted(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        gate = torch.einsum("ti,taoi->tao", x, b.gate[ids]).bfloat16()
        act = F.silu(gate) * torch.einsum("ti,taoi->tao", x, b.up[ids])
        return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", act, b.down[ids]), weights)

    report = agrees(Block(promoted), torch.randn(T, H))
    assert not report.matches and "rounds to torch.bfloat16" in reasons(report)


@pytest.mark.parametrize("returned", [False, True])
def test_an_unsorted_top_k_is_replaced_only_where_nobody_sees_its_order(returned: bool):
    def unsorted(b: Block, x: Tensor, logits: Tensor):
        values, ids = torch.topk(logits.softmax(-1), 3, dim=-1, sorted=False)
        weights = values / values.sum(-1, keepdim=True)
        y = einsum(b, x, weights.to(x.dtype), ids)
        return (y, weights, ids) if returned else y

    (match,) = agrees(Block(unsorted), torch.randn(64, H)).matches
    assert (match.router is None) == returned


class WithIds(torch.nn.Module):
    def __init__(self, spelling: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.spelling = Block(lambda b, x, logits: None), spelling

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.spelling(self.block, x, weights, ids)


@pytest.mark.parametrize(
    "ids_of",
    [
        lambda ids: ids,
        lambda ids: ids.clamp(-1, E - 1),
        lambda ids: ids.clamp(0, E - 1),
        lambda ids: ids % E,
        lambda ids: ids % (E + 1) - 1,
    ],
    ids=["any", "clamped_to_the_last", "clamped", "modulo", "modulo_and_the_last"],
)
def test_a_negative_id_gathers_the_weights_of_an_expert_from_the_end(ids_of: Callable[..., Tensor]):
    module = WithIds(lambda b, x, weights, ids: einsum(b, x, weights, ids_of(ids)))
    assert agrees(module, torch.randn(T, H), torch.rand(T, K), torch.randint(-E, E, (T, K))).matches


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_an_id_beyond_the_experts_stays_an_error_where_weights_are_gathered(dtype: torch.dtype):
    module = WithIds(einsum)
    compiled = compile_eager(module)
    x, weights, ids = torch.randn(T, H), torch.rand(T, K), torch.randint(-E, E, (T, K)).to(dtype)
    torch.testing.assert_close(compiled(x, weights, ids), module(x, weights, ids))
    assert last_reports()[-1].matches
    for beyond in (E, -E - 1):
        ids[1, 0] = beyond
        for run in (module, compiled):
            with pytest.raises(IndexError):
                run(x, weights, ids)


def one_hot_loop(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    masks = F.one_hot(ids, E).permute(2, 1, 0)
    for e, expert in enumerate(b.experts):
        choice, token = torch.where(masks[e])
        result = result.index_add(0, token, expert(x[token]) * weights[token, choice, None])
    return result


def one_hot_single(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """One expert a token, with masks [T]."""
    weights, ids = weights[:, :1], ids[:, :1]
    result = torch.zeros_like(x)
    masks = F.one_hot(ids.squeeze(-1), E).bool()
    for e, expert in enumerate(b.experts):
        mask = masks[:, e]
        result[mask] = expert(x[mask]) * weights[mask]
    return result


def dense_encoded(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return dense(b, x, (F.one_hot(ids, E).to(x.dtype) * weights[..., None]).sum(1))


def dense_scattered(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return dense(b, x, torch.zeros(x.shape[0], E).scatter(1, ids[:, :1], weights[:, :1]))


def dense_scattered_choice(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A top-k of more scores than there are experts."""
    chosen = torch.topk(ids.new_zeros(x.shape[0], E + 1).scatter(1, ids[:, :1] % (E + 1), 1), 1).indices
    return dense(b, x, torch.zeros(x.shape[0], E).scatter(1, chosen, weights[:, :1]))


def dense_compared(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return dense(b, x, ((ids[..., None] == torch.arange(E)).to(x.dtype) * weights[..., None]).sum(1))


def selected(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Weights of experts by index_select, which takes no negative index."""
    flat, rows = ids.reshape(-1), x.repeat_interleave(K, 0)
    gate, up = torch.bmm(b.gate_up.index_select(0, flat), rows[:, :, None]).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(b.down.index_select(0, flat), (F.silu(gate) * up)[:, :, None]).squeeze(-1)
    return (rows * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def grouped_counted(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    ordered, perm = ids.flatten().sort(stable=True)
    offsets = torch.cumsum(torch.bincount(ordered, minlength=E), 0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[perm // K], b.gate_up.mT, offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, b.down.mT, offs=offsets) * weights.flatten()[perm][:, None]
    return torch.zeros_like(x).index_add(0, perm // K, rows)


def grouped_biased(b: Block, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Counts that leave out what is no expert, and a bias of each row's expert."""
    ordered, perm = ids.flatten().sort(stable=True)
    offsets = torch.cumsum(torch.histc(ordered.float(), E, 0, E - 1), 0, dtype=torch.int32)
    gate, up = (torch._grouped_mm(x[perm // K], b.gate_up.mT, offs=offsets) + b.gate_up_bias[ordered]).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, b.down.mT, offs=offsets) * weights.flatten()[perm][:, None]
    return torch.zeros_like(x).index_add(0, perm // K, rows)


# What eager raises for an id that is too large, and for a negative one where it is an error as well.
CHECKED = [
    (one_hot_loop, (E, -1)),
    (one_hot_single, (E, -1)),
    (dense_encoded, (E, -1)),
    (dense_scattered, (E, -1)),
    (dense_scattered_choice, (E,)),
    (selected, (E, -1)),
    (grouped_counted, (E, -1)),
    (grouped_biased, (E,)),
]


def with_ids(spelling: Callable[..., Tensor]) -> tuple[WithIds, tuple[Tensor, ...]]:
    dtype = torch.bfloat16 if spelling in (grouped_counted, grouped_biased) else torch.float32
    module = WithIds(spelling).to(dtype).requires_grad_(False)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return module, (torch.randn(T, H, dtype=dtype), torch.rand(T, K, dtype=dtype), ids)


@pytest.mark.parametrize(("spelling", "beyond"), CHECKED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_id_that_is_an_error_in_eager_stays_one_once_the_block_is_rewritten(spelling, beyond):
    module, (x, weights, ids) = with_ids(spelling)
    compiled = compile_eager(module)
    torch.testing.assert_close(compiled(x, weights, ids), module(x, weights, ids), rtol=3e-2, atol=3e-2)
    assert last_reports()[-1].matches
    for value in beyond:
        wrong = ids.clone()
        wrong[2, 0] = value
        for run in (module, compiled):
            with pytest.raises((RuntimeError, IndexError)):
                run(x, weights, wrong)


def test_the_error_of_an_id_names_the_operator_and_the_line_through_inductor_and_in_training():
    module, (x, weights, ids) = with_ids(one_hot_loop)
    module.requires_grad_(True)
    compiled = torch.compile(module, backend="moepdl", fullgraph=True)
    compiled(x, weights, ids).sum().backward()
    assert last_reports()[-1].status == "rewritten"
    ids[0, 0] = E
    with pytest.raises(RuntimeError, match=rf"one_hot: an expert's id is not in 0\.\.{E - 1} \(at .*test_refusals.py:"):
        compiled(x, weights, ids)


@pytest.mark.parametrize("spelling", [one_hot_loop, dense_encoded, dense_scattered, selected])
def test_ids_that_are_known_to_be_experts_are_not_checked(spelling):
    module = Block(lambda b, x, l: spelling(b, x, *choose(x, l)))
    after, report = run_passes(module, ("canonicalize", "find_moe", "raise_moe"), torch.randn(T, H))
    assert report.matches and "_assert_async" not in str(after.graph)


@pytest.mark.parametrize("encoded", [False, True])
def test_masks_of_flattened_ids_pick_pairs_and_are_no_masks_of_tokens(encoded: bool):
    """DeepSeek's training loop: tokens repeated K times, rows of pairs written, weighted and summed behind the loop."""

    def flat(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        chosen, rows = ids.view(-1), x.repeat_interleave(K, 0)
        masks = F.one_hot(chosen, E).bool().T if encoded else [chosen == e for e in range(E)]
        result = torch.zeros_like(rows)
        for e, expert in enumerate(b.experts):
            result[masks[e]] = expert(rows[masks[e]])
        return (result.view(-1, K, H) * weights[..., None]).sum(1)

    report = agrees(Block(flat), torch.randn(T, H))
    assert not report.matches and "they pick pairs and not tokens" in reasons(report)


def test_a_comparison_takes_any_ids():
    ids = torch.randint(-E, 2 * E, (T, K))
    assert agrees(WithIds(dense_compared), torch.randn(T, H), torch.rand(T, K), ids).matches


def test_a_loop_takes_any_ids():
    assert agrees(WithIds(loop), torch.randn(T, H), torch.rand(T, K), torch.randint(-E, E, (T, K))).matches


def test_a_sum_over_all_tokens_is_not_the_renormalisation():
    def globally(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        values, ids = torch.topk(logits.softmax(-1), K, dim=-1)
        return einsum(b, x, values / values.reshape(1, -1).sum(-1, keepdim=True), ids)

    (match,) = agrees(Block(globally), torch.randn(T, H)).matches
    assert match.router == "R3 softmax, top-k, then Inductor" and "their own sum" in match.router_why


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("alpha", {"alpha": 0.5}),
        ("clamped to 0..2", {"counted": lambda ids: ids.clamp(0, E - 2).float()}),
        ("rounded to torch.bfloat16", {"counted": lambda ids: ids.bfloat16()}),
    ],
)
def test_a_grouped_combine_or_count_of_another_kind_is_refused(words: str, options: dict):
    module = Block(lambda b, x, l: grouped(b, x, *choose(x, l), **options), torch.bfloat16)
    report = agrees(module, torch.randn(T, H).bfloat16(), tolerance=3e-2)
    assert not report.matches and words in reasons(report)


def test_a_clamp_that_changes_no_count_is_looked_through():
    module = Block(
        lambda b, x, l: grouped(b, x, *choose(x, l), counted=lambda i: i.clamp(0, E - 1).float()), torch.bfloat16
    )
    assert agrees(module, torch.randn(T, H).bfloat16(), tolerance=3e-2).matches


def test_a_scatter_that_multiplies_is_refused():
    def reduced(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        return dense(b, x, torch.zeros(x.shape[0], E).scatter(1, ids, weights, reduce="multiply"))

    report = agrees(Block(reduced), torch.randn(T, H))
    assert not report.matches and "reduces" in reasons(report)


def test_a_scatter_by_ids_that_may_repeat_an_expert_is_refused_with_what_helps():
    """Of two weights for one expert the scatter keeps one, and our operator adds both."""

    def scattered(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        ids = (torch.arange(x.shape[0])[:, None] + torch.arange(K) * E) % E
        weights = logits.softmax(-1).gather(1, ids)
        return dense(b, x, torch.zeros(x.shape[0], E).scatter(1, ids, weights))

    report = agrees(Block(scattered), torch.randn(T, H))
    (miss,) = report.misses
    assert miss.reason == "nothing shows that a token chooses an expert only once" and "topk" in miss.hint


@pytest.mark.parametrize("at", ["input", "output"])
def test_weights_that_are_summed_for_one_expert_may_not_stand_before_it(at: str):
    """A token that has an expert twice: E(a x + b x) is not a E(x) + b E(x), for weights on the output it is."""

    def encoded(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        ids = (torch.arange(x.shape[0])[:, None] + torch.arange(K) * E) % E
        scores = (F.one_hot(ids, E) * logits.softmax(-1).gather(1, ids).unsqueeze(-1)).sum(1)
        rows = x[None] * scores.T[..., None] if at == "input" else x.expand(E, -1, -1)
        gate, up = torch.bmm(rows, b.gate_up_t).chunk(2, -1)
        rows = torch.bmm(F.silu(gate) * up, b.down_t)
        return rows.sum(0) if at == "input" else (rows * scores.T[..., None]).sum(0)

    report = agrees(Block(encoded), torch.randn(T, H))
    assert bool(report.matches) == (at == "output")
    assert at == "output" or "only once" in reasons(report)


def test_ids_that_are_written_to_may_repeat_an_expert():
    def without_accumulation(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        ids[:, 1] = ids[:, 0]
        result = torch.zeros_like(x)
        for e, expert in enumerate(b.experts):
            token, choice = torch.where(ids == e)
            result[token] += weights[token, choice, None] * expert(x[token])
        return result

    def scattered(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        ids[:, 1] = ids[:, 0]
        return dense(b, x, torch.zeros(x.shape[0], E).scatter(1, ids, weights.flip(-1)))

    for spelling in (without_accumulation, scattered):
        # Which of two writes to one place stays is undefined: only that the block is refused counts.
        _, report = _compiled(Block(spelling).requires_grad_(False), torch.randn(T, H))
        assert not report.matches, spelling.__name__


def test_an_activation_that_writes_into_the_packed_matmul_is_named():
    def in_place(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        packed = torch.einsum("ti,taoi->tao", x, b.gate_up[ids])
        act = F.silu(packed[..., :I], inplace=True) * packed[..., I:]
        return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", act, b.down[ids]), weights)

    report = agrees(Block(in_place), torch.randn(T, H))
    assert not report.matches and "works in place" in reasons(report)


def written_rows(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, 1] = 2
    return ids


def written_narrow(ids: Tensor) -> Tensor:
    ids = ids.to(torch.int32)
    ids[0, 0] = 3
    return ids.long()


def written_flat(ids: Tensor) -> Tensor:
    flat = ids.view(-1).clone()
    flat[::2] = 1
    return flat.view(ids.shape)


@pytest.mark.parametrize(("write", "loop"), covering([written_rows, written_narrow, written_flat], [False, True]))
def test_a_write_into_a_part_of_a_copy_of_the_ids_counts(write, loop):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Parameter(torch.randn(E, H))
            self.gate_up = torch.nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
            self.down = torch.nn.Parameter(torch.randn(E, H, I) * I**-0.5)

        def forward(self, x: Tensor) -> Tensor:
            weights, ids = torch.topk(torch.softmax(F.linear(x, self.router), -1), K)
            ids = write(ids)
            if loop:
                y = torch.zeros_like(x)
                for e in range(E):
                    t, j = torch.where(ids == e)
                    gate, up = F.linear(x[t], self.gate_up[e]).chunk(2, -1)
                    y = y.index_add(0, t, F.linear(F.silu(gate) * up, self.down[e]) * weights[t, j, None])
                return y
            gate, up = torch.einsum("th,tkih->tki", x, self.gate_up[ids]).chunk(2, -1)
            rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down[ids])
            return (rows * weights[..., None]).sum(1)

    module, x = Module(), torch.randn(12, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))


class MaskedByInput(torch.nn.Module):
    """VitPose: every expert on all tokens, and the number of a sequence's data set says whose rows count."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(experts))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        numbers = numbers.view(-1, 1, 1)
        total = torch.zeros_like(x[..., :8])
        for number, expert in enumerate(self.experts):
            total = total + expert(x) * (numbers == number)
        return total


def test_experts_that_an_input_masks_are_named_with_their_line():
    report = agrees(MaskedByInput(), torch.randn(2, 5, 16), torch.tensor([0, 2]))
    (miss,) = report.misses
    assert "no choice among scores says whose rows are kept" in miss.reason and miss.step == "anchor"
    assert "total + expert(x) * (numbers == number)" in miss.at and "torch.where" in miss.hint


def test_one_mask_is_no_experts():
    """A padding mask looks the same, but for one number."""
    assert not agrees(MaskedByInput(1), torch.randn(2, 5, 16), torch.tensor([0, 2])).misses
