"""Launches of the gradients of the expert weights, written with the strides or addresses of the given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_compiler.runtime_kernels.grad_weights.kernel import grad_weights_kernel
from moe_compiler.runtime_kernels.launching import Matrix, matrix, precision, row_major, start, tile_for
from moe_compiler.runtime_kernels.tiles import Tile
from moe_compiler.runtime_kernels.weights import in_size, out_size


def _grad(
    parts: Sequence[Matrix],
    sizes: tuple[int, int],
    tokens: Tensor,
    weights: Tensor | None,
    ordered: Tensor,
    ins: dict[str, Any],
    k: int,
    tokens_first: bool,
    start_column: int,
    tile: Tile,
    pdl: bool,
) -> None:
    experts = ins["starts"].shape[0] - 1
    tokens = row_major(tokens)
    rows, columns = sizes
    token_size, ordered_size = (rows, columns) if tokens_first else (columns, rows)
    strides = (parts[0].out, parts[0].inner)
    constants = {
        "TOKEN_ROW": tokens.stride(0),
        "ORDERED_ROW": ordered.shape[1],
        "K": k,
        "T_SIZE": token_size,
        "O_SIZE": ordered_size,
        "PARTS": len(parts),
        "FROM": start_column,
        "PART_E": parts[0].stride,
        "STRIDE_T": strides[0] if tokens_first else strides[1],
        "STRIDE_O": strides[1] if tokens_first else strides[0],
        "TABLE": parts[0].table,
        "ALIGNED": all(part.aligned for part in parts),
        "WIDE": any(part.wide for part in parts),
        "TOKENS_FIRST": tokens_first,
        "PRECISION": precision(ordered.dtype),
        "BT": tile.rows,
        "BO": tile.cols,
        "BK": tile.depth,
        "GROUP": tile.group,
    }
    operands = (
        tokens,
        None if weights is None else weights.contiguous(),
        ordered,
        ins["perm"],
        ins["starts"],
        parts[0].operand,
        parts[-1].operand,
    )
    programs = experts * len(parts) * -(-token_size // tile.rows) * -(-ordered_size // tile.cols)
    start(
        grad_weights_kernel,
        programs,
        operands,
        (),
        constants,
        pdl=pdl,
        warps=tile.warps,
        stages=tile.stages,
        registers=tile.registers,
    )


def grad_down(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """grad_down like down from grad_y [T,H] of any float dtype and act [S,I] in sorted row order."""
    act, grads = ins["act"], outs["grad_down"]
    sizes = (grads[0].shape[-2], grads[0].shape[-1])
    tile = tile or tile_for("grad_down", act, ins["starts"], sizes)
    part = matrix(grads, "grad_down", written=True)
    _grad([part], sizes, ins["grad_y"], None, act, ins, attrs["k"], True, 0, tile, pdl)


def grad_gate_up(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """grad_gate like gate, grad_up like up (an empty list if up is) from x [T,H] and grad_preact [S,N].

    The columns of grad_preact are in the order of the rows of the weights (see `grad_act`).
    """
    grad_preact, grads, grads_up = ins["grad_preact"], outs["grad_gate"], outs.get("grad_up")
    sizes = (out_size(grads), in_size(grads))
    tile = tile or tile_for("grad_gate_up", grad_preact, ins["starts"], (sizes[1], sizes[0]))
    gate = matrix(grads, "grad_gate", written=True)
    common = (ins["x"], ins["weights"], grad_preact, ins, attrs["k"], False)
    if not grads_up:
        _grad([gate], sizes, *common, 0, tile, pdl)
        return
    up = matrix(grads_up, "grad_up", written=True)
    layouts = {(part.stride, part.out, part.inner, part.table) for part in (gate, up)}
    if len(layouts) == 1:
        _grad([gate, up], sizes, *common, 0, tile, pdl)
        return
    _grad([gate], sizes, *common, 0, tile, pdl)
    _grad([up], sizes, *common, sizes[0], tile, pdl)
