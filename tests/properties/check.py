"""Run one case: compile it, count its matches, hold its numbers to the accuracy rule, run every pass list twice.

The rule: the error against float64 is at most 1.5 times eager's own, plus a little, relative to the norm. The float64
values come from `Model.exact`, which shares no spelling with the module. Tokens between whose experts a rounding could
decide are not used: what is chosen among equals is another test's matter.
"""

from __future__ import annotations

import copy
import statistics
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from moe_compiler import compilation, pipeline
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.graph_pass import Context
from moe_compiler.report import Report
from tests.properties.case import Case
from tests.properties.layouts import ExpertWeights
from tests.properties.model import DTYPES, Model

SLACK = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
# How far eager itself may be from float64: more means that the spelling is not what its case says.
PLAUSIBLE = {"float32": 1e-4, "bfloat16": 6e-2, "autocast": 6e-2}
# An error of few numbers is up to chance: one of up to DOUBT times its bound is judged by REPEATS more draws, each with
# other weights, since a gradient that nearly cancels for some weights does so for all tokens.
DOUBT, REPEATS = 3.0, 24
BASE_TOKENS = 6  # what a block with symbolic sizes is compiled for


@dataclass
class Outcome:
    """What became of a case.

    status: "matched" | "missed" (right, with fewer blocks than there are) | "wrong" | "not captured" (Dynamo does not
    make one graph of it, or AOTAutograd does not compile that) | "not a model" (eager fails, or does not compute what
    the case says)
    """

    seed: int
    case: str
    status: str
    detail: str = ""
    formulations: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Errors = dict[str, list[tuple[float, float]]]


class Wrong(Exception):
    """The compiled module is not what it should be."""


def run(case: Case, seed: int) -> Outcome:
    """Compile and compare one case; never raises for what the case does."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    outcome = Outcome(seed, str(case), "matched")
    try:
        model = Model(case).train(case.mode == "training")
        _freeze(model, case)
        inputs = [_tokens(case, model, count) for count in _counts(case)]
        expected = [_expected(case, model, x) for x in inputs]
    except Exception as error:
        return _ended(outcome, "not a model", error)
    for x, reference in zip(inputs, expected, strict=True):
        if not all(bool(torch.isfinite(t)) for t in (*reference.own, *reference.norms)):
            outcome.status, outcome.detail = "not a model", f"eager or float64 is not finite at {list(x.shape)}"
            return outcome
        pairs = zip(reference.own, reference.norms, strict=True)
        worst = max((float(own / norm) for own, norm in pairs if norm > 0), default=0.0)
        if not worst < PLAUSIBLE[case.dtype]:
            outcome.status, outcome.detail = "not a model", f"eager is {worst:.1e} from float64 at {list(x.shape)}"
            return outcome
    known = last_reports()
    try:
        with mock.patch.object(compilation, "run_phase", run_phase_twice):
            compiled = _compile(case, model)
            _judge(case, model, compiled, list(zip(inputs, expected, strict=True)))
        reports = [report for report in last_reports() if not any(report is old for old in known)]
        _count(case, reports, outcome)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        own = not isinstance(inner, Wrong) and (_is_dynamos(error) or not _compiles_without_us(case, model, inputs))
        return _ended(outcome, "not captured" if own else "wrong", inner)
    return outcome


def _ended(outcome: Outcome, status: str, error: BaseException) -> Outcome:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    where = "" if isinstance(error, Wrong) else _place(error)
    outcome.status = status
    outcome.detail = f"{type(error).__name__}: {lines[0] if lines else ''}{where}"
    return outcome


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" (at {last.filename.rsplit('/', 1)[-1]}:{last.lineno})"


def _is_dynamos(error: BaseException) -> bool:
    """Did Dynamo give up on the module, before any backend saw it?"""
    own = isinstance(error, torch._dynamo.exc.TorchDynamoException)
    return own and not isinstance(error, torch._dynamo.exc.BackendCompilerFailed)


def _compiles_without_us(case: Case, model: Model, inputs: list[Tensor]) -> bool:
    """Does torch's own way, without Inductor and without our passes, compile and run the module?"""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=case.shapes == "dynamic")
    try:
        for x in inputs:
            own = _input(case, x)
            with _grad_mode(case), _autocast(case):
                outputs = compiled(own)
            tangents = [torch.ones_like(t) for t in outputs if t.is_floating_point() and t.requires_grad]
            _results(case, outputs, _leaves(case, model, own), tangents)
    except Exception:
        return False
    return True


# Inputs


def _counts(case: Case) -> list[int]:
    return [case.tokens] if case.shapes == "static" else [BASE_TOKENS, case.tokens]


def _freeze(model: Model, case: Case) -> None:
    """Say which parameters are trained."""
    for name, parameter in model.named_parameters():
        router = ".router." in name or name.endswith("expert_scale")
        frozen = {"no_experts": ".experts." in name, "no_router": router}.get(case.trained, False)
        parameter.requires_grad_(not frozen)


def _autocast(case: Case) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if case.dtype == "autocast" else nullcontext()


def _tokens(case: Case, model: Model, count: int) -> Tensor:
    """Tokens whose experts stay chosen when the tokens change by a few roundings: [count, H] or [B, count / B, H]."""
    dtype = DTYPES[case.dtype]
    rows = torch.randn(8 * count + 32, case.hidden).to(dtype)
    if case.choose != "table" and count:
        step = 2e-5 if case.dtype == "float32" else 2e-2
        with _autocast(case):
            before = [ids.sort(-1)[0] for ids in model.choices(rows)]
            stays = ~model.ties(rows)
            for _ in range(4):
                near = rows * (1 + step * torch.randn(rows.shape)).to(dtype)
                for old, new in zip(before, model.choices(near), strict=True):
                    stays &= (old == new.sort(-1)[0]).all(-1)
        rows = rows[stays]
        if len(rows) < count:
            raise ValueError(f"{len(rows)} of {8 * count + 32} tokens have a clear choice, {count} are needed")
    x = rows[:count].clone()
    if case.rank == 2:
        return x
    return x.view(2, count // 2, case.hidden) if count and count % 2 == 0 else x.view(1, count, case.hidden)


# Eager, float64 and ours


def _leaves(case: Case, model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    return [] if case.mode != "training" else [t for t in (x, *model.parameters()) if t.requires_grad]


def _input(case: Case, x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(case.mode == "training" and case.trained != "no_x")


def _results(
    case: Case, outputs: tuple[Tensor, ...], leaves: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """(outputs, gradients of the leaves)."""
    floats = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    grads: list[Tensor | None] = []
    if leaves:
        scaled = [t.to(o.dtype) for t, o in zip(tangents, floats, strict=True)]
        grads = list(torch.autograd.grad(floats, leaves, scaled, allow_unused=True))
    return [t.detach() for t in outputs], grads


@dataclass(frozen=True)
class Reference:
    """Eager's outputs and gradients, those in float64, eager's errors and the norms they are relative to."""

    plain: list[Tensor]
    plain_grads: list[Tensor | None]
    exact: list[Tensor]
    exact_grads: list[Tensor | None]
    own: list[Tensor]
    norms: list[Tensor]
    tangents: list[Tensor]


def _run_eager(case: Case, model: Model, x: Tensor, tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    x = _input(case, x)
    with _grad_mode(case), _autocast(case):
        outputs = model(x)
    return _results(case, outputs, _leaves(case, model, x), tangents)


def _grad_mode(case: Case) -> AbstractContextManager[Any]:
    return nullcontext() if case.mode == "training" else torch.no_grad()


def _expected(case: Case, model: Model, x: Tensor) -> Reference:
    """What eager and float64 give for x; the tangents of the backward are drawn here."""
    with _autocast(case):
        choices = model.choices(x)
    double = copy.deepcopy(model).double()
    for module in double.modules():
        if isinstance(module, ExpertWeights):
            module.compute = torch.float64
    wide = _input(case, x.double())
    with _grad_mode(case):
        outputs = double.exact(wide, choices)
    tangents = [torch.randn(t.shape, dtype=torch.float64) for t in outputs if t.is_floating_point() and t.requires_grad]
    exact, exact_grads = _results(case, outputs, _leaves(case, double, wide), tangents)
    plain, plain_grads = _run_eager(case, model, x, tangents)
    pairs = _pairs(plain, plain_grads, exact, exact_grads)
    own = [(a.double() - b.double()).norm() for a, b in pairs]
    norms = [b.double().norm() for _, b in pairs]
    return Reference(plain, plain_grads, exact, exact_grads, own, norms, tangents)


def _pairs(
    outputs: list[Tensor], grads: list[Tensor | None], others: list[Tensor], other_grads: list[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """All results as pairs; a gradient that does not exist counts as zeros."""
    pairs = list(zip(outputs, others, strict=True))
    for a, b in zip(grads, other_grads, strict=True):
        some = a if a is not None else b
        if some is not None:
            zero = torch.zeros_like(some)
            pairs.append((zero if a is None else a, zero if b is None else b))
    return pairs


def _compile(case: Case, model: Model) -> Any:
    options = {"remainder": case.remainder}
    return torch.compile(model, backend=moepdl, fullgraph=True, dynamic=case.shapes == "dynamic", options=options)


def _compare(
    case: Case,
    model: Model,
    compiled: Any,
    x: Tensor,
    reference: Reference,
    found: Errors,
    doubt: float = DOUBT,
) -> None:
    """Raise Wrong unless the compiled module gives what it should for x; the errors of its numbers go into `found`.

    doubt: how many times what is allowed an error may be without being wrong here and now.
    """
    plain, plain_grads = reference.plain, reference.plain_grads
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    eager_after = _counted(case, model, x, before)
    ours_in = _input(case, x)
    with _grad_mode(case), _autocast(case):
        outputs = compiled(ours_in)
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, eager_after[name]):
            raise Wrong(f"buffer {name} is {buffer.tolist()}, eager leaves {eager_after[name].tolist()}")
    if not torch.equal(ours_in.detach(), x):
        raise Wrong("the input was written to")
    leaves = _leaves(case, model, ours_in)
    ours, grads = _results(case, outputs, leaves, reference.tangents)
    for index, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            raise Wrong(f"output {index} is {mine.dtype} {list(mine.shape)}, not {theirs.dtype} {list(theirs.shape)}")
        if not mine.is_floating_point() and not torch.equal(mine, theirs):
            raise Wrong(f"output {index} (ids) differs")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for leaf, mine, theirs in zip(leaves, grads, plain_grads, strict=True):
        name = names.get(id(leaf), "x")
        if (mine is None) != (theirs is None):
            raise Wrong(f"the gradient of {name} is {'None' if mine is None else 'a tensor'}, eager's is not")
        # Of an expert without tokens; a zero elsewhere may be a cancellation.
        if mine is not None and theirs is not None and ".experts." in name and mine.numel():
            # Parameters of modules are one expert's each, others hold all experts in their first dimension.
            experts = 1 if ".experts.experts." in name else theirs.shape[0]
            empty = (theirs.reshape(experts, -1) == 0).all(-1)
            if mine.reshape(experts, -1)[empty].count_nonzero():
                raise Wrong(f"the gradient of {name} is not zero where eager's is")
    pairs = _pairs(ours, grads, reference.exact, reference.exact_grads)
    _check_errors(case, list(x.shape), pairs, reference, found, doubt)


def _judge(case: Case, model: Model, compiled: Any, drawn: list[tuple[Tensor, Reference]]) -> None:
    """Hold the compiled module to the rule on what was drawn, and on more where that leaves a doubt."""
    found: Errors = {}
    for x, reference in drawn:
        _compare(case, model, compiled, x, reference, found)
    if all(error <= bound for pairs in found.values() for error, bound in pairs):
        return
    for _ in range(REPEATS):
        model.load_state_dict(Model(case).state_dict())
        for x, _reference in drawn:
            other = _tokens(case, model, x.numel() // case.hidden)
            _compare(case, model, compiled, other, _expected(case, model, other), found, float("inf"))
    for what, pairs in found.items():
        # Not their mean: one draw whose result nearly cancels would outweigh all others.
        usual = statistics.median(error / bound for error, bound in pairs)
        if not usual <= 1:
            raise Wrong(
                f"{what}: in half of {len(pairs)} draws the error is {usual:.2f} times what is allowed, or more"
            )


def _counted(case: Case, model: Model, x: Tensor, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The buffers as eager leaves them; the model's own are put back."""
    if case.extra != "counted":
        return before
    with torch.no_grad(), _autocast(case):
        model(x)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return after


def _check_errors(
    case: Case,
    shape: list[int],
    pairs: list[tuple[Tensor, Tensor]],
    reference: Reference,
    found: Errors,
    doubt: float,
) -> None:
    """Add the errors of this run to what was found; raise Wrong when one is beyond doubt, or not a number."""
    slack = 1e-3 if case.dtype == "autocast" else SLACK[DTYPES[case.dtype]]
    for index, ((mine, exact), own, norm) in enumerate(zip(pairs, reference.own, reference.norms, strict=True)):
        error = float((mine.double() - exact.double()).norm())
        bound = 1.5 * float(own) + slack * float(norm) + 1e-12
        outputs = len(reference.plain)
        what = f"{'output' if index < outputs else 'gradient'} {index - (index >= outputs) * outputs} of {shape}"
        if not error <= doubt * bound:
            raise Wrong(f"{what}: error {error:.1e}, eager's own {float(own):.1e}, norm {float(norm):.1e}")
        found.setdefault(what, []).append((error / max(float(norm), 1e-12), bound / max(float(norm), 1e-12)))


# Matches and passes


def run_phase_twice(module: GraphModule, phase: str, context: Context) -> int:
    """`run_phase`, and once more on what it left: a pass list at its fixed point finds nothing to do."""
    total = pipeline.run_phase(module, phase, context)
    text = str(module.graph)
    again = Context(context.options, phase, Report(frame="again", status="unchanged"))
    rewrites = pipeline.run_phase(module, phase, again)
    if rewrites or str(module.graph) != text:
        names = [record.name for record in again.report.passes if record.rewrites]
        raise Wrong(f"the passes of phase {phase} are not at a fixed point: {', '.join(names)} ran again")
    return total


def _count(case: Case, reports: list[Report], outcome: Outcome) -> None:
    """Exactly one match a block in every graph; fewer is a miss, more is wrong."""
    if not reports:
        raise Wrong("no graph reached the backend")
    for report in reports:
        found = [match for match in report.matches if not match.left_alone]
        count = sum(match.count for match in found)
        if report.errors or count > case.layers:
            raise Wrong(f"{count} matches of {case.layers} blocks; {'; '.join(report.errors)}")
        outcome.formulations = sorted({match.formulation for match in found})
        # Lines of the project as they are in every checkout.
        here = f"{Path(__file__).resolve().parents[2]}/"
        outcome.routers = sorted({match.router or f"no: {match.router_why.replace(here, '')}" for match in found})
        if count < case.layers:
            outcome.status = "missed"
            told = [f"{miss.formulation}.{miss.step}: {miss.reason}" for miss in report.misses]
            told += [f"left alone: {match.left_alone}" for match in report.matches if match.left_alone]
            told += report.notes if not told else []
            outcome.detail = "; ".join(dict.fromkeys(told)) or "no miss was recorded"
            if not told:
                raise Wrong("a block was missed without a word")
            return
