"""The matrix product of the references.

For fp32 on the CPU it calls oneDNN, which torch ships but uses for fp32 only in compiled graphs: on processors where
MKL does not use AVX-512 it takes half the time of torch.mm, and a fifth for products over one or two rows. Products of
all experts go through torch's grouped matmul where that is the faster way: a call for each expert costs more than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_compiler.runtime_kernels.biases import ExpertBiases, add_rows, vector
from moe_compiler.runtime_kernels.weights import ExpertWeights


def _find_onednn() -> torch._ops.OpOverload | None:
    # A private operator of torch (Inductor's fp32 linear). Where a build lacks it, torch.mm does the work.
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    return getattr(packet, "default", None)


_onednn_linear = _find_onednn()
# With right operands of at most this many elements torch.mm is through before oneDNN has begun ...
_SMALL = 1 << 16
# ... and where the result goes into given memory (weight gradients) it beats oneDNN's copy up to this many products.
_SMALL_INTO = 1 << 21


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    assert _onednn_linear is not None
    return _onednn_linear(left, right.t(), None if bias is None else bias.contiguous(), "none", [], "")


def _by_onednn(left: Tensor) -> bool:
    return _onednn_linear is not None and left.dtype is torch.float32 and left.is_cpu


def matmul(left: Tensor, right: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """left [M,L] @ right [L,N] (+ bias [N]) -> [M,N], into `out` (any strides) where given.

    Accumulates in fp32, fp64 for fp64; product and bias are rounded together, once.
    """
    large = right.numel() > _SMALL if out is None else left.shape[0] * right.numel() > _SMALL_INTO
    if large and _by_onednn(left):
        result = _onednn(left, right, bias)
        return result if out is None else out.copy_(result)
    if bias is not None:
        return torch.addmm(bias, left, right) if out is None else torch.addmm(bias, left, right, out=out)
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)


def matmul_experts(
    rows: Tensor,
    weights: ExpertWeights,
    starts: Tensor,
    spans: Sequence[tuple[int, int, int]],
    *,
    transposed: bool = False,
    bias: ExpertBiases | None = None,
) -> Tensor:
    """rows [S,out] @ weight_e [out,in] -> [S,in], or transposed [S,in] -> [S,out]; rows of no expert are unspecified.

    bias is added to each expert's rows and rounded together with the product.

    starts int32 [E+1] and spans (`expert_rows`) both say which rows are an expert's. As little as can be is done for
    each expert: with few rows that is what the time goes into.
    """
    onednn = weights.out * weights.inner > _SMALL and _by_onednn(rows)
    stack = weights.tensors[0] if weights.is_packed else None
    if stack is not None and transposed:
        stack = stack.mT
    # It looks at every expert: where most have no rows a call for each of the others is less.
    crowded = 2 * len(spans) >= weights.experts
    exact = bias is None or rows.dtype in (torch.float32, torch.float64)
    if stack is not None and crowded and exact and not onednn and _can_group(rows) and _can_group(stack):
        return add_rows(F.grouped_mm(rows, stack, offs=starts[1:]), bias, spans)
    matrices = weights.matrices()
    rights = [matrices[expert].t() if transposed else matrices[expert] for expert, _, _ in spans]
    sizes = [end - begin for _, begin, end in spans]
    known = sum(sizes)
    out = rows.new_empty((rows.shape[0], weights.out if transposed else weights.inner))
    vectors = [vector(bias, expert) for expert, _, _ in spans]
    pieces = zip(rows[:known].split(sizes), rights, vectors, out[:known].split(sizes), strict=True)
    for left, right, added, part in pieces:
        if onednn:
            part.copy_(_onednn(left, right, added))
        elif added is None:
            torch.mm(left, right, out=part)
        else:
            torch.addmm(added, left, right, out=part)
    return out


def matmul_gradients(left: Tensor, right: Tensor, starts: Tensor, like: Tensor) -> Tensor | None:
    """left [S,out], right [S,in] -> left_e^T @ right_e [E,out,in] with the strides of `like`, in one grouped matmul.

    None where torch's grouped matmul does not take the operands or a matmul for each expert is faster.
    """
    rows = left.shape[0] / max(like.shape[0], 1)
    if rows * like.shape[1] * like.shape[2] > _SMALL_INTO and _by_onednn(left):
        return None
    strides = torch.empty_like(like, device="meta").stride()
    if strides[1] == 1:
        left, right = right, left
    if not (_can_group(left.t()) and _can_group(right)):
        return None
    found = F.grouped_mm(left.t(), right, offs=starts[1:])
    found = found.mT if strides[1] == 1 else found
    return found if found.stride() == strides else None


@cache
def _groups(dtype: torch.dtype) -> bool:
    """Whether this build's grouped matmul takes `dtype` on a CPU."""
    try:
        F.grouped_mm(torch.zeros(8, 8, dtype=dtype), torch.zeros(1, 8, 8, dtype=dtype), offs=torch.tensor([8]).int())
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def _can_group(operand: Tensor) -> bool:
    """Whether torch's grouped matmul takes it: one of the last two strides is one, the other a multiple of 16 bytes."""
    if operand.device.type != "cpu" or not _groups(operand.dtype):
        return False
    *_, rows, columns = operand.shape
    row, column = operand.stride()[-2:]
    step = row if column == 1 and row >= columns else column if row == 1 and column >= rows else 1
    return step * operand.itemsize % 16 == 0 and operand.data_ptr() % 16 == 0
