"""What is written around and inside of a block elsewhere, and breaks matchers: kept exactly, and the block still found.

Computed weights, dropout, jitter, buffers, dtypes of ids, views and casts that do nothing, keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parametrize

from moe_compiler.backend import last_reports
from moe_compiler.report import Report
from tests.passes import spellings, spellings_sorted
from tests.passes.numerics import compile_eager, raised_agrees
from tests.passes.spellings import Block, E, H, I, K, choose

SPELLINGS = {**spellings.SPELLINGS, **spellings_sorted.SPELLINGS}
FEW = ("grouped_scatter", "batched_mm", "dense_bmm", "where_loop", "split_linear")


def dtype_for(name: str) -> torch.dtype:
    return torch.bfloat16 if name.startswith("grouped") else torch.float32


def block(name: str, **kwargs) -> Block:
    return Block(next(iter(SPELLINGS[name].values())), dtype_for(name), **kwargs)


def found(report: Report) -> list[str]:
    return [match.formulation for match in report.matches]


def reasons() -> str:
    return "; ".join(miss.reason for miss in last_reports()[-1].misses)


# Weights that are computed


class LowRank(torch.nn.Module):
    """W + A @ B, as a LoRA adapter that works on the weight, or any other parametrisation."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(*weight.shape[:-1], 2, dtype=weight.dtype) * 0.1)
        self.b = torch.nn.Parameter(torch.randn(*weight.shape[:-2], 2, weight.shape[-1], dtype=weight.dtype) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def adapted(name: str) -> Block:
    module = block(name)
    for owner in [module, *(linear for linear in module.experts.modules() if isinstance(linear, torch.nn.Linear))]:
        for key, weight in list(owner.named_parameters(recurse=False)):
            if weight.dim() > 1 and key != "router":
                parametrize.register_parametrization(owner, key, LowRank(weight))
    return module


@pytest.mark.parametrize("name", FEW)
def test_weights_under_a_parametrisation_are_computed_in_each_call(name):
    module, x = adapted(name), torch.randn(19, H, dtype=dtype_for(name))
    assert found(raised_agrees(module, x)) == [name]
    compiled = compile_eager(module)
    with torch.no_grad():
        before = compiled(x)
        for parameter in module.parameters():
            parameter.mul_(1.25)
        after = compiled(x)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[x.dtype]
        torch.testing.assert_close(after, module(x), rtol=tolerance, atol=tolerance)
    assert not torch.allclose(before, after)


def test_an_adapter_beside_the_expert_is_no_part_of_it():
    """LoRA as peft writes it: the result of the linear layer plus a product of its own."""

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        result = torch.zeros_like(x)
        for e, expert in enumerate(b.experts):
            token, choice = torch.where(ids == e)
            rows = x[token]
            up = F.linear(rows, expert.w3.weight) + rows @ b.gate_t[e][:, :2] @ b.up[e][:2, :I]
            rows = F.linear(F.silu(F.linear(rows, expert.w1.weight)) * up, expert.w2.weight)
            result = result.index_add(0, token, rows * weights[token, choice, None])
        return result

    module, x = Block(spelling), torch.randn(9, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    assert not last_reports()[-1].matches and "is not a bias of one row for all tokens" in reasons()


# Random numbers


def dropped(train: bool) -> Block:
    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        act = F.silu(torch.einsum("ti,taoi->tao", x, b.gate[ids])) * torch.einsum("ti,taoi->tao", x, b.up[ids])
        act = F.dropout(act, 0.5, training=train)
        return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", act, b.down[ids]), weights)

    return Block(spelling)


def test_dropout_inside_of_the_experts_stays():
    module, x = dropped(True), torch.randn(9, H)
    torch.manual_seed(3)
    ours = compile_eager(module)(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, module(x))
    assert not last_reports()[-1].matches and "dropout" in reasons()


def test_dropout_that_is_off_is_no_step():
    assert found(raised_agrees(dropped(False), torch.randn(9, H))) == ["gather_einsum"]


@pytest.mark.parametrize("name", FEW)
def test_jitter_alters_the_callers_tensor_as_eager_does(name):
    class Jittered(torch.nn.Module):
        """transformers multiplies the tokens in place while it trains; the caller's tensor is a view of them."""

        def __init__(self) -> None:
            super().__init__()
            self.block = block(name)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden *= torch.empty_like(hidden).uniform_(0.9, 1.1)
            return self.block(hidden.view(-1, H)).view(hidden.shape)

    module = Jittered()
    ours = torch.randn(2, 7, H, dtype=dtype_for(name))
    eager = ours.clone()
    with torch.no_grad():
        torch.manual_seed(5)
        y = compile_eager(module)(ours)
        torch.manual_seed(5)
        expected = module(eager)
    assert torch.equal(ours, eager)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[y.dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    assert found(last_reports()[-1]) == [name]


# Buffers


class Counted(torch.nn.Module):
    """torchtitan and DeepSeek count how many tokens each expert got, for the correction bias."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.block = block(name, around=self.count)
        self.register_buffer("tokens_per_expert", torch.zeros(E))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def count(self, b: Block, x: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        _, ids = choose(x, logits)
        with torch.no_grad():
            self.tokens_per_expert.add_(torch.histc(ids.float(), bins=E, min=0, max=E - 1))
            self.calls += 1
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.parametrize("name", FEW)
def test_buffers_that_count_are_neither_dropped_nor_doubled(name):
    module = Counted(name)
    compiled = compile_eager(module)
    expected = torch.zeros(E)
    for _ in range(3):
        x = torch.randn(11, H, dtype=dtype_for(name), requires_grad=True)
        compiled(x).sum().backward()
        _, ids = choose(x, F.linear(x, module.block.router))
        expected += torch.bincount(ids.flatten(), minlength=E)
    assert found(last_reports()[-1]) == [name]
    assert module.calls == 3
    assert torch.equal(module.tokens_per_expert, expected)


# Spellings that do nothing


def plain_steps(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """Views, copies and casts that change nothing at every place, all arguments by name."""
    x = x.view(-1, 1, H).squeeze(1).to(x.dtype).contiguous()
    scores = torch.softmax(logits.to(torch.float32), dim=-1).reshape(x.shape[0], E)
    values, ids = torch.topk(scores, k=K, dim=-1, largest=True, sorted=True)
    weights = torch.div(input=values, other=torch.sum(input=values, dim=-1, keepdim=True)).to(dtype=x.dtype)
    flat = ids.contiguous().reshape(-1).view(-1, 1).squeeze(-1)
    rows = torch.repeat_interleave(input=x, repeats=K, dim=0).reshape(-1, K, H).flatten(0, 1)
    first = torch.bmm(input=torch.index_select(input=b.gate_up, dim=0, index=flat), mat2=rows.unsqueeze(dim=-1))
    gate, up = torch.chunk(input=first.squeeze(dim=-1).clone(), chunks=2, dim=-1)
    act = torch.mul(input=F.silu(input=gate.contiguous()), other=up.to(up.dtype))
    rows = torch.bmm(input=b.down.index_select(dim=0, index=flat), mat2=act.unsqueeze(-1)).reshape(-1, H)
    rows = torch.mul(input=rows, other=weights.reshape(-1).unsqueeze(dim=1)).view(-1, K, H)
    return torch.sum(input=rows, dim=1).reshape(x.shape[0], H).to(x.dtype)


def integers(dtype: torch.dtype) -> Callable[[Block, Tensor, Tensor], Tensor]:
    """Ids in another integer dtype."""

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        ids = ids.to(dtype)
        result = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            result.index_add_(0, token.to(dtype).to(torch.int64), b.experts[e](x[token]) * weights[token, choice, None])
        return result

    return spelling


def scattered_loop(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """scatter_add with an index for every element, gather of the rows."""
    weights, ids = choose(x, logits)
    result = torch.zeros_like(x)
    for e in range(E):
        token, choice = torch.where(ids == e)
        index = token.unsqueeze(-1).expand(-1, H)
        rows = b.experts[e](torch.gather(x, 0, index)) * weights[token, choice, None]
        result = result.scatter_add(0, index, rows)
    return result


def masks(order: tuple[int, ...], letters: str) -> Callable[[Block, Tensor, Tensor], Tensor]:
    """one_hot in any order of its dimensions: [E, K, T], [E, T, K], [K, E, T], ..."""

    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        result = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=E).permute(*order)
        for e in range(E):
            found = dict(zip(letters.replace("e", ""), torch.where(mask.select(letters.index("e"), e)), strict=True))
            rows = b.experts[e](x[found["t"]]) * weights[found["t"], found["k"], None]
            result.index_add_(0, found["t"], rows)
        return result

    return spelling


def deepseek_inference(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """DeepSeek's inference code without the branch on empty experts: where on the ids, y[t] += rows."""
    weights, ids = choose(x, logits)
    y = torch.zeros_like(x)
    for e in range(E):
        token, top = torch.where(ids == e)
        y[token] += b.experts[e](x[token]) * weights[token, top, None]
    return y + b.shared(x)


def loop_of(
    b: Block,
    x: Tensor,
    logits: Tensor,
    compared: Callable[[Tensor], Tensor] = lambda ids: ids,
    zeros: Callable[[Tensor], Tensor] = torch.zeros_like,
    choice_first: bool = False,
) -> Tensor:
    """A loop that compares what `compared` makes of the ids, and adds to what `zeros` makes of the tokens."""
    weights, ids = choose(x, logits)
    result, ids = zeros(x), compared(ids)
    for e in range(E):
        found = torch.where(ids == e)
        token, choice = found[::-1] if choice_first else found
        result.index_add_(0, token, b.experts[e](x[token]) * weights[token, choice, None])
    return result


def transposed_ids(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    return loop_of(b, x, logits, compared=lambda ids: ids.t(), choice_first=True)


def stacked_and_transposed_ids(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    """The choices of all tokens one after another, [K, T], and only then transposed to [T, K]."""
    return loop_of(b, x, logits, compared=lambda ids: torch.stack([ids[:, k] for k in range(K)]).t())


def filled_with_zeros(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    return loop_of(b, x, logits, zeros=lambda x: torch.empty_like(x).fill_(0))


def zeroed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
    return loop_of(b, x, logits, zeros=lambda x: torch.empty_like(x).zero_())


PLAIN: dict[str, tuple[str, Callable[[Block, Tensor, Tensor], Tensor]]] = {
    "plain_steps": ("batched_mm", plain_steps),
    "int32": ("where_loop", integers(torch.int32)),
    "int64": ("where_loop", integers(torch.int64)),
    "scattered_loop": ("where_loop", scattered_loop),
    "masks_ekt": ("one_hot_loop", masks((2, 1, 0), "ekt")),
    "masks_etk": ("one_hot_loop", masks((2, 0, 1), "etk")),
    "masks_ket": ("one_hot_loop", masks((1, 2, 0), "ket")),
    "masks_tke": ("one_hot_loop", masks((0, 1, 2), "tke")),
    "deepseek_inference": ("where_loop", deepseek_inference),
    "transposed_ids": ("where_loop", transposed_ids),
    "stacked_and_transposed_ids": ("where_loop", stacked_and_transposed_ids),
    "filled_with_zeros": ("where_loop", filled_with_zeros),
    "zeroed": ("where_loop", zeroed),
}


@pytest.mark.parametrize("key", PLAIN)
def test_another_way_of_writing_the_same_step_is_the_same(key):
    name, spelling = PLAIN[key]
    assert found(raised_agrees(Block(spelling), torch.randn(19, H))) == [name]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_ids_that_are_compared_in_another_dtype_are_named(dtype):
    module = Block(lambda b, x, logits: loop_of(b, x, logits, compared=lambda ids: ids.to(dtype)))
    module, x = module.requires_grad_(False), torch.randn(9, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    assert not last_reports()[-1].matches and f"the ids are compared as {dtype}" in reasons()


def test_a_sum_that_starts_at_another_number_is_not_zeros():
    module = Block(lambda b, x, logits: loop_of(b, x, logits, zeros=lambda x: torch.empty_like(x).fill_(1)))
    module, x = module.requires_grad_(False), torch.randn(9, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    assert not last_reports()[-1].matches and "added to fill, not to zeros" in reasons()


@pytest.mark.parametrize(
    ("words", "add"),
    [
        ("replaces rows", lambda y, t, rows: y.index_put((t,), rows)),
        ("rows by scatter, which has no rule", lambda y, t, rows: y.scatter(0, t[:, None].expand(-1, H), rows)),
        ("another place", lambda y, t, rows: y.scatter_add(0, t[:, None].expand(-1, H // 2), rows)),
        (
            "rows by scatter_reduce, which has no rule",
            lambda y, t, rows: y.scatter_reduce(0, t[:, None].expand(-1, H), rows, "amax"),
        ),
        ("rows by index_copy, which has no rule", lambda y, t, rows: y.index_copy_(0, t, rows)),
        ("adds its rows times alpha=2", lambda y, t, rows: y.index_add(0, t, rows, alpha=2)),
        ("what slice makes of its tokens", lambda y, t, rows: y.index_add_(0, t[:2], rows[:2])),
        ("what remainder makes of its tokens", lambda y, t, rows: y.index_add_(0, t % 3, rows)),
        ("what add makes of its tokens", lambda y, t, rows: F.pad(y, (0, 0, 0, 1)).index_add_(0, t + 1, rows)[:-1]),
    ],
    ids=[
        *("index_put", "scatter", "half_of_the_columns", "scatter_reduce", "index_copy"),
        *("alpha", "slice", "remainder", "offset"),
    ],
)
def test_an_addition_of_another_kind_is_never_taken_for_one(words, add):
    def spelling(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        result = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            result = add(result, token, b.experts[e](x[token]) * weights[token, choice, None])
        return result

    module, x = Block(spelling).requires_grad_(False), torch.randn(9, H)
    torch.testing.assert_close(compile_eager(module)(x), module(x))
    assert not last_reports()[-1].matches and words in reasons()
