"""The table of a device's tuned tiles: a file beside its calibration, one row a block.

A row is of no use to other device code: it says which triton and which sources of the kernels it was made with, and is
passed over, and told, when these have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moe_compiler.device import triton_version
from moe_compiler.device_model import calibration_path
from moe_compiler.runtime_kernels.tiles import TileError
from moe_compiler.tuning.tuned_tiles import Points, blocks_of, plain

__all__ = ["Row", "look_up", "made_with", "read_tiles", "table_path", "tiles_digest", "write_row"]

# (points, what they were made with)
Row = tuple[Points, str]


@lru_cache(maxsize=1)
def made_with() -> str:
    """What tuned tiles depend on besides the device: "triton 3.6.0, kernels 0123456789ab"."""
    folder = Path(__file__).resolve().parent.parent / "runtime_kernels"
    digest = hashlib.sha256()
    for path in sorted(folder.resolve().rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return f"triton {triton_version()}, kernels {digest.hexdigest()[:12]}"


def table_path(device: str) -> Path:
    """Where the tuned tiles of a device are kept: beside its calibration."""
    calibration = calibration_path(device)
    return calibration.with_name(f"{calibration.stem}.tiles.json")


def tiles_digest() -> str:
    """A digest of the current device's table: what is compiled with it is another result. Empty without one."""
    if not torch.cuda.is_available():
        return ""
    path = table_path(torch.cuda.get_device_name())
    return _digest(path, _state(path)) if path.is_file() else ""


def _state(path: Path) -> tuple[int, int, int]:
    """What tells that a file was written: a table is replaced as a whole, by another file."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


@lru_cache(maxsize=4)
def _digest(path: Path, state: tuple[int, int, int]) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def look_up(device: str, block: str) -> tuple[Points, str]:
    """The points of a block in the device's table, and why there are none ("" when there are).

    Raises ValueError for a table that cannot be read.
    """
    row = _read(table_path(device)).get(block)
    if row is None:
        return {}, "this block is not in the table; `moepdl tune` adds it"
    points, made = row
    if made != made_with():
        return {}, f"they were found with {made}, this is {made_with()}; `moepdl tune` finds them anew"
    return points, ""


def read_tiles(path: Path) -> dict[str, dict[str, dict[int, Any]]]:
    """The blocks of a table, whatever they were made with: what options["tiles"] names by its path.

    Raises OSError, and ValueError, naming the file, for one that is no table.
    """
    return {block: {k: dict(t) for k, t in points.items()} for block, (points, _) in _parse(path).items()}


def _read(path: Path) -> Mapping[str, Row]:
    return _rows(path, _state(path)) if path.is_file() else {}


@lru_cache(maxsize=4)
def _rows(path: Path, state: tuple[int, int, int]) -> dict[str, Row]:
    return _parse(path)


def _parse(path: Path) -> dict[str, Row]:
    text = path.read_text(encoding="utf-8")
    try:
        data: dict[str, Any] = json.loads(text)
        rows = data["blocks"]
        blocks = blocks_of({block: row["tiles"] for block, row in rows.items()})
        return {block: (points, str(rows[block]["made_with"])) for block, points in blocks.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        told = str(error) if isinstance(error, TileError) else repr(error)
        raise ValueError(f"{path} is no table of tiles ({told}); delete it, `moepdl tune` writes it anew") from error


def write_row(path: Path, device: str, block: str, points: Points) -> None:
    """Add points to a block's row; what the row had for other T stays, unless other sources made it.

    Another process may have added other rows meanwhile. Raises OSError where the folder cannot be written.
    """
    rows = dict(_read(path))
    before, made = rows.get(block, ({}, ""))
    kept = before if made == made_with() else {}
    merged = {kernel: {**kept.get(kernel, {}), **points.get(kernel, {})} for kernel in {**kept, **points}}
    rows[block] = (merged, made_with())
    texts = plain({name: row[0] for name, row in rows.items()})
    data = {name: {"made_with": row[1], "tiles": texts[name]} for name, row in sorted(rows.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"device": device, "blocks": data}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
