"""Every formulation: what it matches, in how many spellings, what it must refuse and at which step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.moe_ir import Miss
from moe_compiler.passes.formulations.registry import FORMULATIONS, formulation_names
from moe_compiler.report import Report
from moe_compiler.testing import capture_graph, examples, run_passes
from tests.fast_part import covering, first_of_each, one_in
from tests.passes import spellings, spellings_masks, spellings_sorted
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.spellings import Block, Damaged, E, H, I, K, _batched, choose

CAPTURE = ("canonicalize", "find_moe", "raise_moe")
NAMES = formulation_names()
SPELLINGS = {**spellings.SPELLINGS, **spellings_sorted.SPELLINGS, **spellings_masks.SPELLINGS}
DAMAGED = spellings.DAMAGED
# Their weights are made of more than a router's: it stays beside the block.
OWN_WEIGHTS = ("capacity", "drop_and_pad")
# torch's grouped matmul computes in bf16 alone when compiled for a CPU.
BF16_ALONE = ("grouped_mm", "grouped_scatter", "grouped_top1")
ALL_SPELLINGS = [(name, key) for name, spellings in SPELLINGS.items() for key in spellings]


def dtype_for(name: str) -> torch.dtype:
    return torch.bfloat16 if name in BF16_ALONE else torch.float32


def small(name: str, dtype: torch.dtype | None = None):
    return examples()[name](dtype or dtype_for(name), experts=E, top_k=K, hidden=H, intermediate=I)


def block(name: str, **kwargs) -> Block:
    """A module of the formulation whose router logits are at hand."""
    return Block(next(iter(SPELLINGS[name].values())), dtype_for(name), **kwargs)


def tokens(name: str, count: int = 5) -> Tensor:
    return torch.randn(count, H, dtype=dtype_for(name))


def found(report: Report) -> list[str]:
    return [match.formulation for match in report.matches]


def only(name: str) -> dict[str, object]:
    return {"disable": [other for other in NAMES if other != name]}


# What matches


@pytest.mark.parametrize(("name", "dynamic"), covering(NAMES, [None, True]))
def test_an_example_matches_its_own_formulation_once_and_no_other(name, dynamic):
    example = small(name)
    graph = capture_graph(example.module, *example.inputs(5), dynamic=dynamic)
    for other in NAMES:
        after, report = run_passes(graph, CAPTURE, options=only(other))
        assert found(report) == ([name] * example.blocks if other == name else [])
        assert bool(report.misses) == (other != name)
    after, report = run_passes(graph, CAPTURE)
    assert found(report) == [name] and not report.misses
    if name in OWN_WEIGHTS:
        assert report.matches[0].router.endswith("top-k, then Inductor") and report.matches[0].router_why
        return
    assert report.matches[0].router is not None
    called = {str(node.target) for node in after.graph.nodes if node.op == "call_function"}
    assert called <= {
        "aten.linear.default", "aten.transpose.int", "aten.sym_size.int", "moepdl.route.default",
        "moepdl.experts.default", "<built-in function getitem>", "aten.to.dtype",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    covering([name for name in NAMES if name not in BF16_ALONE], [torch.float32, torch.bfloat16])
    + [(name, torch.bfloat16) for name in BF16_ALONE],
)
def test_an_example_agrees_forward_and_backward(name, dtype):
    example = small(name, dtype)
    report = raised_agrees(example.module, *example.inputs(37))
    assert found(report) == [name]


@pytest.mark.parametrize("name", one_in(2, NAMES, 1))
def test_an_example_agrees_for_any_number_of_tokens(name):
    example = small(name)
    compiled = compile_eager(example.module, dynamic=True)
    for count in (7, 37, 2):
        report = raised_agrees(example.module, *example.inputs(count), compiled=compiled)
    assert found(report) == [name] and report.matches[0].sizes["T"].startswith("s")


@pytest.mark.parametrize(("name", "key"), one_in(3, ALL_SPELLINGS))
def test_a_spelling_agrees_forward_and_backward(name, key):
    module = Block(SPELLINGS[name][key], dtype_for(name))
    assert found(raised_agrees(module, tokens(name, 37))) == [name]


@pytest.mark.parametrize(("name", "key"), one_in(3, ALL_SPELLINGS, 1))
def test_a_spelling_matches_with_symbolic_sizes(name, key):
    module = Block(SPELLINGS[name][key], dtype_for(name))
    _, report = run_passes(module, CAPTURE, tokens(name), dynamic=True)
    assert found(report) == [name] and not report.misses


@pytest.mark.parametrize("name", one_in(2, [name for name in NAMES if name not in BF16_ALONE]))
def test_autocast_says_in_which_dtype_the_experts_compute(name):
    module = block(name)
    report = raised_agrees(
        module, tokens(name, 37), context=lambda: torch.autocast("cpu", dtype=torch.bfloat16), slack=1e-3
    )
    assert found(report) == [name] and report.matches[0].attributes["compute_dtype"] == "bfloat16"


def test_no_formulation_is_without_three_ways_of_writing_it():
    damaged = (*DAMAGED, *spellings_sorted.DAMAGED, *spellings_masks.DAMAGED)
    assert set(SPELLINGS) == set(NAMES) == {copy.formulation for copy in damaged} - {"none"}
    assert all(len(spellings) >= 2 for spellings in SPELLINGS.values())  # and the example itself
    assert all(formulation.summary and formulation.steps for formulation in FORMULATIONS)


# What is beside the block


def shared_expert(b: Block, x: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    out = b.shared(x)
    out.add_(y)
    return out


def balance_loss(b: Block, x: Tensor, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block, its logits, and an auxiliary loss that scores and chooses once more."""
    scores = torch.softmax(logits.float(), dim=-1)
    _, ids = torch.topk(scores, K, dim=-1)
    share = F.one_hot(ids, E).float().mean(dim=0)
    return y, logits, (share * scores.mean(dim=0)).sum() * E


@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_a_shared_expert_stays_beside_the_block(name):
    assert found(raised_agrees(block(name, around=shared_expert), tokens(name, 19))) == [name]


@pytest.mark.parametrize("name", one_in(2, NAMES, 1))
def test_logits_with_further_users_keep_them(name):
    report = raised_agrees(block(name, around=balance_loss), tokens(name, 19))
    assert found(report) == [name] and (report.matches[0].router is not None or name in OWN_WEIGHTS)


def test_scores_that_are_returned_stay_and_the_router_is_raised_all_the_same():
    class Returning(torch.nn.Module):
        """Llama 4 returns its dense scores; OLMoE its logits; some return softmax, weights and ids."""

        def __init__(self) -> None:
            super().__init__()
            self.block = Block(_batched)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            b = self.block
            scores = torch.softmax(F.linear(x, b.router).float(), dim=-1)
            weights, ids = torch.topk(scores, K, dim=-1)
            total = weights.sum(-1, keepdim=True)
            weights = weights / total
            first = torch.bmm(b.gate_up[ids.reshape(-1)], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
            gate, up = first.chunk(2, -1)
            rows = torch.bmm(b.down[ids.reshape(-1)], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return (rows * weights.reshape(-1, 1)).view(-1, K, H).sum(1), scores, total, weights, ids

    report = raised_agrees(Returning(), torch.randn(19, H))
    assert found(report) == ["batched_mm"] and report.matches[0].router is not None
    dense = Block(SPELLINGS["dense_bmm"]["broadcast_input"], around=lambda b, x, l, y: (y, torch.sigmoid(_kept(l))))
    assert found(raised_agrees(dense, torch.randn(19, H))) == ["dense_bmm"]


def _kept(logits: Tensor) -> Tensor:
    values, ids = torch.topk(logits, K, dim=1)
    return torch.full_like(logits, float("-inf")).scatter(1, ids, values)


@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_blocks_that_follow_one_another_directly_are_all_raised(name):
    """The second block's tokens are the first one's result itself, with nothing in between."""
    module = torch.nn.Sequential(block(name), block(name))
    after, report = run_passes(module, CAPTURE, tokens(name))
    assert found(report) == [name, name]
    raised = [node for node in after.graph.nodes if str(node.target) == "moepdl.experts.default"]
    assert len(raised) == 2
    assert name in OWN_WEIGHTS or sum(node.op == "call_function" for node in after.graph.nodes) < 20
    if name not in BF16_ALONE:  # in bf16 the second router may choose other experts than eager's, rightly
        assert found(raised_agrees(module, tokens(name, 11))) == [name, name]


def test_two_blocks_may_share_a_router():
    def both(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, 0)

        def run(first: Tensor, second: Tensor) -> Tensor:
            gate, up = torch.bmm(first[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
            out = torch.bmm(second[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)

        return run(b.gate_up, b.down) + run(b.gate_up_t.mT, b.down_t.mT)

    assert found(raised_agrees(Block(both), torch.randn(19, H))) == ["batched_mm", "batched_mm"]


def test_a_block_inside_of_activation_checkpointing_is_found():
    inner = block("batched_mm")

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    module, x = Checkpointed(), torch.randn(9, H, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = compile_eager(module, require_match=1)(x)
        torch.testing.assert_close(out, module(x))
        used = [p for p in inner.parameters() if any(p is q for q in (inner.router, inner.gate_up_t, inner.down_t))]
        grads = [torch.autograd.grad(result.sum(), used) for result in (out, module(x))]
        torch.testing.assert_close(*grads)


# What does not match


@pytest.mark.parametrize(
    "damaged", first_of_each(DAMAGED, lambda d: (d.formulation, d.step), lambda d: f"{d.formulation}-{d.name}")
)
def test_a_damaged_copy_never_matches_and_the_step_is_named(damaged: Damaged):
    x = torch.randn(5, H, dtype=damaged.dtype)
    _, report = run_passes(Block(damaged.spelling, damaged.dtype), CAPTURE, x)
    assert not report.matches
    (miss,) = report.misses
    assert (miss.formulation, miss.step) == (damaged.formulation, damaged.step)
    assert damaged.words in miss.reason
    assert miss.steps_passed < miss.steps_total
    assert "spellings.py" in miss.where and "spellings.py" in miss.at
    assert miss.hint


@pytest.mark.parametrize(("name", "source"), covering(NAMES, ["options", "environment"]))
def test_a_disabled_formulation_does_not_match_and_the_miss_says_by_what(name, source, monkeypatch):
    example, options = small(name), {"disable": [name]}
    if source == "environment":
        monkeypatch.setenv("MOEPDL_DISABLE", name)
        options = {}
    _, report = run_passes(example.module, CAPTURE, *example.inputs(5), options=options)
    (miss,) = report.misses
    assert not report.matches and (miss.formulation, miss.step) == (name, "disabled")
    by = "MOEPDL_DISABLE" if source == "environment" else 'options["disable"]'
    assert miss.reason == f"{name} is disabled by {by}" and miss.hint == "leave it out of that list"


def escaping(b: Block, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = choose(x, logits)
    gate = F.silu(torch.einsum("ti,taoi->tao", x, b.gate[ids]))
    up = torch.einsum("ti,taoi->tao", x, b.up[ids])
    rows = torch.einsum("tao,taio->tai", gate * up, b.down[ids])
    return torch.einsum("tai,ta->ti", rows, weights), gate


def test_a_value_that_leaves_the_inside_keeps_the_block_as_it_is():
    _, report = run_passes(Block(escaping), CAPTURE, torch.randn(5, H))
    (miss,) = report.misses
    assert not report.matches and miss.step == "closed" and "also used by output" in miss.reason


def overwritten(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    weights, ids = choose(x, logits)
    held = x * 2
    gate = F.silu(torch.einsum("ti,taoi->tao", held, b.gate[ids]))
    up = torch.einsum("ti,taoi->tao", held, b.up[ids])
    alias = held.view(-1)
    held.zero_()
    rows = torch.einsum("tao,taio->tai", gate * up, b.down[ids])
    return torch.einsum("tai,ta->ti", rows, weights) + alias.view(-1, H)


def test_tokens_that_are_overwritten_while_the_block_runs_keep_it_as_it_is():
    module = Block(overwritten)
    _, report = run_passes(module, CAPTURE, torch.randn(5, H))
    (miss,) = report.misses
    assert not report.matches and miss.step == "closed" and "writes into memory" in miss.reason
    x = torch.randn(5, H)
    with torch.no_grad():
        torch.testing.assert_close(compile_eager(module)(x), module(x))


def test_a_result_that_is_read_half_way_keeps_the_loop_as_it_is():
    def halfway(b: Block, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = choose(x, logits)
        result, seen = torch.zeros_like(x), None
        for e in range(E):
            token, choice = torch.where(ids == e)
            result = result.index_add(0, token, b.experts[e](x[token]) * weights[token, choice, None])
            if e == 1:
                seen = result.sum()
        return result, seen

    _, report = run_passes(Block(halfway), CAPTURE, torch.randn(5, H))
    assert not report.matches and report.misses[0].step == "closed"


def test_a_loop_that_writes_without_accumulating_needs_distinct_choices():
    def with_ids(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        ids = (logits[:, :K] * 100).long() % E  # the same expert may come twice
        weights = torch.softmax(logits[:, :K], -1)
        result = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            result[token] += weights[token, choice, None] * b.experts[e](x[token])
        return result

    _, report = run_passes(Block(with_ids), CAPTURE, torch.randn(5, H))
    (miss,) = report.misses
    assert not report.matches and miss.step == "accumulate" and "only once" in miss.reason


def test_masks_are_looked_through_only_where_they_are_those_of_missing_experts():
    def masked(limit: int, of_position: bool):
        def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
            weights, ids = choose(x, logits)
            ordered, perm = ids.flatten().sort(stable=True)
            mask = (torch.arange(perm.numel()) if of_position else ordered) >= limit
            offsets = torch.cumsum(torch.bincount(ids.flatten(), minlength=E), 0, dtype=torch.int32)
            rows = x[perm // K].masked_fill(mask[:, None], 0.0)
            gate, up = torch._grouped_mm(rows, b.gate_up.mT, offs=offsets).chunk(2, -1)
            rows = torch._grouped_mm(F.silu(gate) * up, b.down.mT, offs=offsets).masked_fill(mask[:, None], 0.0)
            return torch.zeros_like(x).index_add(0, perm // K, rows * weights.flatten()[perm][:, None])

        return Block(spelling, torch.bfloat16)

    x = torch.randn(5, H, dtype=torch.bfloat16)
    assert found(run_passes(masked(E, False), CAPTURE, x)[1]) == ["grouped_scatter"]
    for module in (masked(E - 1, False), masked(6, True)):  # a dropped expert, a capacity
        _, report = run_passes(module, CAPTURE, x)
        assert not report.matches and "another mask" in report.misses[0].reason


def test_tokens_weighted_in_a_wider_dtype_are_refused_unless_each_has_one_expert():
    """Raised, they would be rounded to bf16 before as well as after the weights."""
    _, report = autocast_dense(K)
    (miss,) = report.misses
    assert not report.matches and miss.step == "finish" and "only after that" in miss.reason
    after, report = autocast_dense(1)
    assert found(report) == ["dense_bmm"]
    assert any(str(node.target) == "aten.mul.Tensor" for node in after.graph.nodes)


def autocast_dense(top_k: int):
    example = examples()["dense_bmm"](torch.float32, E, top_k, H, I)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return run_passes(example.module, CAPTURE, *example.inputs(5))


def test_a_cast_behind_the_end_of_an_autocast_region_stays_outside():
    module = block("batched_mm")

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        return y.double()

    after, report = run_passes(run, CAPTURE, torch.randn(5, H))
    assert found(report) == ["batched_mm"]
    assert after.graph.output_node().all_input_nodes[0].target == torch.ops.aten.to.dtype


def test_a_result_of_several_dimensions_gets_its_shape_back():
    """Qwen3-VL sums over the experts of a [E, B, S, H] view."""

    def dense(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        scores = torch.zeros_like(logits).scatter_(1, ids, weights)
        gate, up = torch.bmm(x.repeat(E, 1).view(E, -1, H), b.gate_up_t).chunk(2, dim=-1)
        rows = torch.bmm(up * F.silu(gate), b.down_t).reshape(E, 2, -1, H)
        return (rows * scores.transpose(0, 1).view(E, 2, -1)[..., None]).sum(dim=0)

    module, x = Block(dense), torch.randn(6, H)
    out = compile_eager(module, require_match=1)(x)
    assert out.shape == (2, 3, H)
    torch.testing.assert_close(out, module(x))

    def batched(x: Tensor) -> Tensor:  # [B, S, H], both symbolic: more than one size would have to be inferred
        return dense_of_batch(module, x)

    _, report = run_passes(batched, CAPTURE, torch.randn(2, 3, H), dynamic=True)
    (miss,) = report.misses
    assert not report.matches and miss.step == "closed" and "several are symbolic" in miss.reason


def dense_of_batch(b: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, H)
    weights, ids = choose(flat, F.linear(flat, b.router))
    scores = torch.zeros(flat.shape[0], E).scatter_(1, ids, weights)
    gate, up = torch.bmm(flat.repeat(E, 1).view(E, -1, H), b.gate_up_t).chunk(2, dim=-1)
    rows = torch.bmm(up * F.silu(gate), b.down_t).reshape(E, x.shape[0], -1, H)
    return (rows * scores.transpose(0, 1).view(E, x.shape[0], -1)[..., None]).sum(dim=0)


def test_no_tokens_at_all_give_an_empty_result():
    for name in NAMES:
        example = small(name)
        out = compile_eager(example.module, require_match=1)(*example.inputs(0))
        assert out.shape == (0, H) and out.dtype == dtype_for(name)


def test_a_miss_is_a_result_and_not_an_error():
    miss = Miss("reason", None, "hint")
    assert (miss.reason, miss.node, miss.hint, str(miss)) == ("reason", None, "hint", "reason")


# Real models


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_a_transformers_block_matches(implementation):
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = implementation
    module = Qwen3MoeSparseMoeBlock(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    compiled = compile_eager(module, require_match=1)
    x = torch.randn(1, 7, H)
    torch.testing.assert_close(compiled(x), module(x))
    _, report = run_passes(module, CAPTURE, x)
    assert found(report) == [implementation] and report.matches[0].router is not None


def test_the_transformers_llama4_block_matches():
    from transformers.models.llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=1)
    module = Llama4TextMoe(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 7, H)
    torch.testing.assert_close(compile_eager(module, require_match=1)(x), module(x))
    _, report = run_passes(module, CAPTURE, x)
    (match,) = report.matches
    assert (match.formulation, match.router) == ("dense_bmm", "R7 top-k, sigmoid")
    assert match.attributes["weight_at"] == "input"
