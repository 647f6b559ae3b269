"""Measures one block: for each number of tokens and direction, all ways are checked against float64, then timed.

A way that is wrong is not timed; one that runs out of memory or fails is told in the row, and the rest goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from moe_compiler import timing
from moe_compiler.bench import exact, timed
from moe_compiler.bench.block import Block
from moe_compiler.bench.floor import Speed, floor_us
from moe_compiler.bench.peers import Peer
from moe_compiler.bench.results import FORWARD, GRAPH, NOGRAPH
from moe_compiler.bench.shapes import Shape
from moe_compiler.bench.ways import EAGER, INDUCTOR, OURS, Compiled, Way, inductor_spellings

__all__ = ["Plan", "failed_rows", "first_calls", "measure"]

Say = Callable[[str], None]
_IN_GRAPH = ", graph"  # behind the title of a way that can be called but not captured
_ROW = 7  # calls of a way when it is its turn, without a graph


@dataclass(frozen=True)
class Plan:
    """What is measured of a block.

    cases       (direction, tokens, modes) in order
    reference   numbers of tokens at which Inductor is compiled too
    peers       by name
    speed       of the device, for the floor
    seed        of the inputs
    rounds      timings of each way, on a GPU
    """

    cases: Sequence[tuple[str, int, tuple[str, ...]]]
    reference: frozenset[int]
    peers: Mapping[str, Peer]
    speed: Speed
    seed: int = 0
    rounds: int = 20


@dataclass
class _Case:
    """One number of tokens in one direction."""

    block: Block
    inputs: list[Tensor]
    grad: Tensor | None
    choice: exact.Choice
    eager_errors: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    @property
    def near_enough(self) -> float:
        """The error that no correct way exceeds, eager among them."""
        return 1e-5 if self.dtype is torch.float32 else 3e-2

    @cached_property
    def exact(self) -> Tensor:
        """The output of the first input in float64."""
        return exact.exact_output(self.block, self.inputs[0], self.choice)

    def step(self, way: Way, grad: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The call that is timed: forward, or forward and backward with gradients that start at None."""
        if grad is None:
            return way.call
        leaves = [*self.inputs, *self.block.parameters()]

        def run(x: Tensor) -> Tensor:
            for leaf in (*leaves, *_routing_weights(way)):
                leaf.grad = None
            y = way.call(x)
            y.backward(grad)
            return y.detach()

        return run


def first_calls(compiled: Compiled, plan: Plan) -> Iterator[Callable[[], object]]:
    """A call of moepdl for each case of a plan, one that launches all that its timed calls will."""

    def call(direction: str, tokens: int) -> None:
        x = _inputs(compiled.block, tokens, direction != FORWARD, plan.seed)[0]
        with torch.set_grad_enabled(direction != FORWARD):
            y = compiled.ours(x).call(x)
            if direction != FORWARD:
                y.backward(torch.ones_like(y))
                compiled.block.zero_grad()

    for direction, tokens, _ in plan.cases:
        yield partial(call, direction, tokens)


def measure(compiled: Compiled, plan: Plan, say: Say) -> Iterator[list[dict[str, Any]]]:
    """The rows of each case of a plan, one a mode, as soon as they are there. Does not raise for what a way does."""
    for direction, tokens, modes in plan.cases:
        label = f"{compiled.block.shape.name} {direction} T={tokens}"

        def told(text: str, label: str = label) -> None:
            say(f"{label}: {text}")

        rows = None
        try:
            rows = _measure(compiled, plan, direction, tokens, modes, told)
        except Exception as error:
            if not timed.is_out_of_memory(error):
                raise
        if rows is None:
            compiled.block.zero_grad()
            _free()  # out here, where no traceback holds what had been allocated
            rows = _failed(compiled.block.shape, direction, tokens, modes, "out of memory")
        yield rows


def failed_rows(shape: Shape, plan: Plan, why: str) -> list[dict[str, Any]]:
    """The rows of a plan of which nothing could be measured."""
    return [row for direction, tokens, modes in plan.cases for row in _failed(shape, direction, tokens, modes, why)]


def _measure(
    compiled: Compiled, plan: Plan, direction: str, tokens: int, modes: tuple[str, ...], say: Say
) -> list[dict[str, Any]]:
    block, backward = compiled.block, direction != FORWARD
    inputs = _inputs(block, tokens, backward, plan.seed)
    with torch.set_grad_enabled(backward):
        say("float64")
        case = _case(block, inputs, backward, plan.seed)
        eager = compiled.eager()
        _add(case, eager.title, lambda: eager)
        makers: dict[str, Callable[[], Way | None]] = {OURS: partial(compiled.ours, inputs[0])}
        if tokens in plan.reference:
            for spelling in inductor_spellings(block, tokens):
                makers[f"{INDUCTOR} {spelling}"] = partial(compiled.inductor, spelling)
        makers |= compiled.peers(plan.peers, inputs, direction)
        for title, make in makers.items():
            say(f"compiling and checking {title}")
            _add(case, title, make)
        left = compiled.not_rewritten()
        if left and OURS not in case.problems:
            case.problems[OURS] = left
        say("timing")
        memory = _memory(case)
        samples = {mode: _time(case, mode, plan.rounds) for mode in modes}
    hit = statistics.fmean(int(block.router(x)[1].unique().numel()) for x in inputs)
    facts = {
        "floor_us": floor_us(block.shape, tokens, hit, direction, plan.speed, inputs[0].element_size()),
        "experts_hit": hit,
        "near_ties": int(case.choice.near.sum()),
    }
    rows = [_summary(case, direction, mode, samples[mode], memory, facts) for mode in modes]
    case.block.zero_grad()
    _free()
    return rows


def _inputs(block: Block, tokens: int, backward: bool, seed: int) -> list[Tensor]:
    """Unit normal tokens [T, H]: 8 inputs, 2 where they are large, with backward, or on a CPU."""
    weight = block.gate_up
    count = 2 if backward or tokens >= 2048 or not weight.is_cuda else 8
    generator = torch.Generator(weight.device).manual_seed(seed + 1)
    made = [
        torch.randn(tokens, block.shape.hidden, generator=generator, dtype=weight.dtype, device=weight.device)
        for _ in range(count)
    ]
    return [x.requires_grad_(backward) for x in made]


def _case(block: Block, inputs: list[Tensor], backward: bool, seed: int) -> _Case:
    """The first input with a token whose choice is clear comes first: it is the one that outputs are compared on."""
    choices = [exact.choice_of(block, x) for x in inputs]
    first = next((i for i, choice in enumerate(choices) if not bool(choice.near.all())), 0)
    inputs = inputs[first:] + inputs[:first]
    grad = None
    if backward:
        x = inputs[0]
        generator = torch.Generator(x.device).manual_seed(seed + 2)
        grad = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return _Case(block, inputs, grad, choices[first])


def _add(case: _Case, title: str, make: Callable[[], Way | None]) -> None:
    """Make a way, check it, and keep it; or keep what is wrong with it."""
    way, found = None, ""
    try:
        way = make()
        if way is None:
            return
        wrong = _check(case, way)
        found = f"wrong, not timed: {wrong}" if wrong else ""
    except Exception as error:
        found = _text(error)
    if found:
        case.problems[title] = found
        _free()  # out here, where no traceback holds what the way had allocated
    elif way is not None:
        case.ways.append(way)


def _routing_weights(way: Way) -> list[Tensor]:
    """The routing weights that a peer got as an input."""
    return [] if way.peer is None else [weights for weights, _ in way.peer.routed]


def _text(error: Exception) -> str:
    if timed.is_out_of_memory(error):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _check(case: _Case, way: Way) -> str:
    """Empty when the output, or the gradients, are right; else what is wrong."""
    x = case.inputs[0]
    grad = None if case.grad is None else case.grad.masked_fill(case.choice.near[:, None], 0.0)
    errors = {"": exact.output_error(case.step(way, grad)(x), case.exact, case.choice.near)}
    if grad is not None:
        given = way.peer.routed[0] if way.peer is not None and way.peer.routed else None
        found = exact.gradient_errors(case.block, x, grad, case.choice, given=given)
        errors |= {f"gradient of {name}": error for name, error in found.items()}
    if way.name == EAGER:
        case.eager_errors = errors
        # Eager is what the others are measured by: it must be near float64 itself.
        return "; ".join(f"{name} error {error:.1e}" for name, error in errors.items() if not error <= case.near_enough)
    wrong = []
    for name, error in errors.items():
        # Gradients that stop at the routing weights have no counterpart in eager's: those of x are its nearest. And
        # where eager itself could not run, there is only what it may have at most.
        own = case.eager_errors.get(name, case.eager_errors.get("gradient of x", case.near_enough / exact.FACTOR))
        wrong.append(exact.problem(error, own, case.dtype, name))
    return "; ".join(filter(None, wrong))


def _memory(case: _Case) -> dict[str, int]:
    """Peak bytes of a call above what it leaves (output, gradients), by title; a way that fails here is dropped."""
    peaks = {}
    for way in list(case.ways):
        found = ""
        try:
            peak = _peak(case, way)
        except Exception as error:
            found = _text(error)
        if found:
            case.problems[way.title] = found
            case.ways.remove(way)
            _free()
        elif peak is not None:
            peaks[way.title] = peak
    return peaks


def _peak(case: _Case, way: Way) -> int | None:
    call = case.step(way, case.grad)
    for x in case.inputs:  # what a peer prepares, and lazy compiles, are no part of it
        call(x)
    if way.peer is not None:
        way.peer.seal()
    leaves = [*case.inputs, *case.block.parameters(), *_routing_weights(way)]
    for leaf in leaves:
        leaf.grad = None

    def kept(y: Tensor) -> int:
        return sum(t.numel() * t.element_size() for t in (y, *(leaf.grad for leaf in leaves)) if t is not None)

    return timed.peak_bytes(lambda: call(case.inputs[0]), kept)


def _time(case: _Case, mode: str, rounds: int) -> dict[str, list[float]]:
    """Samples in us, by title."""
    calls, ways = 1, {}
    for way in case.ways:
        call = case.step(way, case.grad)
        if mode == NOGRAPH:
            ways[way.title] = timed.rotating(call, case.inputs)
            continue
        calls, found = len(case.inputs), ""
        try:
            # A call that waits for the device cannot be captured, and a capture that fails leaves its marks on torch.
            with timed.no_waiting():
                call(case.inputs[0])
            ways[way.title] = timed.captured(call, case.inputs)
        except Exception as error:
            found = _text(error)
        if found:
            case.problems[way.title + _IN_GRAPH] = found
            torch.cuda.synchronize()
            _free()
    if not ways:
        return {}
    if case.inputs[0].is_cuda:
        row = _ROW if mode == NOGRAPH else 1
        return timed.device_us(ways, calls=calls, rounds=rounds, warmup=3, row=row)
    return timed.host_us(ways)


def _summary(
    case: _Case,
    direction: str,
    mode: str,
    samples: dict[str, list[float]],
    memory: dict[str, int],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """One row: of each column its fastest way."""
    medians = {title: statistics.median(values) for title, values in samples.items()}
    best: dict[str, Way] = {}
    for way in case.ways:
        if way.title in medians and (way.name not in best or medians[way.title] < medians[best[way.name].title]):
            best[way.name] = way
    others = {name: way for name, way in best.items() if name != OURS}
    ours = samples.get(best[OURS].title) if OURS in best else None
    ratios = {}
    if ours:
        for name, way in others.items():
            ratio = timing.ratio(ours, samples[way.title])
            ratios[name] = [ratio.value, ratio.low, ratio.high]
    outside = {name: sorted(way.peer.outside) for name, way in others.items() if way.peer is not None}
    us = medians[best[OURS].title] if ours else None
    return _row(
        case.block.shape,
        direction,
        case.inputs[0].shape[0],
        mode,
        us=us,
        floor_us=facts["floor_us"],
        peers={name: medians[way.title] for name, way in others.items()},
        problems={
            title: text for title, text in case.problems.items() if mode == GRAPH or not title.endswith(_IN_GRAPH)
        },
        fraction_of_floor=facts["floor_us"] / us if us else None,
        ratios=ratios,
        spellings={name: way.label for name, way in others.items() if way.label},
        outside={name: names for name, names in outside.items() if names},
        memory_bytes=memory.get(best[OURS].title) if OURS in best else None,
        peers_memory_bytes={name: memory[way.title] for name, way in others.items() if way.title in memory},
        experts_hit=facts["experts_hit"],
        near_ties=facts["near_ties"],
        calls=len(case.inputs) if mode == GRAPH else 1,
    )


def _failed(shape: Shape, direction: str, tokens: int, modes: Sequence[str], why: str) -> list[dict[str, Any]]:
    empty = {"us": None, "floor_us": None, "peers": {}, "problems": {OURS: why}}
    return [_row(shape, direction, tokens, mode, **empty) for mode in modes]


def _row(shape: Shape, direction: str, tokens: int, mode: str, **values: Any) -> dict[str, Any]:
    return {"shape": shape.name, "tokens": tokens, "direction": direction, "mode": mode, **values}


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
