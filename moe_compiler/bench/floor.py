"""The least time that a device needs for a block: to move the weights of the experts that were hit, or to multiply."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_compiler.bench.results import FORWARD
from moe_compiler.bench.shapes import Shape

__all__ = ["Speed", "device_speed", "floor_us", "formula"]

# Measured by large copies and matmuls, by device and width of an element: bytes a second, FLOP a second.
_KNOWN = {("NVIDIA H200", 2): (4.3e12, 790e12)}


@dataclass(frozen=True)
class Speed:
    """bandwidth: bytes a second. flops: FLOP a second of a matmul in the block's dtype. source: where both are from."""

    bandwidth: float
    flops: float
    source: str


def floor_us(shape: Shape, tokens: int, hit: float, direction: str, speed: Speed, width: int) -> float:
    """Microseconds that a block needs at least, for `hit` distinct experts; width: bytes of an element.

    Moved are the weights of the experts hit and of the shared expert, read once forward. With backward they are read
    once more, and the gradients of all E experts are written. Each pair of a token and an expert costs 6 H I FLOP
    forward, and three times that with backward.
    """
    one = shape.matmul_size + (2 * shape.intermediate + shape.hidden if shape.biases else 0)
    shared = 3 * shape.hidden * shape.shared
    if direction == FORWARD:
        moved, passes = hit * one + shared, 1
    else:
        moved, passes = 2 * (hit * one + shared) + shape.experts * one + shared, 3
    flop = passes * 2 * tokens * (shape.k * shape.matmul_size + shared)
    return max(moved * width / speed.bandwidth, flop / speed.flops) * 1e6


def formula(direction: str, speed: Speed) -> str:
    """`floor_us` as a sentence for the notes of a result."""
    rates = f"{speed.bandwidth / 1e12:.4g} TB/s, {speed.flops / 1e12:.4g} TFLOP/s ({speed.source})"
    if direction == FORWARD:
        return (
            f"floor: weights of the distinct experts hit, or 6 T k H I FLOP, the larger; shared expert added; {rates}"
        )
    return (
        "floor with backward: weights of the experts hit twice and gradients of all once, or 18 T k H I FLOP, "
        f"the larger; shared expert added; {rates}"
    )


def device_speed(device: str, dtype: torch.dtype, *, measure: bool = False) -> Speed:
    """What this device does: a known device's numbers; for others, and with `measure`, measured now (in seconds)."""
    width = torch.empty((), dtype=dtype).element_size()
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    if (name, width) in _KNOWN and not measure:
        return Speed(*_KNOWN[name, width], source=f"constants of the {name}")
    large = device == "cuda"
    memory, size = (1 << 30, 8192) if large else (1 << 26, 512)
    text = f"measured: a copy and a sum of {memory >> 20} MiB, the faster; a matmul of {size} in {_name(dtype)}"
    return Speed(_bandwidth(memory, dtype, device), _flops(size, dtype, device), text)


def _bandwidth(size: int, dtype: torch.dtype, device: str) -> float:
    """Bytes a second, read and written by a copy of `size` bytes or read by a sum, whichever is more."""
    source = torch.ones(size // torch.empty((), dtype=dtype).element_size(), dtype=dtype, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / _seconds(lambda: target.copy_(source), device)
    return max(copied, size / _seconds(lambda: source.sum(), device))


def _flops(size: int, dtype: torch.dtype, device: str) -> float:
    """FLOP a second of a square matmul."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _seconds(call: Callable[[], object], device: str, rounds: int = 7, budget_s: float = 1.0) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: list[float] = []
    begin = time.perf_counter()
    for turn in range(rounds + 2):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        if turn > 1:
            times.append(time.perf_counter() - start)
        if times and time.perf_counter() - begin > budget_s:
            break
    return statistics.median(times)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
