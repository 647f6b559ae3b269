"""Problems whose offsets pass 32 bits: more than 2**31 elements in the rows of pairs, in the weights, in one expert's
matrix, in the logits.

Every stage is checked on samples in float64, with what the stage before it made as its input; among them are the first
and the last rows and columns, and the last ones are those whose offsets have passed 2**31. Results start as NaN, so a
row that was written elsewhere is seen as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import Tile

pytest.importorskip("triton", reason="the device kernels are written in triton, which is not installed")

pytestmark = pytest.mark.gpu

LIMIT = 2**31
# Relative to the norm of a sample: a rounding of the result to bfloat16.
TOLERANCE = 6e-3
GB = 2**30


@pytest.fixture(autouse=True)
def _memory_of_one_test(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 64 * GB:
        pytest.skip(f"needs 64 GiB of free device memory, there are {free / GB:.0f}")
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class Large:
    """Sizes of a block, and what of it is large. tile: instead of the kernels' own (their pointers, not boxes)."""

    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    turned: bool = False
    tile: Tile | None = None
    few: bool = False

    @property
    def pairs(self) -> int:
        return self.tokens * self.k


# Rows: pairs * hidden and pairs * 2 * inner pass the limit. The matrices of all experts; of one expert.
ROWS = Large(131_200, 8, 8, 2048, 1024)
WEIGHTS = Large(16_384, 8, 240, 2304, 4096)
MATRIX = {"tokens": 64, "k": 2, "experts": 2, "hidden": 32_768, "inner": 66_560}
POINTERS = Tile(64, 64, 64, stages=3)
CASES = {
    "rows": ROWS,
    "rows of matrices by columns": Large(131_200, 8, 8, 2048, 1024, turned=True),
    "rows by pointers": Large(131_200, 8, 8, 2048, 1024, tile=Tile(128, 64, 64, warps=8, stages=3, group=8)),
    "weights": WEIGHTS,
    "weights, some tokens": Large(512, 8, 240, 2304, 4096),
    "weights, few tokens": Large(4, 8, 240, 2304, 4096, few=True),
    "a matrix": Large(**MATRIX),
    "a matrix by pointers": Large(**MATRIX, tile=POINTERS),
    "a matrix, few tokens": Large(1, 2, 2, 32_768, 66_560, few=True),
}


def test_the_cases_are_large() -> None:
    assert min(ROWS.pairs * ROWS.hidden, ROWS.pairs * 2 * ROWS.inner) > LIMIT
    assert WEIGHTS.experts * WEIGHTS.hidden * WEIGHTS.inner > LIMIT
    assert MATRIX["hidden"] * MATRIX["inner"] > LIMIT


def sampled(size: int) -> Tensor:
    """The first, the last and some numbers below `size`, on the GPU."""
    ends = torch.cat([torch.arange(min(8, size)), torch.arange(max(size - 24, 0), size)])
    return torch.cat([ends, torch.randint(0, size, (32,))]).unique().cuda()


def values(*shape: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=std)


def unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def close(got: Tensor, want: Tensor, what: str) -> None:
    assert got.isfinite().all(), f"{what}: not written"
    error, norm = (got.double() - want).norm(), want.norm()
    assert error <= TOLERANCE * norm, f"{what}: error {error:.3g} of {norm:.3g}"


class Block:
    """A block's operands, and its stages run and checked one after the other."""

    def __init__(self, case: Large) -> None:
        self.case, self.e, self.k = case, case.experts, case.k
        self.gate = self.matrices(2 * case.inner, case.hidden)
        self.down = self.matrices(case.hidden, case.inner)
        self.x, self.grad_y = values(case.tokens, case.hidden), values(case.tokens, case.hidden)
        scores = torch.rand(case.tokens, case.experts, device="cuda")
        self.ids = scores.topk(case.k).indices
        self.w = torch.rand(case.tokens, case.k, device="cuda").add(0.1).bfloat16()
        self.perm = torch.empty(case.pairs, dtype=torch.int32, device="cuda")
        self.starts = torch.empty(case.experts + 1, dtype=torch.int32, device="cuda")
        counts = torch.empty(-(-case.pairs // 1024), case.experts, dtype=torch.int32, device="cuda")
        number = {"num_experts": case.experts}
        kernel("order_count").launch({"counts": counts}, {"ids": self.ids}, number, pdl=False)
        ordering = {"perm": self.perm, "starts": self.starts}
        kernel("order_scatter").launch(ordering, {"ids": self.ids, "counts": counts}, number, pdl=False)
        right = torch.sort(self.ids.flatten(), stable=True)
        assert torch.equal(self.perm.long(), right.indices)
        self.expert_of_row = right.values
        self.rows = sampled(case.pairs)
        self.hidden, self.inner = sampled(case.hidden), sampled(case.inner)
        self.pair = self.perm[self.rows].long()
        self.token = self.pair // self.k

    def matrices(self, out: int, inner: int) -> Tensor:
        """[E, out, inner], by columns where the case says so."""
        shape = (self.e, inner, out) if self.case.turned else (self.e, out, inner)
        made = values(*shape, std=inner**-0.5)
        return made.mT if self.case.turned else made

    def run(self, name: str, outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any]) -> None:
        ordering = {"perm": self.perm, "starts": self.starts}
        reads = kernel(name).traits.reads
        given = {key: (ins | ordering).get(key) for key in reads}
        told = {} if self.case.tile is None or name == "combine" else {"tile": self.case.tile}
        if name.endswith("_few"):
            told = {}
        kernel(name).launch(outs, given, attrs, pdl=True, **told)
        torch.cuda.synchronize()

    def by_expert(self) -> Iterator[tuple[int, Tensor]]:
        """(expert, which of the sampled rows are its)."""
        experts = self.expert_of_row[self.rows]
        for e in experts.unique().tolist():
            yield e, torch.nonzero(experts == e).flatten()

    def products(self, left: Tensor, matrix: Any) -> Tensor:
        """left [sampled rows, n] in float64 times matrix(expert) [m, n], row by row of its expert."""
        parts: list[Tensor] = []
        order: list[Tensor] = []
        for e, rows in self.by_expert():
            parts.append(left[rows].double() @ matrix(e).double().mT)
            order.append(rows)
        return torch.cat(parts)[torch.cat(order).argsort()]

    def forward(self) -> None:
        case, form = self.case, {"activation": "silu", "gated": True}
        first = {"x": self.x, "gate": [self.gate], "up": []}
        act, preact = unwritten(case.pairs, case.inner), unwritten(case.pairs, 2 * case.inner)
        self.run("gate_up", {"act": act, "preact": preact}, first, {"k": self.k, **form, "save": True})
        halves = [
            self.products(self.x[self.token], lambda e, at=at: self.gate[e][at]) for at in self.halves(self.inner)
        ]
        close(preact[self.rows][:, self.inner], halves[0], "gate")
        close(preact[self.rows][:, case.inner + self.inner], halves[1], "up")
        close(act[self.rows][:, self.inner], F.silu(halves[0]) * halves[1], "act")
        assert act.isfinite().all() and preact.isfinite().all()
        pairs = unwritten(case.pairs, case.hidden)
        self.run("down", {"pairs": pairs}, {"act": act, "down": [self.down]}, {})
        want = self.products(act[self.rows], lambda e: self.down[e][self.hidden])
        close(pairs[self.pair][:, self.hidden], want, "pairs")
        assert pairs.isfinite().all()
        self.combined(pairs, self.w)
        self.preact = preact

    def halves(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of gate, and of up, that belong to these columns."""
        return columns, self.case.inner + columns

    def combined(self, pairs: Tensor, weights: Tensor | None) -> None:
        y = unwritten(self.case.tokens, self.case.hidden)
        attrs = {"k": self.k, "dtype": y.dtype}
        self.run("combine", {"y": y}, {"pairs": pairs, "weights": weights}, attrs)
        tokens = sampled(self.case.tokens)
        rows = pairs.view(self.case.tokens, self.k, -1)[tokens].double()
        scale = 1.0 if weights is None else weights[tokens].double().unsqueeze(2)
        close(y[tokens], (rows * scale).sum(1), "combined")
        assert y.isfinite().all()

    def backward(self) -> None:
        case, form = self.case, {"activation": "silu", "gated": True}
        grad_preact, act = unwritten(case.pairs, 2 * case.inner), unwritten(case.pairs, case.inner)
        grad_w = unwritten(case.tokens, self.k, dtype=torch.float32)
        ins = {"grad_y": self.grad_y, "weights": self.w, "preact": self.preact, "down": [self.down]}
        outs = {"grad_preact": grad_preact, "act": act, "grad_weights": grad_w}
        self.run("grad_act", outs, ins, {"k": self.k, **form})
        scale = self.w.flatten()[self.pair].double().unsqueeze(1)
        given = self.products(self.grad_y[self.token], lambda e: self.down[e][:, self.inner].mT)
        saved = self.preact[self.rows]
        gate, up = (saved[:, at].double().requires_grad_() for at in self.halves(self.inner))
        total = F.silu(gate) * up
        slopes = torch.autograd.grad(total, [gate, up], given * scale)
        for at, want in zip(self.halves(self.inner), slopes, strict=True):
            close(grad_preact[self.rows][:, at], want, "grad_preact")
        close(act[self.rows][:, self.inner], (total * scale).detach(), "weighted act")
        assert grad_preact.isfinite().all() and act.isfinite().all() and grad_w.isfinite().all()
        if case.inner * case.hidden < LIMIT // 64:
            whole = self.products(self.grad_y[self.token], lambda e: self.down[e].mT)
            gate, up = saved.double().split(case.inner, 1)
            close(grad_w.flatten()[self.pair], (whole * F.silu(gate) * up).sum(1), "grad_weights")
        del self.preact
        pairs = unwritten(case.pairs, case.hidden)
        projections = {"gate": [self.gate], "up": []}
        self.run("grad_pairs", {"pairs": pairs}, {"grad_preact": grad_preact, **projections}, {"gated": True})
        want = self.products(grad_preact[self.rows], lambda e: self.gate[e][:, self.hidden].mT)
        close(pairs[self.pair][:, self.hidden], want, "grad_pairs")
        self.combined(pairs, None)
        scores = unwritten(case.tokens, self.k, dtype=torch.float32)
        kernel("grad_input_weights").launch(
            {"grad_weights": scores}, {"x": self.x, "pairs": pairs}, {"k": self.k}, pdl=True
        )
        want = (self.x[self.token].double() * pairs[self.pair].double()).sum(1)
        close(scores.flatten()[self.pair], want, "grad_input_weights")
        del pairs
        self.weight_gradients(grad_preact, act)

    def weight_gradients(self, grad_preact: Tensor, act: Tensor) -> None:
        """An expert's sums over all its rows, for some rows and columns of its matrices."""
        grad_down = torch.full_like(self.down, float("nan"))
        ins = {"grad_y": self.grad_y, "act": act, "down": [self.down]}
        self.run("grad_down", {"grad_down": [grad_down]}, ins, {"k": self.k})
        grad_gate = torch.full_like(self.gate, float("nan"))
        ins = {"x": self.x, "grad_preact": grad_preact, "gate": [self.gate], "up": []}
        self.run("grad_gate_up", {"grad_gate": [grad_gate], "grad_up": []}, ins, {"k": self.k, "gated": True})
        for e in (0, self.e - 1):
            begin, end = self.starts[e : e + 2].tolist()
            tokens = self.perm[begin:end].long() // self.k
            outer = self.grad_y[:, self.hidden][tokens].double().mT
            want = outer @ act[begin:end][:, self.inner].double()
            close(grad_down[e][self.hidden][:, self.inner], want, f"grad_down of expert {e}")
            inputs = self.x[:, self.hidden][tokens].double()
            for at in self.halves(self.inner):
                want = grad_preact[begin:end][:, at].double().mT @ inputs
                close(grad_gate[e][at][:, self.hidden], want, f"grad_gate of expert {e}")

    def few(self) -> None:
        case = self.case
        act, y = unwritten(case.pairs, case.inner), unwritten(case.tokens, case.hidden)
        form = {"activation": "silu", "gated": True}
        self.run("gate_up_few", {"act": act}, {"x": self.x, "ids": self.ids, "gate": [self.gate], "up": []}, form)
        gate, up = (
            self.products(self.x[self.token], lambda e, at=at: self.gate[e][at]) for at in self.halves(self.inner)
        )
        close(act[self.pair][:, self.inner], F.silu(gate) * up, "act")
        ins = {"act": act, "ids": self.ids, "weights": self.w, "down": [self.down]}
        self.run("down_few", {"y": y}, ins, {"dtype": y.dtype})
        want = torch.zeros(case.tokens, len(self.hidden), dtype=torch.float64, device="cuda")
        parts = self.products(act[self.pair], lambda e: self.down[e][self.hidden])
        want.index_add_(0, self.token, parts * self.w.flatten()[self.pair].double().unsqueeze(1))
        close(y[:, self.hidden], want, "y")


@pytest.mark.parametrize("name", CASES)
def test_a_block(name: str) -> None:
    block = Block(CASES[name])
    if CASES[name].few:
        block.few()
        return
    block.forward()
    block.backward()


@pytest.mark.parametrize("columns", [True, False], ids=["by columns", "by rows"])
def test_logits(columns: bool) -> None:
    """The choice and its gradient on more than 2**31 logits, kept by rows or by columns."""
    tokens, experts, k = 8_400_000, 256, 2
    assert tokens * experts > LIMIT
    shape = (experts, tokens) if columns else (tokens, experts)
    logits = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    logits = logits.mT if columns else logits
    attrs = {"score": "softmax", "order": "before", "renormalize": True, "clamp": False, "eps": 0.0, "scale": 1.0}
    attrs |= {"score_dtype": torch.float32}
    limits = {"k": k, "groups": 1, "kept_groups": 1, "group_top": 1, "fill": "-inf", "dtype": torch.bfloat16}
    weights = unwritten(tokens, k)
    ids = torch.full((tokens, k), -1, device="cuda")
    ins = {"logits": logits, "bias": None, "expert_scale": None}
    kernel("route").launch({"weights": weights, "ids": ids}, ins, attrs | limits, pdl=True)
    some = sampled(tokens)
    largest = torch.topk(logits[some].double(), k).values
    assert torch.equal(logits[some].double().gather(1, ids[some]), largest)
    assert (ids[some].sort(1).values.diff(dim=1) > 0).all()
    close(weights[some], torch.softmax(largest, 1), "weights")
    assert (ids >= 0).all() and weights.isfinite().all()
    grad, grad_logits = values(tokens, k), unwritten(tokens, experts)
    ins = {"grad_weights": grad, "logits": logits, "ids": ids, "expert_scale": None}
    kernel("route_backward").launch({"grad_logits": grad_logits}, ins, attrs, pdl=True)
    torch.cuda.synchronize()
    given = (grad[some].cpu().double(), logits[some].cpu().double(), ids[some].cpu(), None)
    wide = attrs | {"score_dtype": torch.float64}
    want = kernel("route_backward").reference(*given, **wide)
    want = want[0] if isinstance(want, tuple) else want
    close(grad_logits[some].cpu(), want, "grad_logits")
    assert grad_logits.isfinite().all()
