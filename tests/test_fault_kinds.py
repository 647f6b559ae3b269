"""The twelve kinds of fault that matchers of MoE blocks are known for, one small test each (or a few).

Each is a model as somebody would write it, in which an easy mistake of a compiler changes the result or loses a block.
Numbers are held to the accuracy rule (`tests/passes/numerics.py`) unless a test says otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.backend import last_reports, moepdl
from moe_compiler.report import Report
from tests.passes.numerics import compile_eager, raised_agrees

E, K, H, I, T = 8, 2, 16, 8, 19


class Moe(torch.nn.Module):
    """A router, experts by einsum over gathered weights, and whatever a test does around them.

    route(logits) -> (weights [T, K], ids [T, K]); forward(x [T, H]) -> y [T, H].
    """

    def __init__(self, route: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.route = route
        self.router = torch.nn.Parameter(torch.randn(E, H, dtype=dtype))
        self.gate_up = torch.nn.Parameter(torch.randn(E, 2 * I, H, dtype=dtype) * H**-0.5)
        self.down = torch.nn.Parameter(torch.randn(E, H, I, dtype=dtype) * I**-0.5)

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkih->tki", x, self.gate_up[ids]).chunk(2, dim=-1)
        rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down[ids])
        return torch.einsum("tkh,tk->th", rows, weights.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.route(F.linear(x, self.router)))


def softmax_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.softmax(logits, dim=-1), K, dim=-1)


class Around(torch.nn.Module):
    """A module around a block: `body(block, x)`."""

    def __init__(self, body: Callable[[Moe, Tensor], Tensor | tuple[Tensor, ...]], block: Moe | None = None) -> None:
        super().__init__()
        self.body, self.block = body, block if block is not None else Moe(softmax_topk)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.body(self.block, x)


def blocks(report: Report) -> int:
    return sum(match.count for match in report.matches if not match.left_alone)


# 1. Fragments: a graph that Dynamo breaks inside of a block holds no block, and the report says so.


class HitExperts(Moe):
    """transformers' default: a Python loop over the experts that were hit."""

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        masks = F.one_hot(ids, E).permute(2, 1, 0)
        for hit in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
            choice, token = torch.where(masks[hit[0]])
            gate, up = F.linear(x[token], self.gate_up[hit[0]]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down[hit[0]]) * weights[token, choice, None]
            result.index_add_(0, token, rows)
        return result


def test_a_fragment_is_never_counted_as_a_block_and_computes_what_eager_does():
    module, x = HitExperts(softmax_topk).requires_grad_(False), torch.randn(T, H)
    before = last_reports()
    compiled = torch.compile(module, backend=moepdl, options={"remainder": "eager"})
    torch.testing.assert_close(compiled(x), module(x))
    reports = [report for report in last_reports() if not any(report is old for old in before)]
    assert all(blocks(report) == 0 and report.status == "unchanged" for report in reports)
    broken = [fragment for report in reports for fragment in report.fragments]
    assert broken and all("test_fault_kinds.py" in fragment.where for fragment in broken)
    assert any("prepare" in fragment.remedy for fragment in broken)


# 2. Views and casts: anywhere, as long as they change nothing; a cast that rounds is no such thing.


def test_views_and_casts_that_change_nothing_hide_no_block():
    class Viewed(Moe):
        def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            x = x.view(1, -1, H).to(x.dtype).reshape(-1, H)[:]
            ids = ids.to(torch.int64).unsqueeze(0).squeeze(0).contiguous()
            y = super().experts(x, weights.reshape(-1).view(-1, K).float(), ids)
            return y.unsqueeze(1).flatten(0, 1).to(x.dtype)

    assert blocks(raised_agrees(Viewed(softmax_topk), torch.randn(T, H))) == 1


def test_a_cast_that_rounds_stays():
    class Rounded(Moe):
        def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return super().experts(x, weights.bfloat16().float(), ids)

    module, x = Rounded(softmax_topk).requires_grad_(False), torch.randn(T, H)
    ours, eager = compile_eager(module)(x), module(x)
    exact_rounding = Moe.experts(module, x, *softmax_topk(F.linear(x, module.router)))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, exact_rounding, rtol=1e-5, atol=1e-6)


# 3. Groups with negative biased scores: what fills the groups that were not kept decides who is chosen.


def group_limited(fill: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """DeepSeek-V3's rule: transformers 4 fills with 0, transformers 5 with -inf."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        choice = scores - 2.0  # a correction bias that makes every score negative
        best = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(dim=-1)
        kept = torch.topk(best, k=2, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best).scatter_(1, kept, 1).unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
        ids = torch.topk(choice.masked_fill(~mask.bool(), fill), k=K, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20), ids

    return route


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
def test_the_fill_of_groups_that_were_not_kept_is_kept(fill: float):
    torch.manual_seed(1)
    module, x = Moe(group_limited(fill)), torch.randn(T, H)
    logits = F.linear(x, module.router)
    zero, infinite = (group_limited(value)(logits)[1].sort(-1)[0] for value in (0.0, float("-inf")))
    assert (zero != infinite).any(-1).all()  # with a fill of 0 every token chooses what it should not
    if fill == 0.0:
        # All that is filled with 0 is tied, so which of them is chosen is not defined: the weights are checked instead.
        def with_ids(block: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = block.route(F.linear(x, block.router))
            return block.experts(x, weights, ids), ids

        y, ids = compile_eager(Around(with_ids, module.requires_grad_(False)))(x)
        assert not (ids[:, :, None] == infinite[:, None, :]).any()
        scores = F.linear(x, module.router).sigmoid().gather(1, ids)
        torch.testing.assert_close(
            y, module.experts(x, scores / scores.sum(-1, keepdim=True), ids), rtol=1e-5, atol=1e-5
        )
    else:
        assert blocks(raised_agrees(module, x)) == 1


# 4. Softmax before or after the choice: the weights differ by far more than a rounding.


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_order_of_softmax_and_choice_is_that_of_the_source(order: str):
    def before(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.softmax(-1), K, dim=-1)

    def after(logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = torch.topk(logits, K, dim=-1)
        return values.softmax(-1), ids

    module = Moe(before if order == "before" else after)
    report = raised_agrees(module, torch.randn(T, H))
    assert report.matches[0].router == ("R3 softmax, top-k" if order == "before" else "R4 top-k, softmax")
    logits = torch.randn(T, E)
    assert (before(logits)[0] - after(logits)[0]).abs().max() > 0.1


# 5. Write after read: the shared expert reads the tokens, and somebody then writes into them.


class Writes(torch.nn.Module):
    """The tokens (a copy of the input), the block and the shared expert, and a write into the tokens at `when`."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.block, self.shared, self.when = Moe(softmax_topk), torch.nn.Linear(H, H, bias=False), when

    def forward(self, x: Tensor) -> Tensor:
        tokens = x * 1.0
        if self.when == "between":
            y = self.block(tokens)
            tokens.mul_(0.5)
            return y + self.shared(tokens)
        if self.when == "added into":  # HiDream, Llama 4: the block's result goes into the shared expert's
            out = self.shared(tokens)
            return out.add_(self.block(tokens))
        y = self.block(tokens)
        shared = self.shared(tokens)
        tokens.copy_(y)  # the residual stream is overwritten
        return tokens + shared


@pytest.mark.parametrize("when", ["between", "added into", "after"])
def test_a_write_into_the_tokens_comes_after_everybody_has_read_them(when: str):
    module, x = Writes(when), torch.randn(T, H)
    if when == "added into":
        assert blocks(raised_agrees(module, x)) == 1
        return
    # Eager cannot differentiate a write into what it saved for the backward.
    module.requires_grad_(False)
    torch.testing.assert_close(compile_eager(module, require_match=1)(x), module(x), rtol=1e-5, atol=1e-5)


def test_a_write_while_the_block_reads_keeps_the_block_as_it_is():
    class WrittenWithin(Moe):
        def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            tokens = x * 1.0
            gate, up = torch.einsum("th,tkih->tki", tokens, self.gate_up[ids]).chunk(2, dim=-1)
            alias = tokens.view(-1)
            tokens.zero_()
            rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down[ids])
            return torch.einsum("tkh,tk->th", rows, weights) + alias.view(-1, H)

    module, x = WrittenWithin(softmax_topk).requires_grad_(False), torch.randn(T, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    report = last_reports()[-1]
    assert blocks(report) == 0 and any("writes into memory" in miss.reason for miss in report.misses)


# 6. Ties: any of equal scores may be chosen, and everything must then agree on which.


def test_among_tied_scores_forward_and_backward_choose_the_same():
    def with_choice(block: Moe, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = block.route(F.linear(x, block.router))
        return block.experts(x, weights, ids), weights, ids

    module = Around(with_choice)
    with torch.no_grad():
        module.block.router.copy_(module.block.router[:2].repeat(E // 2, 1))  # four times the same two rows
    x = torch.randn(T, H, requires_grad=True)
    y, weights, ids = compile_eager(module, require_match=1)(x)
    scores = F.linear(x, module.block.router).softmax(-1)
    chosen = scores.gather(1, ids)
    # A right choice: K different experts, whose scores are the K largest.
    assert (ids.sort(-1)[0].diff(dim=-1) > 0).all()
    torch.testing.assert_close(chosen.sort(-1)[0], scores.topk(K, dim=-1)[0].sort(-1)[0])
    torch.testing.assert_close(weights, chosen)
    expected = module.block.experts(x, chosen, ids)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    leaves, tangent = [x, *module.parameters()], torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, tangent), torch.autograd.grad(expected, leaves, tangent), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# 7. Experts without tokens, in memory that was never written.


@pytest.fixture
def nan_filled():
    """New memory holds NaN: what nobody writes shows."""
    previous = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = previous[0]
    torch.use_deterministic_algorithms(previous[1])


@pytest.mark.parametrize("formulation", ["gather_einsum", "grouped_mm", "one_hot_loop", "dense_bmm"])
def test_experts_without_tokens_give_zero_gradients_whatever_memory_held(formulation: str, nan_filled: None):
    from moe_compiler.testing import examples

    dtype = torch.bfloat16 if formulation == "grouped_mm" else torch.float32
    example = examples()[formulation](dtype, experts=E, top_k=K, hidden=H, intermediate=I)
    module = example.module
    with torch.no_grad():  # positive tokens, so that experts 0 and 1 win everywhere
        router = module.router.weight
        router.copy_(torch.tensor([4.0, 3.0, *[-1.0] * (E - 2)], dtype=dtype)[:, None].expand_as(router) / H)
    x = torch.rand(T, H).to(dtype)
    assert blocks(raised_agrees(module, x)) == 1
    y = compile_eager(module)(x.requires_grad_())
    packed = {name: p for name, p in module.named_parameters() if p.dim() == 3}
    single = {name: p for name, p in module.named_parameters() if name.startswith("experts.")}
    used = {**packed, **single}
    for (name, parameter), grad in zip(used.items(), torch.autograd.grad(y.sum(), list(used.values())), strict=True):
        assert grad.isfinite().all(), name
        empty = grad[2:] if parameter.dim() == 3 else grad if int(name.split(".")[1]) > 1 else grad[:0]
        assert empty.count_nonzero() == 0, name
        full = grad[:2] if parameter.dim() == 3 else grad if int(name.split(".")[1]) < 2 else None
        assert full is None or full.count_nonzero() > 0, name


# 8. Rows behind the last offset: of ids that belong to no expert here (other ranks, dropped tokens).


def test_rows_behind_the_last_offset_count_for_nothing(nan_filled: None):
    class Sharded(torch.nn.Module):
        """The experts of one rank: ids of E and above are other ranks' (as transformers writes it)."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_up = torch.nn.Parameter(torch.randn(E, 2 * I, H).bfloat16() * H**-0.5)
            self.down = torch.nn.Parameter(torch.randn(E, H, I).bfloat16() * I**-0.5)

        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            ordered, perm = ids.reshape(-1).sort()
            foreign = (ordered >= E).unsqueeze(-1)
            counts = torch.histc(ordered.float(), bins=E, min=0, max=E - 1)
            offsets = counts.cumsum(0, dtype=torch.int32)
            rows = x[perm // K].masked_fill(foreign, 0.0)
            gate, up = torch._grouped_mm(rows, self.gate_up.mT, offs=offsets).masked_fill(foreign, 0.0).chunk(2, -1)
            rows = torch._grouped_mm(F.silu(gate) * up, self.down.mT, offs=offsets)
            rows = (rows * weights.reshape(-1)[perm].unsqueeze(-1)).masked_fill(foreign, 0.0)
            return torch.zeros_like(x).index_add(0, perm // K, rows)

    module = Sharded()
    x = torch.randn(T, H).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(2 * E)[:K] for _ in range(T)])
    ids[3] = E + 1  # a token with no expert here at all
    weights = torch.rand(T, K).bfloat16().requires_grad_()
    y = compile_eager(module, require_match=1)(x, weights, ids)
    leaves = [x, weights, *module.parameters()]
    tangent = torch.randn(T, H).bfloat16()
    grads = torch.autograd.grad(y, leaves, tangent)
    here = (ids < E).double()[..., None]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    near = ids.clamp(max=E - 1)
    gate, up = torch.einsum("th,tkih->tki", wide[0], wide[2][near]).chunk(2, -1)
    exact = (torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, wide[3][near]) * wide[1][..., None] * here).sum(1)
    for ours, theirs in zip([y, *grads], [exact, *torch.autograd.grad(exact, wide, tangent.double())], strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= 2e-2 * theirs.norm()
    assert y[3].count_nonzero() == 0 and grads[0][3].count_nonzero() == 0
    assert grads[1][ids >= E].count_nonzero() == 0


# 9. An auxiliary loss reads logits, scores and ids beside the block.


def test_an_auxiliary_loss_keeps_what_it_reads_and_its_gradient():
    def with_loss(block: Moe, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, block.router)
        scores = logits.softmax(-1)
        weights, ids = torch.topk(scores, K, dim=-1)
        y = block.experts(x, weights, ids)
        share = F.one_hot(ids, E).to(scores.dtype).mean(dim=(0, 1))
        z_loss = torch.logsumexp(logits, dim=-1).square().mean()
        return y, E * (share * scores.mean(0)).sum() + 0.1 * z_loss, logits

    report = raised_agrees(Around(with_loss), torch.randn(T, H))
    assert blocks(report) == 1 and report.matches[0].router is not None


# 10. Jitter: training multiplies the tokens by noise, in place, so that the caller's tensor changes too.


@pytest.mark.parametrize("in_place", [True, False])
def test_jitter_draws_what_eager_draws_and_changes_what_eager_changes(in_place: bool):
    def jittered(block: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.empty_like(x).uniform_(0.9, 1.1)
        tokens = x.mul_(noise) if in_place else x * noise
        return block(tokens), tokens

    module = Around(jittered).requires_grad_(False)
    results = []
    for run in (module, compile_eager(module, require_match=1)):
        torch.manual_seed(7)
        x = torch.randn(T, H)
        held = x.clone()
        y, tokens = run(x)
        assert torch.equal(x, held) != in_place
        results.append((x, tokens, y))
    (x, tokens, y), (our_x, our_tokens, our_y) = results
    assert torch.equal(our_x, x) and torch.equal(our_tokens, tokens)
    torch.testing.assert_close(our_y, y, rtol=1e-5, atol=1e-6)


# 11. Activation checkpointing: the recompute of the backward chooses the experts that the forward chose.


def test_the_recompute_of_a_checkpoint_chooses_what_the_forward_chose():
    def checkpointed(block: Moe, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    block = Moe(softmax_topk)
    with torch.no_grad():
        block.router.copy_(block.router[:2].repeat(E // 2, 1))  # ties: a second choice could differ from the first
    plain = copy.deepcopy(block)
    compiled = compile_eager(Around(checkpointed, block), require_match=1)
    beside = compile_eager(Around(lambda own, x: own(x), plain), require_match=1)
    x = torch.randn(T, H, requires_grad=True)
    tangent = torch.randn(T, H)
    y, expected = compiled(x), beside(x)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y, [x, *block.parameters()], tangent)
    theirs = torch.autograd.grad(expected, [x, *plain.parameters()], tangent)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("formulation", ["one_hot_loop", "where_loop"])
def test_a_loop_with_rows_that_only_data_counts_is_found_inside_of_a_checkpoint(formulation: str):
    from moe_compiler.testing import examples

    block = examples()[formulation](torch.float32, experts=4, top_k=K, hidden=H, intermediate=I).module

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    module, x, tangent = Checkpointed(), torch.randn(T, H, requires_grad=True), torch.randn(T, H)
    leaves = [x, *module.parameters()]
    outputs = [run(x) for run in (compile_eager(module, require_match=1), module)]
    ours, theirs = (torch.autograd.grad(y, leaves, tangent) for y in outputs)
    for mine, other in zip([outputs[0], *ours], [outputs[1], *theirs], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


# 12. No tokens, and one token.


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens: int, dynamic: bool | None):
    module = Moe(softmax_topk)
    compiled = compile_eager(module, require_match=1, dynamic=dynamic)
    if dynamic:
        compiled(torch.randn(5, H))
    x = torch.randn(tokens, H, requires_grad=True)
    y = compiled(x)
    assert y.shape == (tokens, H)
    ours = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    theirs = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert all(grad.count_nonzero() == 0 for grad in ours) == (tokens == 0)
