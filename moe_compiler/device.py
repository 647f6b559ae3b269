"""What the devices of this machine can do, asked once: is programmatic launch there, and if not, why."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from moe_compiler.device_model import DeviceModel, device_model

__all__ = ["TESTED", "cost_model", "describe", "triton_version", "untested_versions", "why_left_alone", "why_no_pdl"]

# (torch, triton) pairs that the test suite has run on; None: without triton (CPU).
TESTED: tuple[tuple[str, str | None], ...] = (("2.11", "3.6"), ("2.13", "3.9"), ("2.13", None))


@lru_cache(maxsize=1)
def triton_version() -> str | None:
    """The version of triton, None where it is not installed."""
    if find_spec("triton") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def why_no_pdl(kind: str) -> str:
    """Why kernels on a device of this kind ("cuda", "cpu") are not launched programmatically; "" when they are."""
    if kind != "cuda":
        return f"the block runs on {kind}"
    if torch.version.hip is not None:
        return "AMD GPUs have no programmatic dependent launch"
    if triton_version() is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"sm_{major}{minor} is older than sm_90"
    found = tuple(int(part) for part in (triton_version() or "0.0").split(".")[:2])
    if found < (3, 5):
        return f"triton {triton_version()} cannot call the device-side wait; 3.5 can"
    return ""


def why_left_alone(kind: str, dtype: torch.dtype) -> str:
    """Why a block on a device of this kind that computes in `dtype` stays with Inductor; "" when it is rewritten."""
    if kind == "cpu":
        return ""
    if kind != "cuda" or torch.version.hip is not None:
        return f"there are no kernels for {'AMD GPUs' if kind == 'cuda' else f'{kind} devices'}"
    if triton_version() is None:
        return "triton is not installed"
    if dtype is torch.float64:
        return "the CUDA kernels compute in float32, bfloat16 and float16, not in float64"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 8 else f"the kernels need sm_80, the device is sm_{major}{minor}"


def describe() -> dict[str, Any]:
    """Versions and devices, as shown in reports and by `moepdl env`."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton_version() or "not installed",
        "device": "cpu",
        "cpu_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "device": torch.cuda.get_device_name(),
            "capability": f"sm_{major}{minor}",
            "cuda": torch.version.cuda,
        }
        model = cost_model("cuda")
        if model is not None:
            found["predictions"] = model.label
    return found


# What an H200's properties say: bytes a second of its memory, and multiprocessors times clock in Hz.
_H200_BANDWIDTH, _H200_SPEED = 4.92e12, 132 * 1.98e9
# Matmul throughput of a multiprocessor a clock, by generation, relative to Hopper's.
_GENERATION = {8: 0.5, 9: 1.0, 10: 2.0, 12: 0.5}


def cost_model(kind: str) -> DeviceModel | None:
    """The model of the current device of this kind, None where there is nothing to predict (no CUDA device)."""
    if kind != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    bandwidth = 2e3 * clock * width / 8 / _H200_BANDWIDTH or 1.0
    rate = 1e3 * getattr(properties, "clock_rate", 0) * properties.multi_processor_count / _H200_SPEED or 1.0
    speed = rate * _GENERATION.get(properties.major, 1.0)
    return device_model(properties.name, round(bandwidth, 2), round(speed, 2))


def untested_versions() -> str:
    """A sentence when this pair of torch and triton is none of the tested ones, else ""."""
    triton = triton_version()
    own = (".".join(torch.__version__.split(".")[:2]), ".".join(triton.split(".")[:2]) if triton else None)
    if own in TESTED:
        return ""
    return f"{_pair(*own)} is not among the tested pairs ({', '.join(_pair(*pair) for pair in TESTED)})"


def _pair(torch_version: str, triton_version: str | None) -> str:
    return f"torch {torch_version} with {f'triton {triton_version}' if triton_version else 'no triton'}"
