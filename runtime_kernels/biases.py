"""The biases of all experts of one projection, in the layouts that models keep them in.

An operator takes a list of tensors: none at all (no bias), one [E, out] (packed), or E vectors [out] (one an expert).
Strides are free: `bias[:, ::2]` is the packed bias of every other row. Nothing is copied. The bias of gate and up in
turns is [E, 2, I], as its weights are [E, 2, I, in] (see `weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_compiler.runtime_kernels.weights import WeightLayoutError, in_turns, stored_in_turns


class ExpertBiases:
    """A view of a list of expert biases as E vectors [out].

    experts, size   E and out
    is_packed       one 2-D or 3-D tensor, not one tensor an expert
    turns           a vector is that of gate and up in turns: the list held a 3-D tensor
    tensors         the list; a packed tensor is 2-D here, in the order of its memory
    Raises WeightLayoutError when the list is of no known form; `check` compares the tensors of a list.
    """

    __slots__ = ("dtype", "experts", "is_packed", "size", "tensors", "turns", "what")

    def __init__(self, tensors: Sequence[Tensor], what: str = "expert biases") -> None:
        self.turns = tensors[0].dim() == 3
        if self.turns:
            tensors = [stored_in_turns(tensor, what) for tensor in tensors]
        first = tensors[0]
        self.what, self.tensors, self.dtype = what, tensors, first.dtype
        self.is_packed = first.dim() == 2
        if first.dim() not in (1, 2):
            raise WeightLayoutError(
                f"{what}: expected one tensor [E, out] or [E, 2, I], or E tensors [out], got shape {tuple(first.shape)}"
            )
        if self.is_packed and len(tensors) != 1:
            raise WeightLayoutError(f"{what}: a packed 2-D tensor must come alone, got {len(tensors)} tensors")
        self.experts = first.shape[0] if self.is_packed else len(tensors)
        self.size = first.shape[-1]

    def check(self) -> None:
        """Raise WeightLayoutError unless all tensors agree."""
        first = self.tensors[0]
        for e, tensor in enumerate(self.tensors):
            if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.device != first.device:
                raise WeightLayoutError(
                    f"{self.what}: expert {e} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, expert 0 "
                    f"is {tuple(first.shape)} {first.dtype} on {first.device}; all experts must agree"
                )

    def as_given(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors like `tensors` in the shape of the list that this is a view of, views."""
        return [in_turns(tensor, 1) for tensor in tensors] if self.turns else tensors

    def vector(self, expert: int) -> Tensor:
        """The bias [out] of one expert, a view."""
        return self.tensors[0].select(0, expert) if self.is_packed else self.tensors[expert]


@dataclass(frozen=True)
class Biases:
    """The biases of the three projections, None where a projection has none."""

    gate: ExpertBiases | None
    up: ExpertBiases | None
    down: ExpertBiases | None

    @staticmethod
    def of(gate: Sequence[Tensor] | None, up: Sequence[Tensor] | None, down: Sequence[Tensor] | None) -> Biases:
        """Of the operators' three lists."""
        return Biases(biases(gate, "gate_bias"), biases(up, "up_bias"), biases(down, "down_bias"))


def biases(tensors: Sequence[Tensor] | None, what: str) -> ExpertBiases | None:
    """A list of biases as E vectors; None when there are none."""
    return ExpertBiases(tensors, what) if tensors else None


def vector(of: ExpertBiases | None, expert: int) -> Tensor | None:
    """The bias of one expert, None when there are none."""
    return None if of is None else of.vector(expert)


def as_columns(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Biases as expert matrices [out, 1], views: device code reads both by strides or by a table of addresses."""
    return [tensor.unsqueeze(-1) for tensor in tensors]


def add_rows(rows: Tensor, of: ExpertBiases | None, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """rows [S,out] in sorted order with each expert's bias added in place; `spans` are those of `expert_rows`."""
    if of is not None and spans:
        parts = rows[: spans[-1][2]].split([end - begin for _, begin, end in spans])
        for part, (expert, _, _) in zip(parts, spans, strict=True):
            part.add_(of.vector(expert))
    return rows
