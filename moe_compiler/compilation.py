"""One compile of one graph: the options, the report, the two phases, and what happens when one of them fails.

`Compilation.raise_blocks` is phase A (before autograd), `Compilation.rewrite` is phase B on a forward or backward
graph; the remainder goes to Inductor or, with remainder="eager", is run as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from moe_compiler import _logs, device, torch_private
from moe_compiler.capture import capture, nested_bodies, restore, unsearched
from moe_compiler.dump import write_dump
from moe_compiler.errors import CaptureError, KernelError, MatchRequired, MoepdlError
from moe_compiler.fragments import fragment_of_graph
from moe_compiler.graph_pass import Context
from moe_compiler.graph_text import render_repro
from moe_compiler.inductor import JOINT, POST_GRAD, ReportStore, is_backward, joint_pass, post_grad_pass
from moe_compiler.moe_ir import is_moepdl, user_line
from moe_compiler.numeric import NumericCheck, copy_graph
from moe_compiler.options import Options
from moe_compiler.passes.raise_moe import leave_alone, raise_moe
from moe_compiler.pipeline import pass_names, record_graph, run_phase
from moe_compiler.recompute import keep_choices
from moe_compiler.report import FragmentRecord, Report, split_where
from moe_compiler.runtime_kernels.chain.launcher import KernelLaunchError

__all__ = ["Compilation"]

_WITHOUT_KERNELS = 'options={"on_error": "fallback"} runs the graph without our kernels; please report the text above'
_ONE_GRAPH = (
    "torch.compile(..., fullgraph=True) makes it one graph, or says what stands in the way; "
    "moe_compiler.prepare(model) replaces loops over experts that can never be one"
)
# Without these no block is rewritten.
_NEEDED = ("find_moe", "raise_moe")


def _not_captured(error: CaptureError) -> str:
    """One line: what stood in the way, at which line of the model, and what helps."""
    where = ", at {}  {}".format(*split_where(error.where)).rstrip() if error.where else ""
    return f"not captured, compiled by Inductor unchanged: {error.what}: {error.why}{where}; try: {error.try_}"


_PHASE_FIELDS = ("passes", "schedule", "dags", "graphs", "overlaps")


class Compilation:
    """The state of one backend call."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.report = Report(
            frame=torch_private.current_compile_id(),
            status="unchanged",
            options=options.to_dict(),
            origins=dict(options.origins),
            environment=device.describe(),
        )
        self._store: ReportStore | None = None
        self._numeric = NumericCheck() if options.verify == "numeric" else None
        self._note_disabled()

    def _note_disabled(self) -> None:
        """Say which passes do not run, since whatever else the report tells follows from that."""
        for name in self.options.disable:
            if name in pass_names():
                self.report.notes.append(f"{name} is disabled by {self.options.source_of('disable')}")

    def _note_idle_options(self) -> None:
        """Say of each option about exchanges that the user set why it changes nothing in this compile."""
        for key in ("overlap", "chunks", "capacity", "timeout_s"):
            if self.options.origins.get(key, "default") != "default" and not self.report.exchanges:
                rest = "; it decides what runs beside a chain" if key == "overlap" else ""
                self.report.notes.append(f"{key}: no all-to-all exchange in this graph{rest}")

    def _note_pdl_of_inductor(self) -> None:
        """Inductor launches its own kernels programmatically when it is told to, and keeps none of our rules."""
        key = "triton.enable_pdl"
        if self.options.inductor.get(key, torch_private.configured(key, False)):
            self.report.notes.append(
                f"inductor's {key} is on: kernels of the remainder that only write do not wait, so they may race with "
                "each other (docs/pdl.md); our chains do"
            )

    # Phase A

    def raise_blocks(self, module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule | None:
        """The graph with its MoE blocks raised, None when it has none (or could not be captured: see the report).

        Raises MatchRequired when fewer blocks matched than options["require_match"] asks for.
        """
        broken = fragment_of_graph(module)
        if broken is not None:
            self.report.fragments.append(broken)
            cut = torch_private.is_cut_by_ddp(module)
            told = f"{broken.reason}; {broken.remedy}" if cut else "a block that it holds only a part of is none"
            self.report.notes.append(f"this graph is a fragment of its frame: {told}")
        raised: GraphModule | None = None
        try:
            captured = capture(module, example_inputs)
        except CaptureError as error:
            self.report.notes.append(_not_captured(error))
            _logs.log().debug("frame %s was not captured", self.report.frame, exc_info=error)
        else:
            raised = self._raise(captured)
        self._note_idle_options()
        needed = int(self.options.require_match)
        found = sum(match.count for match in self.report.matches if not match.left_alone)
        if found < needed:
            raise MatchRequired(
                f'{found} MoE blocks matched where options["require_match"] asks for {needed}',
                why=str(self.report),
                try_=self._remedy(broken, module),
            )
        return raised

    def _remedy(self, broken: FragmentRecord | None, module: GraphModule) -> str:
        """What helps where too few blocks matched."""
        disabled = [name for name in _NEEDED if name in self.options.disable]
        if disabled:
            return f"leave {' and '.join(disabled)} out of {self.options.source_of('disable')}"
        if broken is None:
            return 'options={"require_match": False} compiles whatever is there'
        return broken.remedy if torch_private.is_cut_by_ddp(module) else _ONE_GRAPH

    def _raise(self, captured: GraphModule) -> GraphModule | None:
        context = Context(self.options, "capture", self.report)
        record_graph(captured, "captured", context)
        if self.options.dump is not None:
            title = f"repro of frame {self.report.frame}"
            self.report.repro = render_repro(captured, title, "the graph as it was captured", self.options.changed())
        for body in [captured, *nested_bodies(captured)]:
            own = Context(self.options, "capture", self.report, self._numeric)
            run_phase(body, "capture", own)
            if raise_moe.name in self.options.disable:
                leave_alone(own, f"{raise_moe.name} is disabled by {self.options.source_of('disable')}")
        for node, name in unsearched(captured):
            self.report.notes.append(f"a top-k in a body of {name} was not looked at: {user_line(node)}")
        if not any(not match.left_alone for match in self.report.matches):
            return None
        restore(captured)
        self.report.status = "dryrun" if self.options.dryrun else "rewritten"
        self._note_pdl_of_inductor()
        return captured

    # Phase B

    def rewrite(self, module: GraphModule) -> None:
        """Stages, chains and launches of one post-autograd graph, in place."""
        phase = "backward" if is_backward(module.graph) else "forward"
        if phase == "forward" and not any(map(is_moepdl, module.graph.nodes)):
            return  # a body inside of a graph (a branch of cond, a score function of flex attention)
        self._forget(phase)
        context = Context(self.options, phase, self.report, self._numeric)
        trial = module
        if self.options.on_error == "fallback":
            trial = copy_graph(module)
        record_graph(module, "autograd", context)
        try:
            run_phase(trial, "graph", context)
        except MoepdlError as error:
            if self.options.on_error == "raise":
                raise
            # The canonical operators run by themselves, so the graph is right as it stands. What is compiled of it may
            # come out of a cache the next time: the report then says the same.
            self.failed(error)
            if self._store is not None:
                self._store.save(phase, {"errors": [str(error)]})
            return
        if trial is not module:
            module.graph = trial.graph
        if "lower" in self.options.disable:
            self._forget_chains(phase)  # planned and not lowered: each stage runs as an operator of its own
        self.finish_phase(phase)

    def _forget_chains(self, phase: str) -> None:
        """Drop what the report says of a phase's launches and of their times."""
        self.report.schedule = [record for record in self.report.schedule if record.direction != phase]
        if not self.report.schedule:
            self.report.pdl_off = self.report.predictions = self.report.measured = self.report.tiles = ""

    def _forget(self, phase: str) -> None:
        """Drop what an earlier run of the phase (or the cache) put into the report."""
        if phase in self.report.phases_pending:
            self.report.phases_pending.remove(phase)
        self.report.passes = [record for record in self.report.passes if record.phase != phase]
        self.report.graphs = [record for record in self.report.graphs if record.phase != phase]
        self._forget_chains(phase)
        self.report.overlaps = [record for record in self.report.overlaps if record.direction != phase]
        self.report.dags = [record for record in self.report.dags if record.direction != phase]

    def finish_phase(self, phase: str) -> None:
        """Store what the phase reported beside the cache, and write the dump anew."""
        part = self.report.to_dict()
        data: dict[str, Any] = {
            "pdl_off": self.report.pdl_off,
            "predictions": self.report.predictions,
            "measured": self.report.measured,
            "tiles": self.report.tiles,
        }
        for name in _PHASE_FIELDS:
            data[name] = [item for item in part[name] if phase in (item.get("phase"), item.get("direction"))]
        if self._store is not None:
            self._store.save(phase, data)
        self.write_dump()
        if phase == "backward":
            _logs.emit(self.report)

    def _load_phase(self, phase: str) -> bool:
        data = self._store.load(phase) if self._store is not None else None
        if data is None:
            return False
        if "errors" in data:
            for text in data["errors"]:
                self.failed(text)
            return True
        stored = Report.from_dict({**self.report.to_dict(), **data})
        for name in _PHASE_FIELDS:
            getattr(self.report, name).extend(getattr(stored, name))
        self.report.pdl_off, self.report.predictions = stored.pdl_off, stored.predictions
        self.report.measured, self.report.tiles = stored.measured, stored.tiles
        self.report.notes.append(f"{phase} graph loaded from the compile cache")
        return True

    # The remainder

    def compile(
        self, module: GraphModule, example_inputs: Sequence[Any], *, original: GraphModule | None = None
    ) -> Callable[..., Any]:
        """Hand a graph on: to Inductor with phase B as its pass, or to AOTAutograd alone with remainder="eager".

        original: the graph that `module` was raised from, None when it was not raised.
        """
        raised = original is not None
        if raised:
            self._store = ReportStore(module, example_inputs, self.options)
            training = torch.is_grad_enabled() and any(
                isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
            )
            self.report.phases_pending = ["forward", *(["backward"] if training else [])]
        if self.options.remainder == "eager":
            compiled = torch_private.aot_module(
                module, example_inputs, lambda graph, _: self._run_eager(graph, raised), joint=keep_choices
            )
        else:
            compiled = torch_private.compile_fx(module, example_inputs, self._patches(raised))
        if raised and "forward" in self.report.phases_pending and self._load_phase("forward"):
            self.report.phases_pending.remove("forward")
            if "backward" in self.report.phases_pending and self._load_phase("backward"):
                self.report.phases_pending.remove("backward")
        if raised and "forward" in self.report.phases_pending:
            self.report.phases_pending.remove("forward")
            self.report.notes.append("Inductor ran no pass after autograd: each block is one operator, without chains")
        return self._guarded(compiled, original) if original is not None else compiled

    def _guarded(self, compiled: Callable[..., Any], original: GraphModule) -> Callable[..., Any]:
        """Name the kernel when one fails at run time; with on_error="fallback" run the graph's own operators then."""
        failed = False

        def run(*arguments: Any) -> Any:
            nonlocal failed
            if not failed:
                try:
                    return compiled(*arguments)
                except KernelLaunchError as error:
                    found = KernelError(error.kernel, str(error.cause), why=str(error), try_=_WITHOUT_KERNELS)
                    if self.options.on_error == "raise":
                        raise found from error
                    self.failed(found)
                    failed = True
            return original(*arguments)

        return run

    def _run_eager(self, module: GraphModule, raised: bool) -> GraphModule:
        if raised:
            self.rewrite(module)
        return module

    def _patches(self, raised: bool) -> dict[str, Any]:
        patches: dict[str, Any] = {}
        if self.options.mode is not None:
            patches |= torch_private.mode_options(self.options.mode)
        if self.report.exchanges and self.options.overlap != "off":
            patches |= torch_private.keep_order()
        patches |= self.options.inductor
        if raised:
            patches[POST_GRAD] = post_grad_pass(self.rewrite, self.options)
            patches[JOINT] = joint_pass(self.options)
        return patches

    # The end

    def failed(self, error: BaseException | str) -> None:
        """Record an error that on_error="fallback" turned into a plain compile, and warn once."""
        self.report.errors.append(str(error))
        self.report.status = "fallback"
        warnings.warn(f"moepdl fell back: {error}", stacklevel=2)

    def write_dump(self) -> None:
        """Write the dump folder when one was asked for."""
        if self.options.dump is not None:
            write_dump(self.report, self.options.dump)
