"""A block's backward in each of the orders."""

from __future__ import annotations

from collections.abc import Sequence

from moe_compiler.exchange_plan.builder import Builder, in_part
from moe_compiler.exchange_plan.operation import Rows
from moe_compiler.exchange_plan.traffic import Part

__all__ = ["backward"]

_WEIGHTS = ("grad_down", "grad_gate_up")
_TOKENS = ("grad_pairs", "combine")
# The gradient of a routing weight is float32.
_SCALAR_BYTES = 4
_SAVED = {"x": "rows", "w": "row_weights"}


def backward(builder: Builder) -> None:
    """The gradients' way to the experts, the gradients, their way home."""
    orders = {"plain": _plain, "local_first": _local_first, "columns": _columns}
    orders.get(builder.way.order, _in_chunks)(builder)


def _redispatch(builder: Builder, suffix: str, of: int, own: Sequence[str] = ()) -> None:
    row = builder.block.row_bytes
    builder.start(f"ep_redispatch{suffix}", Rows(row, False, of), ("grad_y", "slots"), builder.out_bytes(row, of), own)


def _arrived(builder: Builder, suffix: str) -> None:
    builder.wait(f"ep_redispatch{suffix}", (), (f"grad_rows{suffix}",), None)


def _send_weights(builder: Builder, suffix: str, of: int, grad_w: str) -> None:
    builder.start(f"ep_return_weights{suffix}", Rows(_scalars(builder), True, of), (grad_w,), None)


def _weights_home(builder: Builder, suffix: str, of: int, own: str) -> None:
    moved = builder.home_bytes(_scalars(builder), of)
    builder.wait(f"ep_return_weights{suffix}", (own,), (f"grad_weights{suffix}",), moved)


def _scalars(builder: Builder) -> int:
    return builder.traffic.k * _SCALAR_BYTES


def _send_rows(builder: Builder, suffix: str, of: int, grad_x: str, columns: int = 1) -> None:
    builder.start(f"ep_combine{suffix}", Rows(builder.block.row_bytes // columns, True, of), (grad_x,), None)


def _rows_home(builder: Builder, suffix: str, of: int, own: str, columns: int = 1) -> None:
    moved = builder.home_bytes(builder.block.row_bytes // columns, of)
    builder.wait(f"ep_combine{suffix}", (own,), (f"grad_sum{suffix}",), moved)


def _run(builder: Builder, part: Part, grad_rows: str, *kernels: str) -> None:
    """The launches of a part in the compiler's order, or those among them that are named."""
    items = [item for item in builder.launches(part, "backward") if not kernels or item.kernel in kernels]
    builder.run(items, part, {**_SAVED, "grad_y": grad_rows})


def _plain(builder: Builder) -> None:
    (part,) = builder.parts()
    _redispatch(builder, "", 1)
    _arrived(builder, "")
    _run(builder, part, "grad_rows")
    _send_weights(builder, "", 1, "grad_w")
    _weights_home(builder, "", 1, "grad_w")
    _send_rows(builder, "", 1, "grad_x")
    _rows_home(builder, "", 1, "grad_x")
    builder.shared(0, backward=True)
    builder.shared(1, backward=True)


def _in_chunks(builder: Builder) -> None:
    """The filler is one chunk."""
    parts, of = builder.parts(), builder.way.chunks
    ahead = min(2, len(parts))
    for part in parts[:ahead]:
        _redispatch(builder, in_part("", part.name), of)
    builder.shared(0, backward=True)
    for index, part in enumerate(parts):
        suffix = in_part("", part.name)
        _arrived(builder, suffix)
        _run(builder, part, f"grad_rows{suffix}", "grad_act")
        _send_weights(builder, suffix, of, f"grad_w{suffix}")
        _run(builder, part, f"grad_rows{suffix}", *_TOKENS)
        _send_rows(builder, suffix, of, f"grad_x{suffix}")
        if index + ahead < len(parts):
            _redispatch(builder, in_part("", parts[index + ahead].name), of)
    builder.shared(1, backward=True)
    for part in parts:
        _run(builder, part, in_part("grad_rows", part.name), *_WEIGHTS)
    for part in parts:
        suffix = in_part("", part.name)
        _weights_home(builder, suffix, of, f"grad_w{suffix}")
        _rows_home(builder, suffix, of, f"grad_x{suffix}")


def _local_first(builder: Builder) -> None:
    local, remote = builder.parts()
    _redispatch(builder, "", 1, ("grad_rows.own",))
    builder.shared(0, backward=True)
    _run(builder, local, "grad_rows.own", "grad_act")
    _arrived(builder, "")
    _run(builder, remote, "grad_rows", "grad_act")
    _send_weights(builder, "", 1, "grad_w.remote")
    _run(builder, remote, "grad_rows", *_TOKENS)
    _send_rows(builder, "", 1, "grad_x.remote")
    _run(builder, local, "grad_rows.own", *_TOKENS)
    builder.shared(1, backward=True)
    _run(builder, local, "grad_rows.own", *_WEIGHTS)
    _run(builder, remote, "grad_rows", *_WEIGHTS)
    _weights_home(builder, "", 1, "grad_w.local")
    _rows_home(builder, "", 1, "grad_x.local")


def _columns(builder: Builder) -> None:
    (part,) = builder.parts()
    blocks = [f"columns{index}" for index in range(builder.way.chunks)]
    _redispatch(builder, "", 1)
    builder.shared(0, backward=True)
    _arrived(builder, "")
    _run(builder, part, "grad_rows", "grad_act")
    _send_weights(builder, "", 1, "grad_w")
    items = [item for item in builder.launches(part, "backward") if item.kernel in _TOKENS]
    for block in blocks:
        builder.run(items, part, {name: name for name in ("grad_preact", "perm", "starts")}, len(blocks), block)
        _send_rows(builder, f".{block}", 1, f"grad_x.{block}", len(blocks))
    builder.shared(1, backward=True)
    _run(builder, part, "grad_rows", *_WEIGHTS)
    _weights_home(builder, "", 1, "grad_w")
    for block in blocks:
        _rows_home(builder, f".{block}", 1, f"grad_x.{block}", len(blocks))
