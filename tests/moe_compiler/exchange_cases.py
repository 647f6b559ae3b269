"""Groups, blocks and transports for the tests of `moepdl plan`, small enough to be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from moe_compiler.block_program import BlockSizes
from moe_compiler.device_model import DeviceModel, KernelModel, device_model
from moe_compiler.exchange_plan.builder import Block
from moe_compiler.exchange_plan.links import Links, Transport
from moe_compiler.exchange_plan.operation import Carrier, Way
from moe_compiler.exchange_plan.routing import Routing, uniform
from moe_compiler.exchange_plan.traffic import Traffic, traffic

FAST = 1e30
# A row of 500 bfloat16 is 1000 bytes, with one choice 1010; two experts, one a token.
SMALL = Block(BlockSizes(2, 1, 500, 64))
QWEN3 = Block(BlockSizes(128, 8, 2048, 768))
MIXTRAL = Block(BlockSizes(8, 2, 4096, 14336))


def h200() -> DeviceModel:
    """The shipped table."""
    return device_model("NVIDIA H200")


def fixed(us: float = 1.0, boundary_us: float = 0.0) -> DeviceModel:
    """A device on which every kernel takes the same."""
    kernels = {name: KernelModel(us, FAST) for name in h200().kernels}
    return DeviceModel("test", "made by hand", kernels, boundary_us)


def way(transport: Transport, order: str = "plain", chunks: int = 1) -> Way:
    """One transport both ways, with its most CTAs."""
    carrier = Carrier(transport, max(transport.shares))
    return Way(carrier, carrier, order, chunks)


def transport(call_us: float = 0.0, beside: float = 1.0, **more: float | bool) -> Transport:
    """A transport with the link's whole bandwidth."""
    return Transport("test", call_us, {0: 1.0}, {0: beside}, **more)  # type: ignore[arg-type]


def group(
    tokens: Sequence[int], links: Links, *, block: Block = QWEN3, routing: Routing | None = None, **more: bool | str
) -> Traffic:
    """Uniform routing over ranks with so many tokens, unless given."""
    chosen = routing or uniform(block.sizes.experts, block.sizes.k)
    return traffic(chosen, tokens, links, **more)  # type: ignore[arg-type]
