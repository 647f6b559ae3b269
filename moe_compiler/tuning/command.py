"""What `moepdl tune` does: tunes a block that is given by its sizes, keeps the result, and tells it.

The block has the layout that transformers gives packed experts: gate over up in one tensor [E, 2I, H], down [E, H, I],
SiLU, with its router. With `train` the forward that saves for the backward pass and the backward itself are tuned too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_compiler.bench.shapes import find_shape
from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.errors import UsageError
from moe_compiler.runtime_kernels.chain.program import Program
from moe_compiler.tuning.compile_pool import CompilePool
from moe_compiler.tuning.tile_table import table_path, write_row
from moe_compiler.tuning.tune_block import Tuning, tune_on_device
from moe_compiler.tuning.tuned_tiles import Stored, block_text, options_text, plain

__all__ = ["Case", "cases_of", "record", "report_lines", "sizes_of", "tune_shape"]

_INPUTS, _FEW_INPUTS, _MANY = 8, 2, 2048


@dataclass(frozen=True)
class Case:
    """One chain of a block: `name` is forward, forward that saves, or backward."""

    name: str
    program: Program
    block: str
    weights: tuple[Stored, ...]
    backward: bool


def sizes_of(text: str, dtype: torch.dtype = torch.bfloat16) -> BlockSizes:
    """The sizes of a shape, a name or `E,k,H,I` (see `bench.shapes`); of its shared expert nothing is tuned.

    Raises UsageError, also for a shape whose chain has other kernels than those of the block that is tuned.
    """
    shape = find_shape(text)
    if shape.biases or shape.transposed or shape.activation != "silu":
        raise UsageError(
            f"{text!r} has biases, another activation or weights that are kept transposed",
            why="the block that is tuned by its sizes alone has SiLU, no biases, and weights as [E, out, in]",
            try_='torch.compile(model, backend="moepdl", options={"tune": "full"}), which tunes the model\'s own block',
        )
    return BlockSizes(shape.experts, shape.k, shape.hidden, shape.intermediate, dtype)


def cases_of(sizes: BlockSizes, *, train: bool = False) -> list[Case]:
    """The chains of a block, with the texts under which a model's blocks of these sizes find their tiles."""
    dtype = str(sizes.dtype).removeprefix("torch.")
    e, h, i = sizes.experts, sizes.hidden, sizes.intermediate
    weights = (
        Stored("gate", 1, dtype, (e, 2 * i, h), (2 * i * h, h, 1)),
        Stored("down", 1, dtype, (e, h, i), (h * i, i, 1)),
    )
    programs = [("forward", forward_program(sizes), False)]
    if train:
        programs.append(("forward that saves", forward_program(sizes, save=True), False))
        programs.append(("backward", backward_program(sizes), True))
    return [
        Case(name, program, block_text(program, sizes.named, weights), weights, backward)
        for name, program, backward in programs
    ]


def tune_shape(
    sizes: BlockSizes,
    tokens: Sequence[int],
    *,
    budget_s: float,
    pool: CompilePool,
    train: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Tuning]:
    """Tune a block on the current device; the result is kept in the device's table, or at `out`.

    budget_s: for all its chains together. pool: processes that compile, entered. Raises RuntimeError without a CUDA
    device that the kernels run on.
    """
    from moe_compiler import device

    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device to tune for")
    left_alone = device.why_left_alone("cuda", sizes.dtype)
    if left_alone:
        raise RuntimeError(f"nothing can be tuned on this device: {left_alone}")
    name = torch.cuda.get_device_name()
    weights = weights_of(sizes, "cuda")
    # Never written, so never taken from the machine: only their layouts count.
    described_by = weights_of(sizes, "cpu")
    found = []
    cases = cases_of(sizes, train=train)
    with torch.no_grad():
        for case in cases:

            def operands(count: int, case: Case = case) -> list[list[Tensor]]:
                runs = _FEW_INPUTS if count >= _MANY or case.backward else _INPUTS
                return [inputs_of(sizes, count, weights, "cuda", backward=case.backward) for _ in range(runs)]

            def described(count: int, case: Case = case) -> Any:
                made = inputs_of(sizes, count, described_by, "cpu", backward=case.backward)
                return tuple((tuple(t.shape), t.stride(), t.dtype) for t in made)

            tuning = tune_on_device(
                case.program,
                case.block,
                sizes.named,
                case.weights,
                described,
                operands,
                tokens,
                budget_s=budget_s / len(cases),
                pool=pool,
                say=lambda text, case=case: say(f"{case.name}: {text}"),  # type: ignore[misc]
            )
            write_row(out or table_path(name), name, case.block, tuning.points)
            found.append(tuning)
    return found


def record(tuning: Tuning) -> dict[str, Any]:
    """A tuning as plain values: the block, times of the chain by T, tiles, and each kernel's own times."""
    return {
        "block": tuning.block,
        "seconds": round(tuning.seconds, 1),
        "complete": tuning.complete,
        "tried": tuning.tried,
        "dropped": tuning.dropped,
        "chain_us": {str(t): [round(us, 2) for us in both] for t, both in sorted(tuning.chain_us.items())},
        "tiles": plain({tuning.block: tuning.points})[tuning.block],
        "kernels": [
            {
                "kernel": outcome.task.kernel,
                "T": outcome.task.tokens,
                "own_us": round(outcome.own_us, 2),
                "best_us": round(outcome.best_us, 2),
                "best": None if outcome.best is None else str(outcome.best),
                "tried": outcome.tried,
            }
            for outcome in tuning.outcomes
        ],
    }


def report_lines(tunings: Sequence[Tuning], path: Path) -> list[str]:
    """What the command prints: a table of before and after by T, the tiles that won, and what to paste."""
    lines: list[str] = []
    for tuning in tunings:
        lines.append(tuning.block)
        lines.append(f"  {'T':>6}  {'before us':>9}  {'after us':>9}  ratio  tiles that won")
        for tokens, (before, after) in sorted(tuning.chain_us.items()):
            won = _won(tuning.points, tokens)
            lines.append(f"  {tokens:>6}  {before:>9.1f}  {after:>9.1f}  {after / before:>5.3f}  {won}")
        lines.append(f"  {tuning.tried} tiles timed in {tuning.seconds:.0f} s{_rest(tuning)}")
    lines.append(f"kept in {path}")
    text = options_text({tuning.block: tuning.points for tuning in tunings})
    lines.append(
        f"to fix it: {text}" if text else "no tile was faster than the kernels' own: there is nothing to paste"
    )
    return lines


def _rest(tuning: Tuning) -> str:
    dropped = f", {len(tuning.dropped)} dropped" if tuning.dropped else ""
    first = next(iter(tuning.dropped.items()), None)
    told = f" (first: {first[0]} {first[1]})" if first else ""
    return f"{dropped}{told}{'' if tuning.complete else '; the time was up before all were tried'}"


def _won(points: Mapping[str, Mapping[int, Any]], tokens: int) -> str:
    won = [f"{kernel} {at[tokens]}" for kernel, at in sorted(points.items()) if at.get(tokens) is not None]
    return "; ".join(won) or "-"
