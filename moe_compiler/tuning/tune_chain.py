"""The tiles of a chain that is being compiled: given by the user, out of the device's table, or found now.

options["tiles"] counts first, for the blocks that it names. Else options["tune"] decides: "cached" looks the block up,
"full" also searches where the table has no point near, within options["tune_budget_s"] seconds a block, and keeps the
result; "off" leaves every kernel its own tile.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_compiler import _logs, device, torch_private
from moe_compiler.chain_operands import Layout, NoSample, are_weights, operand_layouts, sample_operands
from moe_compiler.cost import T
from moe_compiler.dag import block_sizes
from moe_compiler.launch import Chain, tokens_of, with_pdl
from moe_compiler.options import Options
from moe_compiler.progress import Progress
from moe_compiler.runtime_kernels.registry import kernel, tiled
from moe_compiler.tuning.compile_pool import CompilePool
from moe_compiler.tuning.tile_table import look_up, table_path, write_row
from moe_compiler.tuning.tune_block import LADDER, Tuning, tune_on_device
from moe_compiler.tuning.tuned_tiles import (
    Points,
    Stored,
    block_text,
    missing,
    options_text,
    with_tiles,
)

__all__ = ["tiled_chain"]

# Inputs that calls rotate through, and the T from which on fewer are enough to fill the cache.
_INPUTS, _FEW_INPUTS, _MANY = 8, 2, 2048


def tiled_chain(chain: Chain, options: Options) -> tuple[Chain, str]:
    """The chain with the tiles that are known for it, and where they come from, or why there are none.

    Raises ValueError for a table that cannot be read.
    """
    if chain.device != "cuda":
        return chain, ""
    try:
        layouts = operand_layouts(chain)
    except NoSample as error:
        return chain, f"not tuned: {error}"
    sizes = block_sizes(chain.nodes)
    if not {"E", "k"} <= sizes.keys():
        return chain, "not tuned: the block's sizes are not known"
    weights = _stored(chain, layouts)
    block = block_text(chain.program, sizes, weights)
    given = options.tiles.get(block)
    if given is not None:
        return _with(chain, sizes, given), f"given by {options.source_of('tiles')}"
    if options.tune == "off":
        return chain, 'not tuned: options["tune"] is "off"'
    if not torch.cuda.is_available():
        return chain, "not tuned: no CUDA device"
    name = torch.cuda.get_device_name()
    points, why = look_up(name, block)
    if options.tune == "full":
        points, why = _completed(chain, sizes, layouts, weights, block, points, why, options)
    if why:
        return chain, f"not tuned: {why}"
    return _with(chain, sizes, points), f"tuned on {name}"


def _with(chain: Chain, sizes: dict[str, int], points: Points) -> Chain:
    return replace(chain, program=with_tiles(chain.program, points, sizes["k"] / sizes["E"]))


def _stored(chain: Chain, layouts: Sequence[Layout]) -> list[Stored]:
    """How the weights of a chain are stored: of each list its first tensor, under the parameter's name."""
    counts = [(name, count) for name, count in chain.program.inputs if count]
    found = []
    first = {layout.name: layout for layout in reversed(layouts) if layout.weight}
    for name, count in counts:
        layout = first[name]
        if name.partition("_")[0] in ("gate", "up", "down") and "bias" not in name:
            shape, stride = (tuple(int(n) for n in sizes) for sizes in (layout.shape, layout.stride))
            found.append(Stored(name, count or 0, str(layout.dtype).removeprefix("torch."), shape, stride))
    return sorted(found, key=lambda stored: ("gate", "up", "down").index(stored.name.partition("_")[0]))


def _completed(
    chain: Chain,
    sizes: dict[str, int],
    layouts: Sequence[Layout],
    weights: Sequence[Stored],
    block: str,
    points: Points,
    why: str,
    options: Options,
) -> tuple[Points, str]:
    """The points of a block and those that a search adds."""
    own = tokens_of(chain.nodes[0])
    asked = [own] if own is not None else list(LADDER)
    open_ = _open(chain, points, [tokens for tokens in asked if tokens])
    if not open_:
        return points, why
    name = torch.cuda.get_device_name()
    try:
        with Progress(f"tiles of {block}") as progress:
            found = _tune(chain, sizes, layouts, weights, block, open_, options, progress)
    except NoSample as error:
        return points, why and str(error)
    _logs.log().info(
        "tiles of %s: %d timed in %.0f s; %s",
        block,
        found.tried,
        found.seconds,
        options_text({block: found.points}) or "every kernel keeps its own",
    )
    try:
        write_row(table_path(name), name, block, found.points)
    except OSError as error:
        warnings.warn(f"the tiles that were found cannot be kept: {error}", stacklevel=2)
    merged = {key: {**points.get(key, {}), **found.points.get(key, {})} for key in {**points, **found.points}}
    return merged, ""


def _open(chain: Chain, points: Points, tokens: Sequence[int]) -> list[int]:
    """The numbers of tokens at which a kernel of the chain has no point near."""
    found = []
    for count in tokens:
        names = {launch.kernel for launch in chain.program.variant_for(count).launches} & set(tiled())
        if any(missing(points, name, [count]) for name in names):
            found.append(count)
    return found


def _tune(
    chain: Chain,
    sizes: dict[str, int],
    layouts: Sequence[Layout],
    weights: Sequence[Stored],
    block: str,
    tokens: Sequence[int],
    options: Options,
    progress: Progress,
) -> Tuning:
    if torch.cuda.is_current_stream_capturing():
        raise NoSample("a CUDA graph is being captured")
    provable = {
        variant.name: frozenset(
            index
            for index, launch in enumerate(variant.launches)
            if index and kernel(launch.kernel).traits.waits and not device.why_no_pdl(chain.device)
        )
        for variant in chain.program.variants
    }
    program = with_pdl(chain, provable if options.pdl != "off" else {}).program
    which = are_weights(program)
    kept: list[Tensor] = []

    def described(count: int) -> Any:
        return tuple(
            (tuple(int(n.subs(T, count)) for n in layout.shape), tuple(int(n.subs(T, count)) for n in layout.stride))
            + (layout.dtype,)
            for layout in layouts
        )

    def operands(count: int) -> list[list[Tensor]]:
        runs: list[list[Tensor]] = []
        for seed in range(_INPUTS if count < _MANY else _FEW_INPUTS):
            runs.append(sample_operands(chain, count, "cuda", seed, kept or None))
            kept[:] = [tensor for tensor, weight in zip(runs[0], which, strict=True) if weight]
        return runs

    with torch_private.real_tensors(), torch.no_grad(), CompilePool() as pool:
        try:
            return tune_on_device(
                program,
                block,
                sizes,
                weights,
                described,
                operands,
                tokens,
                budget_s=options.tune_budget_s,
                pool=pool,
                say=progress.step,
            )
        except torch.OutOfMemoryError as error:
            raise NoSample("the operands do not fit into the device's free memory") from error
        finally:
            kept.clear()
            torch.cuda.empty_cache()
