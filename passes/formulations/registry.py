"""The formulations in the order they are tried. Adding one is one line here and one file beside this."""

from __future__ import annotations

from moe_compiler.passes.formulations.base import Formulation
from moe_compiler.passes.formulations.batched_mm import BATCHED_MM
from moe_compiler.passes.formulations.capacity import CAPACITY
from moe_compiler.passes.formulations.dense_bmm import DENSE_BMM
from moe_compiler.passes.formulations.drop_and_pad import DROP_AND_PAD
from moe_compiler.passes.formulations.exchanged_rows import EXCHANGED_ROWS
from moe_compiler.passes.formulations.exchanged_slots import EXCHANGED_SLOTS
from moe_compiler.passes.formulations.gather_einsum import GATHER_EINSUM
from moe_compiler.passes.formulations.grouped_mm import GROUPED_MM
from moe_compiler.passes.formulations.grouped_scatter import GROUPED_SCATTER
from moe_compiler.passes.formulations.grouped_top1 import GROUPED_TOP1
from moe_compiler.passes.formulations.one_hot_loop import ONE_HOT_LOOP
from moe_compiler.passes.formulations.routing_map import ROUTING_MAP
from moe_compiler.passes.formulations.split_experts import SPLIT_EXPERTS
from moe_compiler.passes.formulations.split_linear import SPLIT_LINEAR
from moe_compiler.passes.formulations.where_loop import WHERE_LOOP

__all__ = ["EXCHANGES", "FORMULATIONS", "exchange_names", "formulation_names"]

FORMULATIONS: tuple[Formulation, ...] = (
    GROUPED_MM,
    GROUPED_SCATTER,
    GROUPED_TOP1,
    BATCHED_MM,
    GATHER_EINSUM,
    DENSE_BMM,
    CAPACITY,
    DROP_AND_PAD,
    SPLIT_LINEAR,
    SPLIT_EXPERTS,
    ROUTING_MAP,
    ONE_HOT_LOOP,
    WHERE_LOOP,
)


# Blocks whose experts are on several ranks, with the exchange that the model wrote. They are tried first: what is
# inside of one is no block.
EXCHANGES: tuple[Formulation, ...] = (EXCHANGED_ROWS, EXCHANGED_SLOTS)


def formulation_names() -> tuple[str, ...]:
    """The names of the formulations with all experts on one rank; `disable` accepts them besides those of passes."""
    return tuple(formulation.name for formulation in FORMULATIONS)


def exchange_names() -> tuple[str, ...]:
    """The names of the formulations that exchange tokens between ranks; `disable` accepts them too."""
    return tuple(formulation.name for formulation in EXCHANGES)
