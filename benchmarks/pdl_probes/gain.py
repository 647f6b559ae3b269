"""P1 and the gain of our chains: what a boundary is worth when both kernels are tiny, and in a block.

Every replay is alone on the device, so nothing overlaps with the chain before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.pdl_probes.kernels import wait_for
from benchmarks.timing import captured, device_us, median
from moe_compiler import timing
from moe_compiler.demo import backend_or_function
from moe_compiler.testing import examples

TINY = 50
SIZES = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
TOKENS = (1, 2, 8, 32, 128, 512, 2048, 8192)


@triton.jit
def _tiny(data, TILE: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = tl.load(data + at)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(data + at, values + 1)


def boundary() -> list[dict[str, Any]]:
    """P1: TINY dependent kernels in one graph."""
    data = torch.zeros(32 * 128, dtype=torch.int32, device="cuda")

    def chain(_: Any, pdl: bool) -> None:
        for index in range(TINY):
            _tiny[(32,)](data, 128, pdl, launch_pdl=pdl and index > 0)

    # Without the attribute a wait does nothing, so the first kernel of the chain may have one.
    ways = {way: captured(partial(chain, pdl=pdl), [None]) for way, pdl in (("off", False), ("on", True))}
    samples = device_us(ways, rounds=50)
    off, on = (median(samples[way]) / TINY for way in ("off", "on"))
    return [
        {
            "probe": "P1",
            "chain": f"{TINY} tiny dependent kernels",
            "off us a kernel": off,
            "on us a kernel": on,
            "gain us a boundary": round((off - on) * TINY / (TINY - 1), 3),
            "on / off (95 %)": str(timing.ratio(samples["on"], samples["off"])),
        }
    ]


def row(tokens: int, replays: int) -> dict[str, Any]:
    """One row: the chain of a block with and without the attribute."""
    torch.manual_seed(0)
    module = examples()["grouped_mm"](dtype=torch.bfloat16, **SIZES).module.cuda()
    x = torch.randn(tokens, SIZES["hidden"], dtype=torch.bfloat16, device="cuda")
    graphs: dict[str, Callable[[], object]] = {}
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for way in ("on", "off"):
            torch._dynamo.reset()
            options = {"pdl": way, "require_match": True}
            compiled = torch.compile(module, backend=backend_or_function("moepdl"), options=options, dynamic=False)
            out = torch.empty_like(compiled(x))

            def call(_: Any, compiled: Any = compiled, out: torch.Tensor = out) -> None:
                out.copy_(compiled(x))

            results[way], graphs[way] = out, captured(call, [None])
        samples = device_us(graphs, rounds=100 if tokens <= 128 else 30)
        differing = 0
        traffic = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        beside = torch.cuda.Stream()
        for index in range(replays):
            if index % 8 == 0:
                with torch.cuda.stream(beside):
                    traffic.add_(1)
            graphs["on"]()
            graphs["off"]()
            # Compared on the device, so that the replays follow each other closely.
            differing = differing + (results["on"] != results["off"]).any()
        wait_for("replays of a block")
    on, off = (median(samples[way]) for way in ("on", "off"))
    return {
        "T": tokens,
        "off us": off,
        "on us": on,
        "gain us": round(off - on, 2),
        "on / off (95 %)": str(timing.ratio(samples["on"], samples["off"])),
        "replays": replays,
        "replays that differ": int(differing),
    }
