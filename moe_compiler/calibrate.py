"""Measure this device and fit its table of `device_model`: what `moepdl calibrate` does, in about a minute.

Two blocks are timed, launch by launch, from one token to thousands: one of many small experts and one of fewer large
ones, so that each kernel is seen bound by memory and by arithmetic. Kernels are compiled in worker processes first.
A kernel's numbers are those that make the squared error of the logarithm of its times smallest, with a weak pull
towards plausible ones, which decides what the measurements leave open (a kernel that is never bound by arithmetic).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_compiler.block_program import BlockSizes
from moe_compiler.cost import T, stage_cost
from moe_compiler.device_model import DeviceModel, KernelModel, calibration_path, save

__all__ = ["BACKWARD", "FORWARD", "Point", "calibrate", "fit", "fit_kernel"]

# Experts, k, hidden, intermediate.
_SHAPES = (BlockSizes(128, 8, 2048, 768), BlockSizes(32, 4, 4096, 1536))
FORWARD = (1, 2, 4, 8, 32, 128, 512, 1024, 2048, 8192)
BACKWARD = (64, 1024, 8192)
# A block of tiny kernels: what its chain gains by programmatic launch is the boundaries'.
_TINY, _TINY_TOKENS = BlockSizes(8, 2, 64, 64), 16
# What is plausible: fixed microseconds, bytes and FLOPs a microsecond of a large GPU, sharpness; and how firmly.
_PRIOR = (1.5, 4e6, 6e8, 3.0)
_FIRMNESS = (0.02, 0.02, 0.0, 0.02)


@dataclass(frozen=True)
class Point:
    """One measured launch: kernel, the sizes of its block (see `cost`), T, and microseconds."""

    kernel: str
    sizes: Mapping[str, int]
    tokens: int
    us: float


def fit_kernel(moved: Sequence[float], work: Sequence[float], us: Sequence[float]) -> KernelModel:
    """The model of one kernel from its points: bytes, work and time of each. At least one point."""
    moved_P, work_P = torch.tensor(moved, dtype=torch.float64), torch.tensor(work, dtype=torch.float64)
    log_us_P = torch.tensor(us, dtype=torch.float64).log()
    arithmetic = bool((work_P > 0).any())
    fastest = float((work_P / log_us_P.exp()).max()) if arithmetic else 1.0
    prior = torch.tensor([_PRIOR[0], _PRIOR[1], fastest, _PRIOR[3] - 1.0], dtype=torch.float64).log()
    firmness = torch.tensor(_FIRMNESS, dtype=torch.float64)
    numbers = prior.clone().requires_grad_()

    def predicted_P() -> Tensor:
        fixed, rate, speed, sharp = numbers.exp()
        times_P = moved_P / rate
        if arithmetic:
            s = 1.0 + sharp
            other_P = work_P / speed
            longest_P = torch.maximum(times_P, other_P)
            times_P = longest_P * ((times_P / longest_P) ** s + (other_P / longest_P) ** s) ** (1 / s)
        return fixed + times_P

    optimizer = torch.optim.LBFGS([numbers], max_iter=400, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = ((predicted_P().log() - log_us_P) ** 2).sum() + (firmness * (numbers - prior) ** 2).sum()
        error.backward()
        return error

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    fixed, rate, speed, sharp = numbers.detach().exp().tolist()
    return KernelModel(fixed, rate, speed if arithmetic else 0.0, 1.0 + sharp)


def fit(points: Sequence[Point], device: str, boundary_us: float, about: Mapping[str, str]) -> DeviceModel:
    """The table of a device from measured launches."""
    by_kernel: dict[str, list[Point]] = {}
    for point in points:
        by_kernel.setdefault(point.kernel, []).append(point)
    kernels = {}
    for name, mine in by_kernel.items():
        costs = [stage_cost(name, point.sizes) for point in mine]
        moved = [float(cost.bytes.subs(T, float(point.tokens))) for cost, point in zip(costs, mine, strict=True)]
        work = [float(cost.work.subs(T, float(point.tokens))) for cost, point in zip(costs, mine, strict=True)]
        kernels[name] = fit_kernel(moved, work, [point.us for point in mine])
    return DeviceModel(device, "calibrated", kernels, boundary_us, about)


def calibrate(
    *, workers: int | None = None, path: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[DeviceModel, Path]:
    """Measure the current CUDA device, and keep its table at `path` (by default where the compiler looks for it).

    workers: processes that compile (by default one a core). say: told what happens, line by line. Raises RuntimeError
    without a CUDA device that the kernels run on.
    """
    from moe_compiler import __version__, device
    from moe_compiler.measure import compile_ahead, measure_block, weights_of

    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device to calibrate")
    left_alone = device.why_left_alone("cuda", torch.bfloat16)
    if left_alone:
        raise RuntimeError(f"this device cannot be calibrated: {left_alone}")
    began = time.perf_counter()
    cases = [(sizes, tokens, False) for sizes in _SHAPES for tokens in FORWARD]
    cases += [(sizes, tokens, True) for sizes in _SHAPES for tokens in BACKWARD]
    count = workers if workers is not None else os.cpu_count() or 1
    say(f"compiling kernels for {len(cases)} cases in {count} processes")
    # The launches that are timed by themselves are plain ones; the tiny block is timed both ways.
    both_ways = [(_TINY, _TINY_TOKENS, False)]
    compile_ahead([*both_ways, *cases], workers=count, ways=lambda sizes: (False, True) if sizes is _TINY else (False,))
    points: list[Point] = []
    for sizes in _SHAPES:
        weights = weights_of(sizes, "cuda")
        for own, tokens, backward in cases:
            if own is sizes:
                found = measure_block(sizes, tokens, weights, backward=backward, chains=False)
                # A backward chain's own combine is timed on one input, which the cache holds.
                points += [
                    Point(kernel, sizes.named, tokens, us)
                    for kernel, us in found.launches
                    if not (backward and kernel == "combine")
                ]
        say(f"[{time.perf_counter() - began:.0f}s] {sizes.experts} experts measured")
        del weights
        torch.cuda.empty_cache()
    tiny = measure_block(_TINY, _TINY_TOKENS, weights_of(_TINY, "cuda"), launches=False)
    boundary = (tiny.chain_us["plain"] - tiny.chain_us["pdl"]) / tiny.programmatic if tiny.programmatic else 0.0
    about = {"moepdl": __version__, "torch": torch.__version__, "triton": str(device.describe()["triton"])}
    model = fit(points, torch.cuda.get_device_name(), max(boundary, 0.0), about)
    target = path or calibration_path(model.device)
    save(model, target)
    say(f"[{time.perf_counter() - began:.0f}s] {len(points)} launches, worst fit {worst(model, points):.0%}")
    return model, target


def worst(model: DeviceModel, points: Sequence[Point]) -> float:
    """The largest error of the model over measured launches of 20 us and more, relative."""
    errors = [0.0]
    for point in points:
        predicted = model.time_us(point.kernel, point.sizes, point.tokens)
        if predicted is not None and point.us >= 20:
            errors.append(abs(math.expm1(math.log(predicted / point.us))))
    return max(errors)
