"""What each programmatic edge of a chain gains on this machine, measured: a table, and how it is filled.

A gain is what the chain takes longer without the edge. The chain with every provable edge is timed against the same
chain with one of them plain, in turns; the gain is the median of the rounds' differences. That is done for each variant
at the number of tokens that its prediction is for.

The table of a device is a file beside its calibration. A row belongs to one program, its operands' layouts in T, these
numbers of tokens, and the sources, so equal layers of a model share one, and another version measures anew.
options["tune"]: "cached" looks a chain up, "full" also measures one that is not there, "off" does neither. Times come
from `edge_timing`; everything else here is plain values.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_compiler import device
from moe_compiler.chain_operands import NoSample, operand_layouts
from moe_compiler.device_model import calibration_path
from moe_compiler.launch import Chain, tokens_of, with_pdl
from moe_compiler.progress import Progress
from moe_compiler.runtime_kernels.chain.program import Variant
from moe_compiler.runtime_kernels.registry import kernel

__all__ = ["Gains", "gains", "provable", "table_digest", "table_path"]

Times = Callable[[Chain, int, Mapping[str, str]], Mapping[str, Sequence[float]]]
_ALL = "all"


@dataclass(frozen=True)
class Gains:
    """Measured gains in microseconds, by variant and the position of the consumer.

    source: "measured on NVIDIA H200", or "not measured: " and why; empty where nobody asked.
    """

    source: str = ""
    by_variant: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def of(self, variant: str, consumer: int) -> float | None:
        """The gain of the programmatic edge into a launch, None when it was not measured."""
        return self.by_variant.get(variant, {}).get(consumer)


def provable(variant: Variant) -> tuple[int, ...]:
    """The launches of a variant that may carry the attribute: not the first, and with a kernel that waits."""
    return tuple(index for index, launch in enumerate(variant.launches) if index and kernel(launch.kernel).traits.waits)


def gains(chain: Chain, tokens: Mapping[str, int], tune: str) -> Gains:
    """The measured gains of a chain's edges on the current device, or why there are none.

    tokens: T by variant. Measures when `tune` is "full" and the table has no row for the chain. Raises ValueError for a
    table that cannot be read.
    """
    if tune == "off":
        return Gains('not measured: options["tune"] is "off"')
    if chain.device != "cuda" or not torch.cuda.is_available():
        return Gains("not measured: no CUDA device")
    if unavailable := device.why_no_pdl(chain.device):
        return Gains(f"not measured: {unavailable}")
    name = torch.cuda.get_device_name()
    path = table_path(name)
    asked = _reachable(chain, tokens)
    try:
        key = _key(chain, asked)
        found = _read(path).get(key)
        if found is None and tune == "full":
            from moe_compiler.edge_timing import times_us

            with Progress("gains of programmatic edges") as progress:
                found = _measured(chain, asked, times_us, progress)
            _write(path, name, key, found)
    except NoSample as error:
        return Gains(f"not measured: {error}")
    if found is None:
        return Gains("not measured: this chain is not in the table; `moepdl explain --measure` adds it")
    return Gains(f"measured on {name}", found)


def _reachable(chain: Chain, tokens: Mapping[str, int]) -> dict[str, int]:
    """T by variant, of the variants that can run: where T is a constant of the graph, one can."""
    own = tokens_of(chain.nodes[0])
    variants = [
        variant
        for variant in chain.program.variants
        if own is None or variant.max_tokens is None or own <= variant.max_tokens
    ]
    return {variant.name: tokens[variant.name] for variant in (variants if own is None else variants[:1])}


def _measured(
    chain: Chain, tokens: Mapping[str, int], times_us: Times, progress: Progress
) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for variant in chain.program.variants:
        edges = provable(variant)
        if variant.name not in tokens or not edges:
            continue
        progress.step(f"{chain.direction} {variant.name}, T={tokens[variant.name]}: {len(edges)} edges")
        ways = {_ALL: frozenset(edges)} | {str(index): frozenset(edges) - {index} for index in edges}
        texts = {way: with_pdl(chain, {variant.name: carried}).program.to_text() for way, carried in ways.items()}
        times = times_us(chain, tokens[variant.name], texts)
        found[variant.name] = {
            index: round(median(a - b for a, b in zip(times[str(index)], times[_ALL], strict=True)), 3)
            for index in edges
        }
    return found


def _key(chain: Chain, tokens: Mapping[str, int]) -> str:
    from moe_compiler.inductor import source_hash

    bare = replace(with_pdl(chain, {}).program, name="")
    parts = [bare.to_text(), *map(str, operand_layouts(chain)), json.dumps(tokens, sort_keys=True), source_hash()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def table_path(device: str) -> Path:
    """Where the measured gains of a device are kept: beside its calibration."""
    calibration = calibration_path(device)
    return calibration.with_name(f"{calibration.stem}.edges.json")


def table_digest() -> str:
    """A digest of the current device's table: what is compiled with it is another result. Empty without one."""
    if not torch.cuda.is_available():
        return ""
    path = table_path(torch.cuda.get_device_name())
    return _digest(path, path.stat().st_mtime_ns) if path.is_file() else ""


@lru_cache(maxsize=4)
def _digest(path: Path, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(path: Path) -> Mapping[str, dict[str, dict[int, float]]]:
    return _rows(path, path.stat().st_mtime_ns) if path.is_file() else {}


@lru_cache(maxsize=4)
def _rows(path: Path, changed: int) -> dict[str, dict[str, dict[int, float]]]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(key): {
                str(variant): {int(index): float(gain) for index, gain in edges.items()}
                for variant, edges in row.items()
            }
            for key, row in data["gains_us"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no table of measured gains ({error!r}); delete it to measure anew") from error


def _write(path: Path, device: str, key: str, found: Mapping[str, Mapping[int, float]]) -> None:
    """Add a row. Another process may have added others meanwhile; a folder that cannot be written is no error."""
    rows = {**_read(path), key: {name: dict(edges) for name, edges in found.items()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"device": device, "gains_us": rows}, indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
    except OSError:
        return
