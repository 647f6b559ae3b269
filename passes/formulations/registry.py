"""The formulations in the order they are tried. Adding one is one line here and one file beside this."""

from __future__ import annotations

from moe_compiler.passes.formulations.base import Formulation
from moe_compiler.passes.formulations.grouped_mm import GROUPED_MM

__all__ = ["FORMULATIONS", "formulation_names"]

FORMULATIONS: tuple[Formulation, ...] = (GROUPED_MM,)


def formulation_names() -> tuple[str, ...]:
    """The names that `options={"disable": [...]}` accepts besides those of passes."""
    return tuple(formulation.name for formulation in FORMULATIONS)
