"""Experts with biases, clamps, interleaved or swapped halves and weights in the middle: matched, and as accurate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_compiler.testing import run_passes
from tests.fast_part import covering
from tests.passes.numerics import compile_eager, raised_agrees

E, K, H, INNER = 6, 2, 24, 8
RAISE = ["canonicalize", "find_moe", "raise_moe"]


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def addcmul(gate: Tensor, up: Tensor) -> Tensor:
    """torchtitan's spelling."""
    gate, up = torch.clamp(gate, max=0.7), torch.clamp(up, min=-0.7, max=0.7)
    glu = gate * torch.sigmoid(1.702 * gate)
    return torch.addcmul(glu, glu, up)


def clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp_max(0.5)) * up.clamp(min=-0.5, max=0.5)


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


RULES = {
    gpt_oss: "silu(alpha=1.702,limit=0.7,shift=1.0)",
    addcmul: "silu(alpha=1.702,limit=0.7,shift=1.0)",
    clamped_silu: "silu(limit=0.5)",
    plain: "silu",
}


def interleaved(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[..., ::2], rows[..., 1::2]


def in_turns(rows: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = rows.view(*rows.shape[:-1], -1, 2).unbind(-1)
    return gate, up


def turned(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[..., 1::2], rows[..., 0::2]


def swapped(rows: Tensor) -> tuple[Tensor, Tensor]:
    up, gate = rows.chunk(2, dim=-1)
    return gate, up


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = rows.chunk(2, dim=-1)
    return gate, up


PACKINGS = {
    interleaved: "interleaved",
    in_turns: "interleaved",
    turned: "interleaved_up_gate",
    swapped: "up_gate",
    halves: None,
}
Activate = Callable[[Tensor, Tensor], Tensor]
Split = Callable[[Tensor], tuple[Tensor, Tensor]]


class Experts(nn.Module):
    """Packed weights [E, in, out] and biases [E, out], and the ways to run them; `run` is one of its methods."""

    def __init__(
        self, run: str, activate: Activate = gpt_oss, split: Split = interleaved, biases: str = "both"
    ) -> None:
        super().__init__()
        self.run, self.activate, self.split = run, activate, split
        self.router = nn.Parameter(torch.randn(E, H))
        self.first = nn.Parameter(torch.randn(E, H, 2 * INNER) * H**-0.5)
        self.first_bias = nn.Parameter(torch.randn(E, 2 * INNER)) if biases in ("both", "first") else None
        self.second = nn.Parameter(torch.randn(E, INNER, H) * INNER**-0.5)
        self.second_bias = nn.Parameter(torch.randn(E, H)) if biases in ("both", "second") else None

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(F.linear(x, self.router).float(), -1), K)
        return getattr(self, self.run)(x, weights.to(x.dtype), ids)

    def act(self, rows: Tensor) -> Tensor:
        return self.activate(*self.split(rows))

    def grouped(self, x: Tensor, weights: Tensor, ids: Tensor, inside: bool = False) -> Tensor:
        chosen, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(chosen.float(), bins=E, min=0, max=E - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        scale = weights.reshape(-1)[perm].unsqueeze(-1)
        rows = torch._grouped_mm(x[perm // K], self.first, offs=offsets)
        if self.first_bias is not None:
            rows = rows + self.first_bias[chosen]
        rows = self.act(rows)
        rows = torch._grouped_mm(rows * scale if inside else rows, self.second, offs=offsets)
        if self.second_bias is not None:
            rows.add_(self.second_bias.index_select(0, chosen))
        rows = rows if inside else rows * scale
        return torch.zeros_like(x).index_add(0, perm // K, rows)

    def megatron(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.grouped(x, weights, ids, inside=True)

    def gathered(self, x: Tensor, weights: Tensor, ids: Tensor, inside: bool = False) -> Tensor:
        flat, rows = ids.reshape(-1), x.repeat_interleave(K, 0)
        scale = weights.reshape(-1, 1)
        rows = torch.bmm(rows.unsqueeze(1), self.first[flat]).squeeze(1)
        rows = rows if self.first_bias is None else rows.add_(self.first_bias[flat])
        rows = self.act(rows) * scale if inside else self.act(rows)
        if self.second_bias is None:
            rows = torch.bmm(rows.unsqueeze(1), self.second[flat]).squeeze(1)
        else:
            rows = torch.baddbmm(self.second_bias[flat].unsqueeze(1), rows.unsqueeze(1), self.second[flat]).squeeze(1)
        rows = rows if inside else rows * scale
        return rows.view(-1, K, H).sum(1)

    def gathered_inside(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.gathered(x, weights, ids, inside=True)

    def columns(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """gpt-fast's form."""
        rows = torch.einsum("th,taho->tao", x, self.first[ids])
        rows = self.act(rows if self.first_bias is None else rows + self.first_bias[ids])
        rows = torch.einsum("tai,taih->tah", rows, self.second[ids])
        rows = rows if self.second_bias is None else rows + self.second_bias[ids]
        return torch.einsum("tah,ta->th", rows, weights)

    def dense(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """gpt-oss of transformers 4: every expert on every token."""
        scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, ids, weights)
        rows = torch.bmm(x.repeat(E, 1).view(E, -1, H), self.first)
        rows = self.act(rows if self.first_bias is None else rows + self.first_bias[..., None, :])
        if self.second_bias is None:
            rows = torch.bmm(rows, self.second)
        else:
            rows = torch.baddbmm(self.second_bias.unsqueeze(1), rows, self.second)
        return (rows * scores.transpose(0, 1).unsqueeze(-1)).sum(0)

    def dense_input(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Llama 4's form: the weight on the input."""
        scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, ids, weights)
        rows = torch.bmm(x.repeat(E, 1).view(E, -1, H) * scores.transpose(0, 1).unsqueeze(-1), self.first)
        rows = self.act(rows if self.first_bias is None else rows + self.first_bias[:, None])
        rows = torch.bmm(rows, self.second)
        return (rows if self.second_bias is None else rows + self.second_bias[:, None]).sum(0)

    def loop(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            rows = x[token] @ self.first[e]
            rows = self.act(rows if self.first_bias is None else rows + self.first_bias[e])
            rows = F.linear(rows, self.second[e].t(), None if self.second_bias is None else self.second_bias[e])
            y.index_add_(0, token, rows * weights[token, choice, None])
        return y


FORMULATION = {
    "grouped": "grouped_scatter",
    "megatron": "grouped_scatter",
    "gathered": "batched_mm",
    "gathered_inside": "batched_mm",
    "columns": "gather_einsum",
    "dense": "dense_bmm",
    "dense_input": "dense_bmm",
    "loop": "where_loop",
}
WITH_BIAS = ("grouped", "gathered", "columns", "dense", "loop")


def exact(module: nn.Module, x: Tensor) -> nn.Module:
    """Values for which the first products are exact in bfloat16: beside a clamp a rounding decides over a gradient."""
    with torch.no_grad():
        x.copy_(torch.randint(-2, 3, x.shape))
        for name in ("first", "first_bias"):
            if getattr(module, name, None) is not None:
                getattr(module, name).copy_(torch.randint(-2, 3, getattr(module, name).shape) / 8)
    return module


def inputs(run: str) -> Tensor:
    """Torch's grouped matmul is compiled in bfloat16 only."""
    return torch.randn(9, H).to(torch.bfloat16 if run in ("grouped", "megatron") else torch.float32)


def check(module: Experts, x: Tensor | None = None, tolerance: float | None = None) -> dict[str, object]:
    if x is None:
        x = inputs(module.run)
        if x.dtype is torch.bfloat16:
            module, tolerance = exact(module.bfloat16(), x), 4e-3  # type: ignore[assignment]
    report = raised_agrees(module, x, slack=tolerance)
    assert [match.formulation for match in report.matches] == [FORMULATION[module.run]], report.misses
    assert not report.matches[0].left_alone
    return report.matches[0].attributes


@pytest.mark.parametrize(("run", "biases"), covering(WITH_BIAS, ["both", "first", "second"]))
def test_biases(run, biases):
    found = check(Experts(run, biases=biases))
    assert found["biases"] == {"both": "gate, down", "first": "gate", "second": "down"}[biases]


@pytest.mark.parametrize("run", WITH_BIAS)
def test_biases_in_bfloat16(run):
    x = torch.zeros(33, H, dtype=torch.bfloat16)
    check(exact(Experts(run).bfloat16(), x), x, 4e-3)


@pytest.mark.parametrize(("activate", "run"), covering([*RULES], ["grouped", "gathered", "dense"]))
def test_activations_with_parameters(activate, run):
    assert check(Experts(run, activate))["activation"] == RULES[activate]


@pytest.mark.parametrize(("split", "run"), covering([*PACKINGS], ["grouped", "columns", "loop"]))
def test_packings(split, run):
    assert check(Experts(run, split=split)).get("packing") == PACKINGS[split]


@pytest.mark.parametrize("run", ["megatron", "gathered_inside"])
def test_weights_before_the_down_projection(run):
    assert check(Experts(run, biases="first"))["weight_at"] == "output"
    x = torch.zeros(33, H, dtype=torch.bfloat16)
    check(exact(Experts(run, biases="none").bfloat16(), x), x, 4e-3)


def test_dense_weights_on_the_input_without_a_bias():
    assert check(Experts("dense_input", plain, biases="none"), torch.randn(9, H))["weight_at"] == "input"


def test_interleaved_weights_are_views():
    """No operator of the raised graph has a result of the size of the weights, but views of them."""
    after, _ = run_passes(Experts("grouped").bfloat16(), RAISE, inputs("grouped"))
    for node in after.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        value, source = node.meta["val"], node.args[0].meta["val"]
        assert value.untyped_storage()._cdata == source.untyped_storage()._cdata
    assert not any("cat" in str(node.target) or "clone" in str(node.target) for node in after.graph.nodes)


def reason(module: nn.Module | Callable[..., Tensor], *inputs: Tensor) -> str:
    _, report = run_passes(module, RAISE, *inputs)
    assert report.matches == []
    return " | ".join(miss.reason for miss in report.misses)


@pytest.mark.parametrize("biases", ["both", "first", "second"])
def test_dense_weights_on_the_input_of_experts_with_a_bias_are_refused(biases):
    assert "weighted before experts with a bias" in reason(Experts("dense_input", biases=biases), torch.randn(9, H))


@pytest.mark.parametrize("run", ["megatron", "gathered_inside"])
def test_weights_before_a_down_projection_with_a_bias_are_refused(run):
    x = inputs(run)
    assert "whose bias it does not weight" in reason(Experts(run).to(x.dtype), x)


ACTIVATION_MISSES = {
    "gate is clamped from below, by -0.5": lambda g, u: F.silu(g.clamp(-0.5, 0.5)) * u.clamp(-0.5, 0.5),
    "up is clamped to -0.5..0.7": lambda g, u: F.silu(g.clamp(max=0.7)) * u.clamp(-0.5, 0.7),
    "gate is clamped to 0.7 and up is clamped to 0.5": lambda g, u: F.silu(g.clamp(max=0.7)) * u.clamp(-0.5, 0.5),
    "gate is clamped to 0.7 and up is not clamped": lambda g, u: F.silu(g.clamp(max=0.7)) * u,
    "addcmul does not give a + a * b": lambda g, u: torch.addcmul(F.silu(g), F.silu(g), u, value=2.0),
    "the gate is added to its product": lambda g, u: torch.addcmul(u, u, F.silu(g)),
    "the same half": lambda g, u: F.silu(g) * g,
    "not an activation": lambda g, u: F.silu(g) * u + u,
    "not one activated operand": lambda g, u: g * torch.sigmoid(u * 1.702) * u,
    "but a soft cap (tanh) on the way": lambda g, u: torch.tanh(g / 7) * 7 * torch.sigmoid(g) * (torch.tanh(u / 7) * 7),
    "a number minus or times up": lambda g, u: F.silu(g) * torch.add(u, 1.0, alpha=2.0),
}


@pytest.mark.parametrize("words", ACTIVATION_MISSES)
def test_activations_that_mean_something_else(words):
    assert words in reason(Experts("gathered", ACTIVATION_MISSES[words]), torch.randn(9, H))


class Strange(Experts):
    """Biases of other experts, of other ids, or that are no biases."""

    def __init__(self, how: str) -> None:
        super().__init__("strange")
        self.how = how

    def strange(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        flat, other = ids.reshape(-1), ids.flip(1).reshape(-1)
        rows = torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), self.first[flat]).squeeze(1)
        if self.how == "other ids":
            rows = rows + self.first_bias[other]
        elif self.how == "scaled":
            rows = torch.add(rows, self.first_bias[flat], alpha=0.5)
        elif self.how == "rows":
            rows = rows + rows.sin()
        elif self.how == "fp32":
            rows = rows + (self.first_bias.float() / 3)[flat]  # more digits than bfloat16 has
        elif self.how == "twice":
            rows = rows + self.first_bias[flat] + self.first_bias[flat]
        rows = torch.bmm(self.act(rows).to(x.dtype).unsqueeze(1), self.second[flat]).squeeze(1)
        return ((rows + self.second_bias[flat]) * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


@pytest.mark.parametrize(
    ("how", "words", "dtype"),
    [
        ("other ids", "bias is gathered by other ids", torch.float32),
        ("scaled", "bias is scaled (alpha)", torch.float32),
        ("rows", "not from a gather of the experts' bias", torch.float32),
        ("fp32", "bias is added in torch.float32, not in torch.bfloat16", torch.bfloat16),
        ("twice", "add is not the gate and up projection", torch.float32),
    ],
)
def test_what_is_added_and_is_no_bias(how, words, dtype):
    assert words in reason(Strange(how).to(dtype), torch.randn(9, H, dtype=dtype))


class Widened(nn.Module):
    """Products in bf16 and sums, activation and routing weights in fp32; biases that bf16 holds, or not."""

    def __init__(self, run: str, exact: bool = True, keeps: bool = False) -> None:
        super().__init__()
        self.run, self.keeps = run, keeps
        self.router = nn.Parameter(torch.randn(E, H).bfloat16())
        self.first = nn.Parameter((torch.randn(E, 2 * INNER, H) * H**-0.5).bfloat16())
        self.second = nn.Parameter((torch.randn(E, H, INNER) * INNER**-0.5).bfloat16())
        stored = torch.bfloat16 if exact else torch.float32
        self.first_bias = nn.Parameter((torch.randn(E, 2 * INNER) * 0.5).to(stored))
        self.second_bias = nn.Parameter((torch.randn(E, H) * 0.5).to(stored))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(F.linear(x, self.router).float(), -1), K)
        y = getattr(self, self.run)(x, weights, ids, self.first_bias.float(), self.second_bias.float())
        return y if self.keeps else y.to(x.dtype)

    def act(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return (F.silu(gate) * up).to(torch.bfloat16)

    def gathered(self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
        flat, rows = ids.reshape(-1), x.repeat_interleave(K, 0).unsqueeze(-1)
        act = self.act(torch.bmm(self.first[flat], rows).squeeze(-1).float() + first[flat])
        rows = torch.bmm(self.second[flat], act.unsqueeze(-1)).squeeze(-1) + second[flat]
        return (rows * weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    def dense(self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
        scores = torch.zeros(x.shape[0], E, dtype=torch.float32).scatter_(1, ids, weights)
        act = self.act(torch.matmul(x, self.first.mT) + first[:, None])
        rows = torch.bmm(act, self.second.mT) + second[:, None]
        return torch.einsum("eth,te->th", rows, scores)

    def loop(self, x: Tensor, weights: Tensor, ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32)
        for e in range(E):
            token, choice = torch.where(ids == e)
            act = self.act(F.linear(x[token], self.first[e]) + first[e])
            rows = F.linear(act, self.second[e]) + second[e]
            y.index_add_(0, token, rows * weights[token, choice, None])
        return y


@pytest.mark.parametrize("run", ["gathered", "dense", "loop"])
def test_biases_that_are_added_in_a_wider_dtype(run):
    x = torch.randn(33, H).bfloat16()
    report = raised_agrees(Widened(run), x)
    assert [match.formulation for match in report.matches] == [FORMULATION[run]], report.misses
    assert report.matches[0].attributes["biases"] == "gate, down"


@pytest.mark.parametrize("run", ["gathered", "dense", "loop"])
def test_biases_that_would_be_rounded_are_refused(run):
    x = torch.randn(9, H).bfloat16()
    assert "bias is added in torch.float32, not in torch.bfloat16" in reason(Widened(run, exact=False), x)
    assert (
        "the down bias is added in torch.float32, not in torch.bfloat16, and the result keeps torch.float32"
        in reason(Widened(run, keeps=True), x)
    )


@pytest.mark.parametrize("run", ["gathered", "dense", "loop"])
def test_biases_are_rounded_where_numerics_may_be_fast(run):
    module, x = Widened(run, exact=False, keeps=True), torch.randn(33, H).bfloat16()
    report = raised_agrees(module, x, compiled=compile_eager(module, numerics="fast"), slack=4e-3)
    assert [match.formulation for match in report.matches] == [FORMULATION[run]], report.misses
    told = [note for note in report.notes if note.startswith("numerics fast")]
    assert [words for note in told for words in ("gate and up", "down") if f"the {words} bias" in note] == [
        "gate and up",
        "down",
    ]
    assert all("test_expert_variants.py" in note for note in told)


class Flat(nn.Module):
    """dbrx, megablocks: the weights of all experts in one matrix [E * I, H], viewed; down is used as it is stored."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Parameter(torch.randn(E, H))
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(E * INNER, H) * H**-0.5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(F.linear(x, self.router), -1), K)
        stacks = [w.view(E, INNER, H) for w in (self.w1, self.v1, self.w2)]
        if self.how == "gathered":
            w1, v1, w2 = (stack[ids.reshape(-1)] for stack in stacks)
            rows = x.repeat_interleave(K, 0).unsqueeze(-1)
            act = F.silu(torch.bmm(w1, rows)) * torch.bmm(v1, rows)
            rows = torch.bmm(act.squeeze(-1).unsqueeze(1), w2).squeeze(1) * weights.reshape(-1, 1)
            return rows.view(-1, K, H).sum(1)
        y = torch.zeros_like(x)
        lists = [[w.squeeze(0) for w in stack.chunk(E, dim=0)] for stack in stacks]
        for e, (w1, v1, w2) in enumerate(zip(*lists, strict=True)):
            token, choice = torch.where(ids == e)
            rows = x[token]
            rows = ((F.silu(rows @ w1.t()) * (rows @ v1.t())) @ w2) * weights[token, choice, None]
            y.index_add_(0, token, rows)
        return y


@pytest.mark.parametrize("how", ["gathered", "loop"])
def test_flattened_weights_are_packed_views(how):
    module = Flat(how)
    report = raised_agrees(module, torch.randn(9, H))
    assert [match.attributes["layout"] for match in report.matches] == ["separate gate and up"]


@pytest.mark.parametrize(("experts", "k", "hidden", "inner"), [(40, 8, 44, 30), (60, 4, 20, 44), (160, 6, 36, 22)])
def test_sizes_that_divide_by_nothing(experts, k, hidden, inner, monkeypatch):
    for name, value in (("E", experts), ("K", k), ("H", hidden), ("INNER", inner)):
        monkeypatch.setitem(globals(), name, value)
    check(Experts("gathered"), torch.randn(5, hidden))


class Quantised(nn.Module):
    """Weights in few bits, turned into the model's dtype in forward, or multiplied as they are."""

    def __init__(self, dtype: torch.dtype, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Parameter(torch.randn(E, H))
        size = 127 if dtype is torch.int8 else 1
        self.register_buffer("first", (torch.rand(E, 2 * INNER, H) * size).to(dtype))
        self.register_buffer("second", (torch.rand(E, H, INNER) * size).to(dtype))
        self.register_buffer("scale", torch.full((E, 1, 1), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(F.linear(x, self.router), -1), K)
        flat, rows = ids.reshape(-1), x.repeat_interleave(K, 0).unsqueeze(-1)
        if self.how == "whole":
            first, second = (w.to(x.dtype)[flat] for w in (self.first, self.second))
        elif self.how == "scaled":
            first, second = ((w.to(x.dtype) * self.scale)[flat] for w in (self.first, self.second))
        else:
            first, second = (w[flat].to(x.dtype) * self.scale[flat] for w in (self.first, self.second))
        gate, up = torch.bmm(first, rows).squeeze(-1).chunk(2, -1)
        rows = torch.bmm(second, (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (rows * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


@pytest.mark.parametrize(
    ("dtype", "how"),
    covering([torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ["whole", "scaled", "gathered"]),
)
def test_quantised_experts_are_refused(dtype, how):
    assert "the experts are quantised" in reason(Quantised(dtype, how), torch.randn(9, H))


@pytest.mark.parametrize(
    ("implementation", "dtype"), covering(["grouped_mm", "batched_mm"], [torch.float32, torch.bfloat16])
)
def test_gpt_oss(implementation, dtype):
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(
        num_local_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=INNER, num_hidden_layers=1
    )
    config._experts_implementation = implementation
    module = modeling.GptOssMLP(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(1, 9, H, dtype=dtype)
    compiled = compile_eager(module)
    results = []
    for run in (module, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)[0]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *module.parameters()])])
    tolerance = 1e-4 if dtype is torch.float32 else 6e-2
    for mine, eager in zip(*results[::-1], strict=True):
        error = (mine.double() - eager.double()).norm()
        assert error <= tolerance * eager.double().norm()
    from moe_compiler import last_reports

    (match,) = last_reports()[-1].matches
    assert match.attributes["activation"] == "silu(alpha=1.702,limit=7.0,shift=1.0)"
    assert (match.attributes["packing"], match.attributes["biases"]) == ("interleaved", "gate, down")


@pytest.mark.parametrize("outside", [False, True])
def test_gpt_oss_with_sentinel_ids(outside):
    """Expert parallelism: ids beyond the experts have rows of zeros, whatever bias their clamped id gathers."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(num_local_experts=E, hidden_size=H, intermediate_size=INNER, num_hidden_layers=1)
    config._experts_implementation = "grouped_mm"
    experts = modeling.GptOssExperts(config)
    experts._is_expert_parallel = True
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.5)
    compiled = compile_eager(lambda *args: experts(*args))
    x, weights = torch.randn(9, H), torch.rand(9, K)
    ids = torch.rand(9, E).argsort(1)[:, :K]
    if outside:
        ids[::2, 1] = E
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, ids, weights), experts(x, ids, weights), rtol=1e-4, atol=1e-4)
    from moe_compiler import last_reports

    assert len(last_reports()[-1].matches) == 1


class Tunable(nn.Module):
    """The activation's numbers are attributes of the module: symbolic under dynamic=True."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.limit, self.shift = 1.702, 0.7, 1.0
        self.experts = Experts("gathered", self.activate)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + self.shift) * (gate * torch.sigmoid(gate * self.alpha))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


def test_an_activation_whose_numbers_change_is_compiled_again():
    from moe_compiler import last_reports

    module = Tunable()
    compiled = compile_eager(module, dynamic=True)
    for alpha, limit, shift in ((1.702, 0.7, 1.0), (1.5, 0.7, 1.0), (1.5, 0.9, 1.0), (1.5, 0.9, 0.25)):
        module.alpha, module.limit, module.shift = alpha, limit, shift
        for tokens in (5, 9):
            x = torch.randn(tokens, H)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
        (match,) = last_reports()[-1].matches
        assert match.attributes["activation"] == f"silu(alpha={alpha},limit={limit},shift={shift})"
