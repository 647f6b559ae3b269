"""The masks that transformers writes for expert parallelism say what our operator says about ids out of range."""

from __future__ import annotations

import torch

from moe_compiler.backend import explain, moepdl
from tests.moe_compiler.blocks import assert_accurate


class MaskedGroupedExperts(torch.nn.Module):
    """Sorted rows and grouped matmuls with every row of an id >= E masked, as transformers 5.17 does."""

    def __init__(self, experts: int = 8, k: int = 2, hidden: int = 32, intermediate: int = 16) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.gate_up = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden).bfloat16() * 0.2)
        self.down = torch.nn.Parameter(torch.randn(experts, hidden, intermediate).bfloat16() * 0.2)

    def forward(self, x, ids, weights):
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        rows, scale = x[perm // self.k], weights.reshape(-1)[perm]
        counts = torch.histc(sorted_ids.float(), bins=self.experts, min=0, max=self.experts - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        mask = (sorted_ids >= self.experts).unsqueeze(-1)
        sorted_ids.clamp_(max=self.experts - 1)
        rows.masked_fill_(mask, 0.0)
        rows = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=offsets).masked_fill(mask, 0.0)
        gate, up = rows.chunk(2, dim=-1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=offsets)
        rows = (rows * scale.unsqueeze(-1)).masked_fill(mask, 0.0)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel())
        return rows[inverse].view(x.shape[0], self.k, -1).sum(1).to(x.dtype)


def exact(module, x, ids, weights):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            if ids[t, j] < module.experts:
                gate, up = (module.gate_up[ids[t, j]].double() @ x[t].double()).chunk(2)
                h = torch.nn.functional.silu(gate) * up
                y[t] += weights[t, j].double() * (module.down[ids[t, j]].double() @ h)
    return y


def test_masked_rows_match_and_count_for_nothing():
    module = MaskedGroupedExperts()
    x = torch.randn(9, 32).bfloat16()
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(9)])
    ids[2, 1], ids[5, 0], ids[5, 1] = 8, 8, 8
    weights = torch.rand(9, 2).bfloat16()
    with torch.no_grad():
        (match,) = explain(module, x, ids, weights).matches
        assert match.formulation == "grouped_mm" and match.router is None
        ours = torch.compile(module, backend=moepdl, options={"remainder": "eager"})(x, ids, weights)
        assert_accurate(ours, module(x, ids.clone(), weights), exact(module, x, ids, weights))
