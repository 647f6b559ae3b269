"""The backend: `torch.compile(model, backend="moepdl")`, and what can be asked about it.

The way of a graph: capture it to one dialect, raise its MoE blocks to two differentiable operators (phase A), let
AOTAutograd and Inductor take over, and inside of Inductor turn those operators into chains of launches, forward and
backward (phase B). A graph without MoE goes to Inductor as it came.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import GraphModule

from moe_compiler import _logs, device, fragments, torch_private
from moe_compiler.compilation import Compilation
from moe_compiler.errors import MatchRequired, MoepdlError
from moe_compiler.options import Options, resolve
from moe_compiler.pipeline import known_names
from moe_compiler.recompute import keep_choices
from moe_compiler.report import FragmentRecord, Report

__all__ = ["explain", "last_reports", "moepdl"]

_NEEDS_FULLGRAPH = "sizes in this graph depend on data: compile with fullgraph=True, else Dynamo breaks it there"
_REPORTS: deque[Report] = deque(maxlen=256)
# What `explain` collects: the compiles of its own thread and call only, whatever other threads compile meanwhile.
_collected: ContextVar[list[Report] | None] = ContextVar("collected", default=None)
_warned_untested = False


def moepdl(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: its MoE blocks as chains of launches, everything else through Inductor.

    options: see `moe_compiler.options.Options`; mode: what Inductor means by it. Raises OptionError for options that
    do not exist, MatchRequired, and, unless options["on_error"] is "fallback", PassError, VerifyError or
    PdlUnavailable.
    """
    settings = resolve(options, mode=mode, known_names=known_names())
    _warn_untested()
    compilation = Compilation(settings)
    _note_given_up()
    _REPORTS.append(compilation.report)
    collected = _collected.get()
    if collected is not None:
        collected.append(compilation.report)
    raised = _raised(compilation, module, example_inputs)
    if settings.dryrun and torch_private.has_data_dependent_sizes(module):
        compilation.report.notes.append(_NEEDS_FULLGRAPH)
    if raised is None or settings.dryrun:
        if raised is not None:
            _analyse(compilation, raised, example_inputs)
        if settings.dryrun and settings.remainder == "eager":
            return _told(compilation, module.forward)
        compiled = compilation.compile(module, example_inputs)
    else:
        compiled = compilation.compile(raised, example_inputs, original=module)
    return _told(compilation, compiled)


def _told(compilation: Compilation, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Write what there is to say about a compile, and hand on its result."""
    compilation.write_dump()
    _logs.emit(compilation.report)
    return compiled


def _raised(compilation: Compilation, module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule | None:
    try:
        return compilation.raise_blocks(module, example_inputs)
    except MatchRequired:
        raise
    except MoepdlError as error:
        if compilation.options.on_error == "raise":
            raise
        compilation.failed(error)
        return None


def _analyse(compilation: Compilation, raised: GraphModule, example_inputs: Sequence[Any]) -> None:
    """What phase B would do, without running any of it: for options["dryrun"]."""

    def note(module: GraphModule, _backward: bool) -> GraphModule:
        compilation.rewrite(module)
        return module

    torch_private.aot_module(raised, example_inputs, note, joint=keep_choices, backward_now=True)


def last_reports() -> list[Report]:
    """The reports of this process's compiles, oldest first, one a compiled graph; the newest 256 are kept.

    Frames that Dynamo gave up since the last call, so that no graph of them reached a backend, have a report too.
    """
    _note_given_up()
    return list(_REPORTS)


def _note_given_up() -> None:
    """Reports of the frames that Dynamo gave up lately; ahead of the next compile's, so that the order stays true."""
    seen = {report.frame for report in _REPORTS}
    for frame, record in fragments.WATCH.unseen(seen).items():
        _REPORTS.append(_without_graph(frame, [record]))


def _without_graph(frame: str, records: list[FragmentRecord]) -> Report:
    return Report(frame=frame, status="unchanged", environment=device.describe(), fragments=records)


def explain(model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """What compiling `model` and calling it with these arguments would do, as one Report.

    The model is traced by the backend itself, in a dry run: what is executed is the model's own eager operators, once.
    It is traced as one graph (`fullgraph=True`); where that fails, frame by frame, and the report's fragments say what
    broke it, at which line, and what helps. The reports of several frames are merged into one, each named by its
    compile id. What was compiled of the model's own frame before is compiled again at its next call.
    """
    dry = {**(options or {}), "dryrun": True, "remainder": "eager"}
    obstacle: FragmentRecord | None = None
    pieces: list[FragmentRecord] = []
    # A frame that Dynamo gave up in an earlier compile would not be looked at again.
    torch_private.forget_compiled(model.forward if isinstance(model, torch.nn.Module) else model)
    with fragments.WATCH.paused():
        try:
            made = _traced(torch.compile(model, backend=moepdl, options=dry, fullgraph=True), args, kwargs)
        except torch_private.graph_break_errors() as error:
            obstacle = fragments.fragment_of_error(error)
            own = fragments.Watch()
            own.unseen(())
            made = _traced(torch.compile(model, backend=moepdl, options=dry), args, kwargs)
            pieces = list(own.unseen({report.frame for report in made}).values())
    report = Report.merge(made) if made else _without_graph("none", [])
    report.fragments += pieces
    if obstacle is not None:
        report.notes.append(f"the model does not make one graph: {fragments.sentence(obstacle)}; try {obstacle.remedy}")
    if not made:
        report.notes.append("Dynamo handed no graph to the backend")
    return report


def _traced(compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Report]:
    """The reports that calling a compiled model makes, the last one of each frame: Dynamo may trace a frame again."""
    made: list[Report] = []
    token = _collected.set(made)
    try:
        compiled(*args, **kwargs)
    finally:
        _collected.reset(token)
    return list({report.frame: report for report in made}.values())


def _warn_untested() -> None:
    global _warned_untested
    sentence = device.untested_versions()
    if sentence and not _warned_untested:
        _warned_untested = True
        warnings.warn(f"moepdl: {sentence}", stacklevel=3)


def resolve_options(options: Mapping[str, Any] | None) -> Options:
    """The options as a compile would see them now, environment included."""
    return resolve(options, known_names=known_names())
