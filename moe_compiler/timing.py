"""Fair timings of several ways to do one thing: interleaved rounds, medians, and a ratio with its confidence interval.

The ways take turns, so that a slow minute of the machine hits all of them alike, and each round starts with another
one.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    *,
    budget_s: float = 5.0,
    rounds: tuple[int, int] = (7, 200),
    warmup: int = 2,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call, by way, in rounds that call every way once.

    budget_s:    rounds are added until this much time is used
    rounds:      at least and at most so many
    warmup:      untimed calls of each way before the first round
    synchronize: called before and after each timed call; waits for the device
    """
    for call in ways.values():
        for _ in range(warmup):
            call()
    names = list(ways)
    samples: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin, least, most = time.perf_counter(), *rounds
        for turn in range(most):
            if turn >= least and time.perf_counter() - begin > budget_s:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                synchronize()
                start = time.perf_counter()
                ways[name]()
                synchronize()
                samples[name].append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    return samples


def ratio(samples: Sequence[float], base: Sequence[float]) -> Ratio:
    """Median of samples over median of base; the interval is a bootstrap over whole rounds, the same on every run.

    Both hold one value a round, in the same order: what slowed a round down slowed both.
    """
    if len(samples) != len(base):
        raise ValueError(f"{len(samples)} samples against {len(base)}: not of the same rounds")
    draw = random.Random(0)
    n = len(samples)
    ratios = []
    for _ in range(RESAMPLES):
        picks = [draw.randrange(n) for _ in range(n)]
        ratios.append(statistics.median([samples[i] for i in picks]) / statistics.median([base[i] for i in picks]))
    ratios.sort()
    value = statistics.median(samples) / statistics.median(base)
    return Ratio(value, ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1])


def milliseconds(samples: Sequence[float]) -> float:
    """Median of samples in seconds, in ms."""
    return statistics.median(samples) * 1e3


def environment(device: str) -> dict[str, str]:
    """Versions and device ("cpu" or "cuda") that a timing belongs to, by name; what is not installed is left out."""
    import torch

    from moe_compiler import __version__

    found = {"moepdl": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    else:
        found["device"] = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
