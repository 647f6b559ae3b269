"""Expert weights in every layout of a case, as the formulations read them and as plain [E, out, in] matrices.

packed                gate_up [E, 2I, H], down [E, H, I]
transposed            gate_up [E, H, 2I], down [E, I, H]
strided               packed, in memory that is [E, H, 2I] and [E, I, H]
separate              gate, up [E, I, H], down [E, H, I]
separate_transposed   gate, up [E, H, I], down [E, I, H]
flat                  gate, up, down [E * I, H], read as [E, I, H] (DBRX, MegaBlocks)
modules               E linear layers for each of gate, up and down
modules_packed        E linear layers for each of gate_up and down
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.properties.case import Case

IN_OUT = ("transposed", "separate_transposed")


class Linears(torch.nn.Module):
    """The linear layers of one expert, by role."""

    def __init__(self, widths: dict[str, tuple[int, int]], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        for role, (out, wide) in widths.items():
            self.add_module(role, torch.nn.Linear(wide, out, bias=bias, dtype=dtype))


class ExpertWeights(torch.nn.Module):
    """The parameters of all experts. `roles`: ("gate_up", "down"), ("gate", "up", "down") or ("up", "down")."""

    def __init__(self, c: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.c, self.compute = c, dtype
        stored = torch.float32 if c.weights == "cast" else dtype
        packed = c.layout in ("packed", "transposed", "strided", "modules_packed")
        first = ("gate_up",) if packed and c.gated else ("gate", "up") if c.gated else ("up",)
        self.roles = (*first, "down")
        self.modular = c.layout in ("modules", "modules_packed")
        widths = {"gate_up": (2 * c.inter, c.hidden), "gate": (c.inter, c.hidden), "up": (c.inter, c.hidden)}
        widths["down"] = (c.hidden, c.inter)
        if self.modular:
            own = {role: widths[role] for role in self.roles}
            self.experts = torch.nn.ModuleList(Linears(own, c.bias, stored) for _ in range(c.experts))
            return
        for role in self.roles:
            out, wide = widths[role]
            matrix = torch.randn(c.experts, out, wide) * wide**-0.5
            if c.layout in IN_OUT or (c.layout == "flat" and role == "down"):
                matrix = matrix.mT.contiguous()
            if c.layout == "strided":
                matrix = matrix.mT.contiguous().mT
            if c.layout == "flat":
                matrix = matrix.reshape(c.experts * c.inter, c.hidden)
            self.register_parameter(role, torch.nn.Parameter(matrix.to(stored)))
            if c.bias:
                self.register_parameter(
                    f"{role}_bias", torch.nn.Parameter((torch.randn(c.experts, out) * 0.3).to(stored))
                )
            if c.weights == "lora":
                shape = self.stacked_shape(role)
                self.register_parameter(f"{role}_a", torch.nn.Parameter(torch.randn(*shape[:2], 2).to(stored) * 0.2))
                self.register_parameter(
                    f"{role}_b", torch.nn.Parameter(torch.randn(shape[0], 2, shape[2]).to(stored) * 0.2)
                )

    def stacked_shape(self, role: str) -> tuple[int, int, int]:
        if self.c.layout == "flat":
            return self.c.experts, self.c.inter, self.c.hidden
        a, b, d = getattr(self, role).shape
        return a, b, d

    def in_out(self, role: str) -> bool:
        """Is `stacked(role)` [E, in, out]?"""
        return self.c.layout in IN_OUT or (self.c.layout == "flat" and role == "down")

    def stacked(self, role: str) -> Tensor:
        """All experts' matrices as one tensor, the way the model holds or computes them."""
        matrix = getattr(self, role)
        if self.c.layout == "flat":
            matrix = matrix.view(self.c.experts, self.c.inter, self.c.hidden)
        if self.c.weights == "lora":
            matrix = matrix + torch.bmm(getattr(self, f"{role}_a"), getattr(self, f"{role}_b"))
        return matrix.to(self.compute) if self.c.weights == "cast" else matrix

    def biases(self, role: str) -> Tensor | None:
        """[E, out], or None."""
        if not self.c.bias:
            return None
        bias = getattr(self, f"{role}_bias")
        return bias.to(self.compute) if self.c.weights == "cast" else bias

    def one(self, role: str, expert: int) -> tuple[Tensor, Tensor | None, bool]:
        """(matrix, bias, is the matrix [in, out]) of one expert."""
        if self.modular:
            layer = getattr(self.experts[expert], role)
            if self.c.weights == "cast":
                return layer.weight.to(self.compute), None if layer.bias is None else layer.bias.to(self.compute), False
            return layer.weight, layer.bias, False
        bias = self.biases(role)
        return self.stacked(role)[expert], None if bias is None else bias[expert], self.in_out(role)

    def plain(self, role: str) -> tuple[Tensor, Tensor | None]:
        """([E, out, in], [E, out] or None), for the float64 run."""
        if self.modular:
            layers = [getattr(expert, role) for expert in self.experts]
            bias = torch.stack([layer.bias for layer in layers]) if self.c.bias else None
            return torch.stack([layer.weight for layer in layers]), bias
        stacked = self.stacked(role)
        return stacked.mT if self.in_out(role) else stacked, self.biases(role)
