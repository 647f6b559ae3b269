"""What a chain is predicted to take, launch by launch, and what each of its boundaries gains by programmatic launch.

A variant serves a range of T. It is predicted at the block's own T where that is constant and in its range, else at the
largest T that the variant serves; where that has no limit, at LARGE tokens or twice the variant before it.
"""

from __future__ import annotations

from moe_compiler.dag import block_sizes
from moe_compiler.device_model import DeviceModel, Forecast
from moe_compiler.launch import Chain, tokens_of

__all__ = ["LARGE", "forecast", "tokens_by_variant"]

LARGE = 4096


def forecast(chain: Chain, model: DeviceModel) -> dict[str, Forecast]:
    """The forecast of each variant of a chain, by the variant's name."""
    sizes = block_sizes(chain.nodes)
    found: dict[str, Forecast] = {}
    tokens = tokens_by_variant(chain)
    for variant in chain.program.variants:
        times = tuple(model.time_us(launch.kernel, sizes, tokens[variant.name]) for launch in variant.launches)
        found[variant.name] = Forecast(tokens[variant.name], times, model.boundary_us, f"{model.device}, {model.label}")
    return found


def tokens_by_variant(chain: Chain) -> dict[str, int]:
    """The T that each variant of a chain is predicted, and measured, at."""
    found: dict[str, int] = {}
    own, before = tokens_of(chain.nodes[0]), 0
    for variant in chain.program.variants:
        limit = variant.max_tokens
        tokens = limit if limit is not None else max(LARGE, 2 * before)
        if own is not None and before < own and (limit is None or own <= limit):
            tokens = own
        found[variant.name] = tokens
        before = limit or before
    return found
