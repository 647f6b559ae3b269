"""Does a module become one graph, and does a formulation match in it? Asked without executing anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from moe_compiler import fragments, torch_private
from moe_compiler.compilation import Compilation
from moe_compiler.errors import MoepdlError
from moe_compiler.options import resolve
from moe_compiler.pipeline import known_names
from moe_compiler.preparation.probe import Call

__all__ = ["Verdict", "verdict"]


@dataclass(frozen=True)
class Verdict:
    """broken: why Dynamo does not capture the module whole, "" when it does; then matched: how many blocks the finder
    binds, misses: why it binds none, loose: are there sizes that only the data decides.
    """

    broken: str = ""
    matched: int = 0
    misses: str = ""
    loose: bool = False


class _Whole(Exception):
    """Dynamo captured the whole module."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__("captured")
        self.verdict = verdict


def verdict(module: nn.Module, call: Call) -> Verdict:
    """What Dynamo and the finder make of a call. What was compiled of the module's own frame is forgotten."""

    def stop(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise _Whole(_found(graph, example_inputs))

    torch_private.forget_compiled(module.forward)
    settings = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20, "automatic_dynamic_shapes": False}
    try:
        with (
            torch.no_grad(),
            fragments.WATCH.paused(),
            torch_private.configured_dynamo(settings),
            torch_private.quiet_dynamo(),
        ):
            torch.compile(module, backend=stop, fullgraph=True)(*call.args, **call.kwargs)
    except torch_private.graph_break_errors() as error:
        return Verdict(broken=fragments.sentence(fragments.fragment_of_error(error)))
    except Exception as error:
        whole = getattr(error, "inner_exception", None)
        if isinstance(whole, _Whole):
            return whole.verdict
        return Verdict(broken=str(error).strip().splitlines()[0])
    return Verdict(broken="Dynamo skips it: it runs in eager")


def _found(graph: GraphModule, example_inputs: Sequence[Any]) -> Verdict:
    compilation = Compilation(resolve({"dryrun": True, "remainder": "eager"}, known_names=known_names()))
    loose = torch_private.has_data_dependent_sizes(graph)
    try:
        compilation.raise_blocks(graph, example_inputs)
    except MoepdlError as error:
        return Verdict(misses=error.what, loose=loose)
    report = compilation.report
    matched = sum(match.count for match in report.matches)
    nearest = next(iter(report.folded_misses()), None)
    misses = "" if matched else nearest.reason if nearest is not None else "no candidate"
    return Verdict(matched=matched, misses=misses, loose=loose)
