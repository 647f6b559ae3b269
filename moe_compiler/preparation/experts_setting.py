"""The library's own way out: transformers 5 chooses by a setting how packed experts are computed.

Its "eager" form loops over the experts that were hit; "grouped_mm" and "batched_mm" become one graph. `prepare`
switches the setting where every experts module that reads it agrees with its own loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_compiler.errors import PrepareError
from moe_compiler.preparation import probe
from moe_compiler.preparation.change import Change
from moe_compiler.preparation.expert_dispatch import holding
from moe_compiler.preparation.probe import Call

__all__ = ["setting_of", "switched_settings"]

_LIBRARY_FORMS = ("grouped_mm", "batched_mm")
_LOOPS = ("eager", None)  # None: nobody has chosen, as for a block that is built by itself


def setting_of(module: nn.Module) -> Any:
    """The config object through which transformers 5 chooses how these experts are computed; None for other modules."""
    config = getattr(module, "config", None)
    own = all(name in vars(module) for name in ("has_gate", "is_transposed"))
    return config if own and hasattr(config, "_experts_implementation") else None


def switched_settings(names: Mapping[str, nn.Module], calls: dict[str, Call]) -> list[Change]:
    groups: dict[int, list[str]] = {}
    for name, module in names.items():
        config = setting_of(module)
        if config is not None and config._experts_implementation in _LOOPS:
            groups.setdefault(id(config), []).append(name)
    changes: list[Change] = []
    for members in groups.values():
        try:
            changes.append(_switched(members, names, calls))
        except PrepareError:
            for change in changes:
                change.undo()
            raise
    return changes


def _switched(members: Sequence[str], names: Mapping[str, nn.Module], calls: dict[str, Call]) -> Change:
    config = setting_of(names[members[0]])
    before = config._experts_implementation

    def choose(form: str | None) -> None:
        config._experts_implementation = form

    reasons = []
    for form in _LIBRARY_FORMS:
        try:
            error = max(_error_of_form(names[name], calls.get(name), choose, form) for name in members)
        except Exception as reason:  # whatever it is, the original stays
            reasons.append(f"{form}: {probe.first_line(reason)}")
            choose(before)
            continue
        choose(form)
        return Change(
            path=_common(members),
            what="experts_implementation",
            before=f"{before}, which loops over the experts that were hit",
            after=form,
            error=error,
            blocks=tuple(members),
            _restore=lambda: choose(before),
        )
    raise PrepareError(
        f"{members[0]}: no experts_implementation agrees with its own loop",
        why="; ".join(reasons),
        try_="model.set_experts_implementation(...) chooses one without this comparison",
    )


def _error_of_form(module: nn.Module, own: Call | None, choose: Callable[[str | None], None], form: str) -> float:
    """The error of one of the library's forms against its loop, on the model's own inputs or on made ones."""
    held = holding(module)
    count = held.count if held is not None else _count(module)
    if own is not None:
        more = probe.larger(own, count)
        tests = [own] + ([more] if more is not None else [])
    else:
        made = probe.made_calls(module, probe.widths(module), count)
        tests = list(itertools.islice((call for call in made if probe.runs(module, call)), 1))
    if not tests:
        raise ValueError("no inputs could be made for it; give prepare inputs of the model")

    def after(name: str, test: Call) -> Callable[[torch.dtype | None], probe.Outcome]:
        def ran(dtype: torch.dtype | None) -> probe.Outcome:
            choose(name)
            return probe.run(module, test, dtype)

        return ran

    return max(probe.agreement(after("eager", test), after(form, test)) for test in tests)


def _count(module: nn.Module) -> int:
    number = getattr(module, "num_experts", 0)
    return number if isinstance(number, int) and number > 0 else 2


def _common(names: Sequence[str]) -> str:
    """The module around all of these."""
    parts = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in shared)
