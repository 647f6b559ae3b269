"""The weights of all experts of one projection, in any of the layouts that models keep them in.

An operator takes a list of tensors: one 3-D tensor [E, out, in] (packed) or E 2-D tensors [out, in] (one an expert).
Strides are free: `[E, H, 2I].transpose(1, 2)` is a packed [E, 2I, H] tensor. Nothing is copied, ever.

gate and up in turns, as rows of one packed tensor, are a 4-D tensor [E, 2, I, in], half 0 gate and half 1 up: the view
`in_turns` of [E, 2I, in]. In memory the rows of gate and up are still neighbours, and kernels load them as one block.

Device kernels
reach the experts through a base address and a stride (packed) or through a table of addresses that is looked up by
the addresses themselves at each call, so weights that move are seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

# Entries are small (8 bytes an expert); the bound only stops a program whose weights move at every step.
_ENTRY_LIMIT = 1024
_entries: OrderedDict[tuple[object, ...], list[Tensor | None]] = OrderedDict()


class WeightLayoutError(ValueError):
    """Expert weights which do not form one of the layouts; the message says which tensor and why."""


class ExpertWeights:
    """A view of a list of expert weights as E matrices [out, in].

    experts      E
    out, inner   sizes of a matrix (out, in)
    is_packed    one 3-D or 4-D tensor, not one tensor an expert
    turns        the rows of a matrix are those of gate and up in turns: the list held a 4-D tensor
    tensors      the list; a packed tensor is 3-D here, in the order of its memory
    strides      (stride of out, stride of in) in elements, the same for every expert
    expert_stride  elements from one expert to the next when packed, else 0
    dtype, device
    Raises WeightLayoutError when the list is of no known form. The tensors of a list are compared by `check` and
    by `pointers`, not here.
    """

    __slots__ = (
        "device",
        "dtype",
        "expert_stride",
        "experts",
        "inner",
        "is_packed",
        "out",
        "strides",
        "tensors",
        "turns",
        "what",
    )

    def __init__(self, tensors: Sequence[Tensor], what: str = "expert weights") -> None:
        if not tensors:
            raise WeightLayoutError(f"{what}: the list of weights is empty")
        first = tensors[0]
        self.turns = first.dim() == 4
        if self.turns:
            tensors = [stored_in_turns(tensor, what) for tensor in tensors]
            first = tensors[0]
        self.what = what
        self.tensors = tensors
        self.dtype = first.dtype
        self.device = first.device
        self.is_packed = first.dim() == 3
        if self.is_packed:
            if len(tensors) != 1:
                raise WeightLayoutError(f"{what}: a packed 3-D tensor must come alone, got {len(tensors)} tensors")
            self.experts, self.out, self.inner = first.shape
            self.expert_stride, *strides = first.stride()
            self.strides = (strides[0], strides[1])
            return
        if first.dim() != 2:
            raise WeightLayoutError(
                f"{what}: expected one tensor [E, out, in] or [E, 2, I, in], or E tensors [out, in], "
                f"got shape {tuple(first.shape)}"
            )
        self.experts = len(tensors)
        self.out, self.inner = first.shape
        self.strides = (first.stride(0), first.stride(1))
        self.expert_stride = 0

    def check(self) -> None:
        """Raise WeightLayoutError when the experts differ in shape, strides, dtype or device.

        Remembered by the experts' addresses: a look at every tensor at every call would cost more than a launch.
        """
        self._entry()

    def _entry(self) -> list[Tensor | None]:
        """The cache entry of these addresses, a cell for the table of addresses; the layout is checked when new."""
        key = self._key()
        entry = _entries.get(key)
        if entry is None:
            self._compare()
            entry = _entries[key] = [None]
            if len(_entries) > _ENTRY_LIMIT:
                _entries.popitem(last=False)
        else:
            _entries.move_to_end(key)
        return entry

    def _key(self) -> tuple[object, ...]:
        layout = (self.device, self.dtype, self.experts, self.out, self.inner, self.strides, self.expert_stride)
        return (*layout, *map(Tensor.data_ptr, self.tensors))

    def _compare(self) -> None:
        if self.is_packed:
            return
        what, first = self.what, self.tensors[0]
        for e, tensor in enumerate(self.tensors):
            if tensor.shape != first.shape or tensor.stride() != self.strides:
                raise WeightLayoutError(
                    f"{what}: expert {e} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
                    f"expert 0 has {tuple(first.shape)} and {self.strides}; all experts must agree"
                )
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise WeightLayoutError(
                    f"{what}: expert {e} is {tensor.dtype} on {tensor.device}, "
                    f"expert 0 is {self.dtype} on {self.device}; all experts must agree"
                )

    def matrix(self, expert: int) -> Tensor:
        """The [out, in] matrix of one expert, a view."""
        return self.tensors[0].select(0, expert) if self.is_packed else self.tensors[expert]

    def matrices(self) -> Sequence[Tensor]:
        """All E matrices [out, in], views."""
        return self.tensors[0].unbind(0) if self.is_packed else self.tensors

    def empty_like(self) -> list[Tensor]:
        """Uninitialised tensors with the shapes and, where dense, the strides of `tensors`."""
        return [torch.empty_like(tensor) for tensor in self.tensors]

    def as_given(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors like `tensors` in the shape of the list that this is a view of, views."""
        return [in_turns(tensor, 1) for tensor in tensors] if self.turns else tensors

    def pointers(self) -> Tensor:
        """int64 [E] on the weights' device: the address of each expert's first element. Cached by address.

        Raises WeightLayoutError as `check` does, and RuntimeError when the table is not cached yet while a CUDA graph
        is being captured.
        """
        entry = self._entry()
        if entry[0] is not None:
            return entry[0]
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the address table of the expert weights is not built yet and a CUDA graph is being captured: "
                "run the model once with these weights before capturing it"
            )
        if self.is_packed:
            base = self.tensors[0].data_ptr()
            step = self.expert_stride * self.tensors[0].element_size()
            addresses = [base + e * step for e in range(self.experts)]
        else:
            addresses = [tensor.data_ptr() for tensor in self.tensors]
        table = entry[0] = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return table


def in_turns(packed: Tensor, dim: int) -> Tensor:
    """[.., 2I, ..] with gate and up in turns along `dim` -> [.., 2, I, ..], a view: gate first, then up."""
    return packed.unflatten(dim, (packed.shape[dim] // 2, 2)).transpose(dim, dim + 1)


def stored_in_turns(halves: Tensor, what: str) -> Tensor:
    """[E, 2, I, ..] -> the [E, 2I, ..] that it is the view `in_turns` of. Raises WeightLayoutError if it is none."""
    _, two, rows, *_ = halves.shape
    _, half, row, *_ = halves.stride()
    if two != 2 or (rows > 1 and row != 2 * half):
        raise WeightLayoutError(
            f"{what}: shape {tuple(halves.shape)} with strides {halves.stride()} is not gate and up in turns, which "
            "has two halves, and twice the stride of the halves from row to row. Give other layouts as one tensor "
            "[E, 2I, ..] with gate before up, or as two tensors"
        )
    return halves.transpose(1, 2).flatten(1, 2)


def num_experts(weights: Sequence[Tensor]) -> int:
    """E of a list of expert weights (also for fake tensors; no check of the layout)."""
    return weights[0].shape[0] if weights[0].dim() > 2 else len(weights)


def are_in_turns(gate: Sequence[Tensor]) -> bool:
    """Whether a list of weights holds gate and up in turns (also for fake tensors; no check of the layout)."""
    return gate[0].dim() == 4


def out_size(weights: Sequence[Tensor]) -> int:
    """Rows (out) of one expert's matrix."""
    first = weights[0]
    return first.shape[-2] * (2 if first.dim() == 4 else 1)


def in_size(weights: Sequence[Tensor]) -> int:
    """Columns (in) of one expert's matrix."""
    return weights[0].shape[-1]


def preact_size(gate: Sequence[Tensor], up: Sequence[Tensor]) -> int:
    """N: the columns of the pre-activation, gate and up together."""
    return out_size(gate) + (out_size(up) if up else 0)
