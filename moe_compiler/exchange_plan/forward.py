"""A block's forward in each of the orders."""

from __future__ import annotations

from collections.abc import Sequence

from moe_compiler.exchange_plan.builder import Builder, in_part
from moe_compiler.exchange_plan.operation import Rows
from moe_compiler.runtime_kernels.chain.program import Launch

__all__ = ["forward"]

_READS, _GIVEN = ("x", "ids", "w"), ("rows", "row_ids", "row_weights")


def forward(builder: Builder) -> None:
    """Router, dispatch, experts, combine; the shared expert last where nothing overlaps."""
    builder.router()
    {"local_first": _local_first, "columns": _columns}.get(builder.way.order, _in_chunks)(builder)


def _dispatch(builder: Builder, suffix: str, of: int, own: Sequence[str] = ()) -> None:
    row = builder.block.row_bytes + builder.block.choices_bytes
    builder.start(f"ep_dispatch{suffix}", Rows(row, False, of), _READS, builder.out_bytes(row, of), own)


def _arrived(builder: Builder, suffix: str) -> dict[str, str]:
    """Wait for the rows; the names that the experts' launches have them by."""
    given = {read: name + suffix for read, name in zip(_READS, _GIVEN, strict=True)}
    builder.wait(f"ep_dispatch{suffix}", (), tuple(given.values()), None)
    return given


def _send_home(builder: Builder, suffix: str, of: int, y: str, columns: int = 1) -> None:
    builder.start(f"ep_combine{suffix}", Rows(builder.block.row_bytes // columns, True, of), (y,), None)


def _summed(builder: Builder, suffix: str, of: int, own: str, columns: int = 1) -> None:
    moved = builder.home_bytes(builder.block.row_bytes // columns, of)
    builder.wait(f"ep_combine{suffix}", (own,), (f"sum{suffix}",), moved)


def _halves(launches: Sequence[Launch]) -> tuple[Sequence[Launch], Sequence[Launch]]:
    """Before the down projection, and from there on."""
    at = next(index for index, item in enumerate(launches) if item.kernel.startswith("down"))
    return launches[:at], launches[at:]


def _in_chunks(builder: Builder) -> None:
    """Plain and filler are one chunk. Chunk i + 1 travels while chunk i is computed."""
    parts, of = builder.parts(), builder.way.chunks
    overlapped = builder.way.order != "plain"
    ahead = min(2, len(parts))
    for part in parts[:ahead]:
        _dispatch(builder, in_part("", part.name), of)
    if overlapped:
        builder.shared(0)
    for index, part in enumerate(parts):
        given = _arrived(builder, in_part("", part.name))
        builder.run(builder.launches(part, "forward"), part, given)
        _send_home(builder, in_part("", part.name), of, in_part("y", part.name))
        if index + ahead < len(parts):
            _dispatch(builder, in_part("", parts[index + ahead].name), of)
    if overlapped:
        builder.shared(1)
    for part in parts:
        _summed(builder, in_part("", part.name), of, in_part("y", part.name))
    if not overlapped:
        builder.shared(0)
        builder.shared(1)


def _local_first(builder: Builder) -> None:
    local, remote = builder.parts()
    own = {read: f"{name}.own" for read, name in zip(_READS, _GIVEN, strict=True)}
    first, second = _halves(builder.launches(local, "forward"))
    _dispatch(builder, "", 1, tuple(own.values()))
    builder.shared(0)
    builder.run(first, local, own)
    builder.run(builder.launches(remote, "forward"), remote, _arrived(builder, ""))
    _send_home(builder, "", 1, "y.remote")
    builder.run(second, local, own)
    builder.shared(1)
    _summed(builder, "", 1, "y.local")


def _columns(builder: Builder) -> None:
    (part,) = builder.parts()
    blocks = [f"columns{index}" for index in range(builder.way.chunks)]
    first, second = _halves(builder.launches(part, "forward"))
    _dispatch(builder, "", 1)
    builder.shared(0)
    given = _arrived(builder, "")
    builder.run(first, part, given)
    kept = {**given, **{name: name for item in first for name in item.outs.values()}}
    for block in blocks:
        builder.run(second, part, kept, len(blocks), block)
        _send_home(builder, f".{block}", 1, f"y.{block}", len(blocks))
    builder.shared(1)
    for block in blocks:
        _summed(builder, f".{block}", 1, f"y.{block}", len(blocks))
