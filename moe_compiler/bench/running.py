"""One run of `moepdl bench block`: the shapes one after the other, results written after each number of tokens."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_compiler import device, timing
from moe_compiler.bench import timed
from moe_compiler.bench.block import make_block
from moe_compiler.bench.exact import FACTOR, TOLERANCE
from moe_compiler.bench.floor import device_speed, formula
from moe_compiler.bench.measuring import Plan, failed_rows, first_calls, measure
from moe_compiler.bench.peers import load_peers
from moe_compiler.bench.results import GRAPH, NOGRAPH, Results, commit, save
from moe_compiler.bench.shapes import Shape
from moe_compiler.bench.ways import EAGER, INDUCTOR, OURS, Compiled
from moe_compiler.demo import ignore_known_warnings
from moe_compiler.options import resolve
from moe_compiler.pipeline import known_names
from moe_compiler.progress import Progress

__all__ = ["Request", "run"]


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    cases: (direction, tokens, modes). reference: the numbers of tokens at which Inductor is compiled. device: "cuda" or
    "cpu". dtype: its name. options: of the backend. static: one compile for each number of tokens.
    """

    shapes: Sequence[Shape]
    cases: Sequence[tuple[str, int, tuple[str, ...]]]
    reference: frozenset[int]
    device: str
    dtype: str
    options: Mapping[str, Any]
    peers: Sequence[Path]
    static: bool
    seed: int
    rounds: int
    measure_floor: bool


def run(request: Request, folder: Path) -> tuple[list[Results], bool]:
    """Measure and write into `folder`; what was measured, a result a shape, and whether it was interrupted.

    Raises OptionError and UsageError for options and peers that are none.
    """
    resolve(request.options, known_names=known_names())  # raises for what no compile would take
    peers = load_peers(request.peers, taken=(OURS, EAGER, INDUCTOR))
    dtype = getattr(torch, request.dtype)
    ignore_known_warnings()
    folder.mkdir(parents=True, exist_ok=True)  # where it cannot be made, better now than after minutes
    found: list[Results] = []
    with Progress("bench") as progress, _ahead(request.device) as ahead, timed.own_stream():
        try:
            progress.step("bandwidth and matmul rate")
            speed = device_speed(request.device, dtype, measure=request.measure_floor)
            plan = Plan(request.cases, request.reference, peers, speed, request.seed, request.rounds)
            for shape in request.shapes:
                found.append(_empty(request, shape, dtype, plan))
                _measure(request, shape, dtype, plan, found[-1], folder, progress.step, ahead)
        except KeyboardInterrupt:
            if found:
                found[-1].notes.append("Interrupted: what is missing was not measured.")
                save(found[-1], folder, found[-1].file_name)
            return found, True
    return found, False


@contextlib.contextmanager
def _ahead(kind: str) -> Iterator[Any]:
    """What compiles kernels ahead on a GPU, its processes on their way; None where there are no kernels of ours."""
    if kind != "cuda" or device.why_left_alone(kind, torch.bfloat16):
        yield None
        return
    from moe_compiler.ahead import Ahead  # needs triton

    with Ahead().open() as ahead:
        ahead.warm()
        yield ahead


def _measure(
    request: Request,
    shape: Shape,
    dtype: torch.dtype,
    plan: Plan,
    results: Results,
    folder: Path,
    say: Callable[[str], None],
    ahead: Any,
) -> None:
    """Fill the results of one shape; written after each number of tokens."""
    torch._dynamo.reset()
    gc.collect()  # the block before this one is in cycles with its compiled code
    say(f"{shape.name}: weights")
    try:
        block = make_block(shape, dtype, request.device, request.seed)
    except Exception as error:
        if not timed.is_out_of_memory(error):
            raise
        size = shape.experts * shape.matmul_size * torch.empty((), dtype=dtype).element_size() / 2**30
        results.rows += failed_rows(shape, plan, f"out of memory: the experts' weights alone are {size:.1f} GiB")
        save(results, folder, results.file_name)
        return
    compiled = Compiled(block, request.options, dynamic=not request.static)
    if ahead is not None:
        say(f"{shape.name}: compiling moepdl and its kernels")
        ahead.compile(first_calls(compiled, plan))
    for rows in measure(compiled, plan, say):
        results.rows += rows
        for row in rows:
            for name, parts in row.get("outside", {}).items():
                note = f"{name}: outside its timed calls: {', '.join(parts)}."
                if note not in results.notes:
                    results.notes.append(note)
        save(results, folder, results.file_name)


def _empty(request: Request, shape: Shape, dtype: torch.dtype, plan: Plan) -> Results:
    """Results without rows: where, how and by which rules they are measured."""
    environment: dict[str, Any] = {
        "commit": commit(),
        **timing.environment(request.device),
        "dtype": request.dtype,
        "seed": request.seed,
        "generator": f"torch.Generator({request.device!r})",
        "backend_options": dict(request.options),
        "peers": [file.name for file in request.peers],
    }
    floor = {"bandwidth": plan.speed.bandwidth, "flops": plan.speed.flops, "source": plan.speed.source}
    return Results(shape.to_dict(), environment, floor, _notes(request, dtype, plan))


def _notes(request: Request, dtype: torch.dtype, plan: Plan) -> list[str]:
    modes = {mode for _, _, chosen in plan.cases for mode in chosen}
    notes = [
        "Medians in us, ways and inputs in turns. Unit normal tokens, normal weights of standard deviation 0.02. The "
        "router is inside the time of every way for which no note says otherwise.",
    ]
    if GRAPH in modes:
        notes.append(
            "graph: one CUDA graph of 8 calls on 8 inputs (2 from T=2048 on, and with backward); time / calls."
        )
    if NOGRAPH in modes:
        notes.append("nograph: one call on an idle device, the host's time included; a way makes seven calls a turn.")
    notes.append(
        f"Each output, and with backward each gradient, was checked against float64 first: error at most {FACTOR} x "
        f"eager's + {TOLERANCE[dtype]:.0e}. Tokens whose choice of experts is a near tie are left out of the check."
    )
    notes += [formula(direction, plan.speed) + "." for direction in dict.fromkeys(case[0] for case in plan.cases)]
    compiles = "once for each T" if request.static else "once for T=1 and once for all other T"
    at = ", ".join(map(str, sorted(plan.reference)))
    spellings = "the faster of grouped_mm and, with few pairs, batched_mm"
    if dtype is not torch.bfloat16:
        spellings = "as batched_mm, like moepdl, since torch compiles grouped_mm in bfloat16 only"
    inductor = f"compiled for each of T={at}, {spellings}" if at else "left out"
    notes.append(f"moepdl: compiled {compiles}. inductor: {inductor}. eager: grouped_mm.")
    if request.device == "cuda":
        notes.append("MiB: the most that a call allocates at any time above inputs, parameters, gradients and output.")
    for name, peer in plan.peers.items():
        text = (peer.__doc__ or "").strip().splitlines()
        if text:
            notes.append(f"{name}: {text[0].strip()}")
    return notes
