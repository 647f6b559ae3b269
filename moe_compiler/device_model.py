"""What a kernel and a chain take on a device, in microseconds: predictions from a table of a few numbers a kernel.

A kernel's time is a fixed part and the larger of two others, memory and arithmetic, rounded where they meet:

    t = fixed + ((bytes / rate)^s + (work / speed)^s)^(1/s)

with `bytes` and `work` of `cost`. A chain takes the sum of its kernels: on a GPU that is busy, launches in order cost
no more than their kernels (docs/cost_model.md has the measurement). A programmatic edge gains `boundary_us`: the
consumer's blocks are resident, and its prologue is done, when the producer ends.

A device's table is the user's own calibration (`moepdl calibrate`), else the one that is shipped for it, else one that
is derived from the shipped H200's by the ratio of bandwidth and of arithmetic; `source` says which.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_compiler.cost import T, costs_known, stage_cost

__all__ = ["DeviceModel", "Forecast", "KernelModel", "calibration_path", "derived", "device_model", "load", "save"]

_SHIPPED = Path(__file__).resolve().parent / "devices"
_REFERENCE = "NVIDIA H200"


@dataclass(frozen=True)
class KernelModel:
    """The numbers of one kernel: fixed_us, bytes_per_us, work_per_us (0: no arithmetic to speak of), sharpness s."""

    fixed_us: float
    bytes_per_us: float
    work_per_us: float = 0.0
    sharpness: float = 4.0

    def time_us(self, moved: float, work: float) -> float:
        """Microseconds to move `moved` bytes and do `work`."""
        memory, arithmetic = self.bounds_us(moved, work)
        longest = max(memory, arithmetic)
        if longest == 0.0:
            return self.fixed_us
        s = self.sharpness
        return self.fixed_us + longest * ((memory / longest) ** s + (arithmetic / longest) ** s) ** (1 / s)

    def times_us(self, moved: Tensor, work: Tensor) -> Tensor:
        """`time_us` of many launches at once; float64 tensors of one shape."""
        memory = moved / self.bytes_per_us
        arithmetic = work / self.work_per_us if self.work_per_us else torch.zeros_like(memory)
        longest = torch.maximum(memory, arithmetic)
        unit = torch.where(longest > 0, longest, 1.0)
        s = self.sharpness
        return self.fixed_us + longest * ((memory / unit) ** s + (arithmetic / unit) ** s) ** (1 / s)

    def bounds_us(self, moved: float, work: float) -> tuple[float, float]:
        """Microseconds of the memory traffic and of the arithmetic, each by itself."""
        return moved / self.bytes_per_us, work / self.work_per_us if self.work_per_us else 0.0


@dataclass(frozen=True)
class DeviceModel:
    """The table of one device.

    device       its name, as torch tells it
    source       "calibrated", "shipped" or "derived from ..."
    kernels      by kernel name, for operands of two bytes an element
    boundary_us  what a programmatic edge gains
    about        where the numbers come from: versions, commit
    """

    device: str
    source: str
    kernels: Mapping[str, KernelModel]
    boundary_us: float
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Where the numbers come from; a calibration is told from another by a few letters of its digest."""
        if self.source != "calibrated":
            return self.source
        text = json.dumps([sorted((name, asdict(kernel)) for name, kernel in self.kernels.items()), self.boundary_us])
        return f"calibrated ({hashlib.sha256(text.encode()).hexdigest()[:8]})"

    def time_us(self, kernel: str, sizes: Mapping[str, int], tokens: int) -> float | None:
        """Predicted time of a launch of `kernel` in a block of these sizes (k, E, H, I, N, w) for T tokens.

        None when the table has no row for it, the elements are not of two bytes, or a size is missing.
        """
        amounts = self._amounts(kernel, sizes, tokens)
        return None if amounts is None else self.kernels[kernel].time_us(*amounts)

    def bounds_us(self, kernel: str, sizes: Mapping[str, int], tokens: int) -> tuple[float, float] | None:
        """What the memory traffic and the arithmetic of a launch take, each by itself; None as in `time_us`."""
        amounts = self._amounts(kernel, sizes, tokens)
        return None if amounts is None else self.kernels[kernel].bounds_us(*amounts)

    def _amounts(self, kernel: str, sizes: Mapping[str, int], tokens: int) -> tuple[float, float] | None:
        """Bytes and work."""
        if kernel not in self.kernels or sizes.get("w", 2) != 2 or not costs_known(kernel):
            return None
        return _amounts_of(kernel, tuple(sorted(sizes.items())), tokens)

    def chain_us(
        self, kernels: Sequence[str], programmatic: int, sizes: Mapping[str, int], tokens: int
    ) -> float | None:
        """Predicted time of a chain of these kernels, `programmatic` of its edges being so; None as in `time_us`."""
        times = [self.time_us(kernel, sizes, tokens) for kernel in kernels]
        known = [time for time in times if time is not None]
        return None if len(known) < len(times) else sum(known) - programmatic * self.boundary_us


@lru_cache(maxsize=4096)
def _amounts_of(kernel: str, sizes: tuple[tuple[str, int], ...], tokens: int) -> tuple[float, float] | None:
    """Bytes and work of a launch, once for equal layers; None when a size is missing."""
    if tokens == 0:
        return 0.0, 0.0
    cost = stage_cost(kernel, dict(sizes))
    # As a float: the expected number of distinct experts is a power of T, and as a fraction of whole numbers it has
    # millions of digits for the tokens of a long prompt.
    moved, work = cost.bytes.subs(T, float(tokens)), cost.work.subs(T, float(tokens))
    return None if moved.free_symbols or work.free_symbols else (float(moved), float(work))


@dataclass(frozen=True)
class Forecast:
    """Predictions for one variant of a chain, in microseconds.

    tokens       the T that they hold for
    launch_us    of each launch; None where the device's table has no row for its kernel
    boundary_us  what a programmatic edge gains
    source       where the device's numbers come from, e.g. "NVIDIA H200, shipped"
    """

    tokens: int
    launch_us: tuple[float | None, ...]
    boundary_us: float
    source: str


def _file(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def calibration_path(device: str) -> Path:
    """Where the calibration of a device is kept: $MOEPDL_CACHE_DIR, else the user's cache folder."""
    root = os.environ.get("MOEPDL_CACHE_DIR")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moepdl"
    return base / "devices" / _file(device)


def load(path: Path, source: str) -> DeviceModel:
    """The model of a file. Raises ValueError, naming the file, when it is not one of ours."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kernels = {}
        for name, values in data["kernels"].items():
            kernels[name] = KernelModel(**values)
            for key, value in asdict(kernels[name]).items():
                least = 0.0 if key in ("fixed_us", "work_per_us") else 1e-9
                kernels[name] = replace(kernels[name], **{key: _number(f"{name}.{key}", value, least)})
        about = {str(key): str(value) for key, value in dict(data.get("about", {})).items()}
        boundary = _number("boundary_us", data["boundary_us"], -1e9)
        return DeviceModel(str(data["device"]), source, kernels, boundary, about)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no table of a device ({error!r}); `moepdl calibrate` writes it anew") from error


def _number(what: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise ValueError(f"{what} is {value!r}, not a number of at least {least:g}")
    return float(value)


def save(model: DeviceModel, path: Path) -> None:
    """Write a model where `load` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "device": model.device,
        "boundary_us": round(model.boundary_us, 3),
        "about": dict(model.about),
        "kernels": {
            name: {key: float(f"{value:.4g}") for key, value in asdict(kernel).items()}
            for name, kernel in sorted(model.kernels.items())
        },
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def derived(device: str, bandwidth: float, speed: float) -> DeviceModel:
    """The shipped H200's table for a device of `bandwidth` times its memory bandwidth, `speed` times its arithmetic."""
    base = load(_SHIPPED / _file(_REFERENCE), "shipped")
    kernels = {
        name: KernelModel(
            kernel.fixed_us, kernel.bytes_per_us * bandwidth, kernel.work_per_us * speed, kernel.sharpness
        )
        for name, kernel in base.kernels.items()
    }
    return DeviceModel(
        device,
        f"derived from {base.device}: {bandwidth:.2f} x bandwidth, {speed:.2f} x arithmetic",
        kernels,
        base.boundary_us,
    )


@lru_cache
def device_model(device: str, bandwidth: float = 1.0, speed: float = 1.0) -> DeviceModel:
    """The model of a device of this name: the user's, the shipped one, or one derived by these ratios to an H200.

    Raises ValueError for a calibration file that cannot be read.
    """
    own = calibration_path(device)
    if own.is_file():
        return load(own, "calibrated")
    shipped = _SHIPPED / _file(device)
    if shipped.is_file():
        return load(shipped, "shipped")
    return derived(device, bandwidth, speed)
