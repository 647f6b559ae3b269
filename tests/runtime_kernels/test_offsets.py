"""Offsets of all device kernels pass 32 bits where the problem is large; seen without a GPU, in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="device code is compiled by triton")

import triton.language as tl  # noqa: E402

from moe_compiler.runtime_kernels.launching import Start  # noqa: E402
from moe_compiler.runtime_kernels.registry import kernel  # noqa: E402
from moe_compiler.runtime_kernels.tiles import TABLES  # noqa: E402
from tests.runtime_kernels.address_products import first_form, narrow_products  # noqa: E402
from tests.runtime_kernels.recorded import DEVICE_KERNELS, EXPERTS, TOKENS, K, operands, record_on  # noqa: E402

# Lengths of the problem that is compiled for, all above LEAST: an expert's matrices have more than 2**31 elements.
HIDDEN, INNER, FAR = 65536, 40960, 1 << 30
LEAST = 4096
# 32-bit products that are right: at most ORDER_FEW pairs times experts.
SMALL = {"order_kernel"}
LAYOUTS: dict[str, dict[str, bool]] = {
    "packed": {},
    "list apart": {"listed": True, "apart": True},
    "turned turns": {"turned": True, "turns": True},
}


def large(name: str, layout: dict[str, bool]) -> dict[str, Any]:
    """Operands without memory: rows of large matrices, and vectors and narrow matrices with wide steps."""
    with torch.device("meta"):
        tensors = operands(hidden=HIDDEN, inner=INNER, **layout)
        far = {
            "logits": torch.empty_strided((TOKENS, EXPERTS), (1, FAR)),
            "ids": torch.empty_strided((TOKENS, K), (1, FAR), dtype=torch.int64),
            "bias": torch.empty_strided((EXPERTS,), (FAR,)),
            "expert_scale": torch.empty_strided((EXPERTS,), (FAR,)),
            "router": torch.empty_strided((HIDDEN, EXPERTS), (FAR, 1), dtype=torch.bfloat16),
            "router_bias": torch.empty_strided((EXPERTS,), (FAR,), dtype=torch.bfloat16),
        }
        if name == "route_backward":
            far["grad_weights"] = torch.empty_strided((TOKENS, K), (1, FAR))
        for key in ("gate_bias", "up_bias", "down_bias", "grad_gate_bias", "grad_up_bias", "grad_down_bias"):
            if tensors[key]:
                shape = tensors[key][0].shape
                step = {1: (FAR,), 2: (1, FAR), 3: (1, FAR, 2 * FAR)}[len(shape)]
                far[key] = [torch.empty_strided(shape, step, dtype=torch.bfloat16) for _ in tensors[key]]
    written = {"route": ("ids",), "router_logits": ("logits",)}.get(name, ())
    return tensors | {key: value for key, value in far.items() if key not in written}


def started(name: str) -> Iterator[Start]:
    tables = TABLES.get(name)
    tiles = {tile for _, tile in tables.ranges(torch.bfloat16, 90)} if tables is not None else {None}
    for layout in LAYOUTS.values() if kernel(name).traits.lists else ({},):
        for tile in sorted(tiles, key=str):
            yield from record_on(
                large(name, layout), name, True, torch.bfloat16, **({"tile": tile} if tile is not None else {})
            )
    if name in ("gate_up_few", "down_few"):
        # With a token or two the loops are unrolled.
        with torch.device("meta"):
            short = operands() | {"ids": torch.empty_strided((2, K), (1, FAR), dtype=torch.int64)}
        short |= {key: short[key][:2] for key in ("x", "y", "weights")} | {"act": short["act"][: 2 * K]}
        yield from record_on(short, name, True, torch.bfloat16)
    if name == "router_logits":
        few = large(name, {})
        yield from record_on(few | {"x": few["x"][:4], "logits": few["logits"][:4]}, name, True, torch.bfloat16)


@pytest.mark.parametrize("name", DEVICE_KERNELS)
def test_no_offset_is_a_product_of_32_bits(name):
    found = []
    for start in started(name):
        if start.kernel.__name__ not in SMALL:
            found += [f"{start.kernel.__name__}: {line}" for line in narrow_products(first_form(start), LEAST)]
    assert not found, "\n".join(dict.fromkeys(found))


@pytest.mark.parametrize("name", ["order_count", "order_scatter"])
def test_counts_of_many_blocks_and_experts(name):
    """counts [blocks, experts] has more than 2**31 elements before there are 2**31 pairs."""
    with torch.device("meta"):
        tensors = operands() | {"counts": torch.empty(1, 8192, dtype=torch.int32)}
        tensors["starts"] = torch.empty(8193, dtype=torch.int32)
    for start in record_on(tensors, name, True, torch.bfloat16, {"num_experts": 8192}):
        assert not narrow_products(first_form(start), LEAST)


@triton.jit
def _narrow(rows, out, LENGTH: tl.constexpr, PDL: tl.constexpr):
    r = tl.load(rows + tl.program_id(0))
    tl.store(out + r * LENGTH + tl.arange(0, 16), tl.zeros((16,), tl.float32))


@triton.jit
def _wide(rows, out, LENGTH: tl.constexpr, PDL: tl.constexpr):
    r = tl.load(rows + tl.program_id(0))
    tl.store(out + r.to(tl.int64) * LENGTH + tl.arange(0, 16), tl.zeros((16,), tl.float32))


@triton.jit
def _narrow_tile(rows, out, LENGTH: tl.constexpr, PDL: tl.constexpr):
    r = tl.program_id(0) * 16 + tl.arange(0, 16)
    at = (r * LENGTH).to(tl.int64)[:, None] + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.zeros((16, 16), tl.float32))


@pytest.mark.parametrize(("function", "length", "faults"), [
    (_narrow, 65536, 1), (_narrow, 5000, 1), (_narrow, 64, 0), (_wide, 65536, 0), (_narrow_tile, 65536, 1),
])  # fmt: skip
def test_a_narrow_product_is_seen(function, length, faults):
    operands = (torch.empty(4, dtype=torch.int32, device="meta"), torch.empty(64, device="meta"))
    start = Start(function, 1, operands, (), {"LENGTH": length}, False, 4, 1)
    assert len(narrow_products(first_form(start), LEAST)) == faults
