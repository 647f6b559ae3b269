"""Quantised experts stay as they are, in every formulation, and the report says that this is why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.testing import run_passes
from tests.fast_part import covering
from tests.passes.numerics import compile_eager
from tests.passes.spellings import Block, E, H, I, K, choose, offsets_of

CAPTURE = ["canonicalize", "find_moe", "raise_moe"]
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Stored(torch.nn.Module):
    """Weights in a small format: `dense()` and `at(ids)` make them floating where they are used."""

    def __init__(self, shape: tuple[int, int, int], kind: str) -> None:
        super().__init__()
        self.kind = kind
        weight = torch.randn(*shape) * shape[-1] ** -0.5
        scale = weight.abs().amax((1, 2), keepdim=True)
        self.register_buffer("scale", scale / {"fp8": 448.0, "int8": 127.0}.get(kind, 6.0))
        self.register_buffer("table", torch.tensor(FP4_VALUES))
        if kind == "fp8":
            stored = (weight / self.scale).to(torch.float8_e4m3fn)
        elif kind == "int8":
            stored = (weight / self.scale).round().to(torch.int8)
        else:  # mxfp4: two indices of the table in a byte
            index = (weight[..., None] / self.scale[..., None] - self.table).abs().argmin(-1)
            stored = (index[..., 0::2] | (index[..., 1::2] << 4)).to(torch.uint8)
        self.register_buffer("stored", stored)

    def floating(self, stored: Tensor, scale: Tensor) -> Tensor:
        if self.kind != "mxfp4":
            return stored.to(scale.dtype) * scale
        low, high = self.table[(stored & 15).int()], self.table[(stored >> 4).int()]
        return torch.stack([low, high], dim=-1).flatten(-2) * scale

    def dense(self) -> Tensor:
        return self.floating(self.stored, self.scale)

    def at(self, ids: Tensor | int) -> Tensor:
        return self.floating(self.stored[ids], self.scale[ids])


class Quantised(torch.nn.Module):
    def __init__(self, kind: str, spelling: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.spelling = Block(lambda b, x, logits: None), spelling
        self.gate_up, self.down = Stored((E, 2 * I, H), kind), Stored((E, H, I), kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(self, x, *choose(x, F.linear(x, self.block.router)))


def batched(m: Quantised, x: Tensor, weights: Tensor, ids: Tensor, of: Callable[[Stored, Tensor], Tensor]) -> Tensor:
    flat = ids.reshape(-1)
    gate, up = torch.bmm(of(m.gate_up, flat), x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    rows = torch.bmm(of(m.down, flat), (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (rows * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def gathered_first(m: Quantised, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return batched(m, x, weights, ids, lambda stored, flat: stored.at(flat))


def whole(m: Quantised, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return batched(m, x, weights, ids, lambda stored, flat: stored.dense()[flat])


def loop(m: Quantised, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for e in range(E):
        token, choice = torch.where(ids == e)
        gate, up = F.linear(x[token], m.gate_up.at(e)).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, m.down.at(e))
        result = result.index_add(0, token, rows * weights[token, choice, None])
    return result


def dense(m: Quantised, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    scores = torch.zeros(x.shape[0], E).scatter(1, ids, weights)
    gate, up = torch.bmm(x.expand(E, -1, -1), m.gate_up.dense().mT).chunk(2, -1)
    return torch.einsum("eth,te->th", torch.bmm(F.silu(gate) * up, m.down.dense().mT), scores)


def grouped(m: Quantised, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    _, perm = ids.flatten().sort(stable=True)
    offsets, rows = offsets_of(ids), x[perm // K].bfloat16()
    gate, up = torch._grouped_mm(rows, m.gate_up.dense().bfloat16().mT, offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, m.down.dense().bfloat16().mT, offs=offsets).to(x.dtype)
    return torch.zeros_like(x).index_add(0, perm // K, rows * weights.flatten()[perm][:, None])


@pytest.mark.parametrize(
    ("spelling", "kind"),
    covering(
        [gathered_first, whole, loop, dense, grouped],
        ["fp8", "int8", "mxfp4"],
    ),
)
def test_quantised_experts_are_refused_by_that_name_and_run_as_they_are(spelling: Callable[..., Tensor], kind: str):
    module, x = Quantised(kind, spelling).requires_grad_(False), torch.randn(7, H)
    after, report = run_passes(module, CAPTURE, x)
    assert not report.matches and "moepdl" not in str(after.graph)
    (miss,) = report.misses
    assert "the experts are quantised" in miss.reason and "stay with Inductor" in miss.hint
    assert miss.formulation == "none" or {"fp8": "float8_e4m3fn", "int8": "int8", "mxfp4": "int"}[kind] in miss.reason
    torch.testing.assert_close(compile_eager(module)(x), module(x), rtol=1e-4, atol=1e-5)


def test_weights_that_are_computed_or_chosen_by_integers_are_not_quantised():
    """An adapter on the weights, and experts brought into another order by an index."""

    def computed(b: Block, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = choose(x, logits)
        order = torch.arange(E - 1, -1, -1)
        gate_up = b.gate_up[order] + b.down.transpose(1, 2).repeat(1, 2, 1)[..., :H] * 0.1
        gate, up = torch.einsum("th,tkih->tki", x, gate_up[ids]).chunk(2, -1)
        return torch.einsum("tkh,tk->th", torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, b.down[ids]), weights)

    _, report = run_passes(Block(computed), CAPTURE, torch.randn(7, H))
    assert [match.formulation for match in report.matches] == ["gather_einsum"] and not report.misses


def test_a_map_of_choices_in_integers_is_no_reason_to_speak_of_quantised_experts():
    class Mapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.Parameter(torch.randn(E, H))
            self.weight = torch.nn.Parameter(torch.randn(E, H, H))

        def forward(self, x: Tensor) -> Tensor:
            logits = x @ self.router.T
            ids = torch.topk(torch.softmax(logits, -1), K)[1]
            chosen = torch.zeros(x.shape[0], E, dtype=torch.int32).scatter(1, ids, 1)
            _, best = torch.topk(chosen, 2, dim=0)
            return torch.einsum("ech,ehi->eci", x[best.T], self.weight)

    _, report = run_passes(Mapped(), ["canonicalize", "find_moe"], torch.randn(12, H))
    assert report.misses and not any("quantised" in miss.reason for miss in report.misses)
