"""Tiles as texts, tiles that fit the sizes of a block, and tiles that a chain's program brings along."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.runtime_kernels import register  # noqa: F401 - defines the operators
from moe_compiler.runtime_kernels.chain.prepared import prepare
from moe_compiler.runtime_kernels.chain.program import Program, ProgramError
from moe_compiler.runtime_kernels.registry import kernel, names, tiled
from moe_compiler.runtime_kernels.tiles import (
    COLUMNS,
    DEPTHS,
    SIDES,
    TABLES,
    Tile,
    TileError,
    check_tile,
    choose_tile,
    columns_tile,
    fitted,
    parse_tile,
)

pytest.importorskip("triton")

from moe_compiler.runtime_kernels import launching
from moe_compiler.runtime_kernels.chain import launcher
from tests.runtime_kernels.recorded import operands, record_on

GROUPED = ("gate_up", "down", "grad_act", "grad_pairs")
BFLOAT16 = torch.bfloat16
# E, k, H, I of blocks, and the tiles' sizes for a kernel of them.
MEASURED = (BlockSizes(128, 8, 2048, 768), BlockSizes(8, 2, 4096, 14336))


def sides(name: str, sizes: BlockSizes) -> tuple[int, int]:
    first, second = SIDES.get(name) or (DEPTHS[name], COLUMNS[name])
    return sizes.named[first], sizes.named[second]


def shipped(name: str) -> list[Tile]:
    return [tile for dtype in (BFLOAT16, torch.float32) for _, tile in TABLES[name].ranges(dtype, 90)]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_shipped_tile_is_its_text(name):
    for tile in shipped(name):
        assert parse_tile(str(tile)) == tile
        check_tile(name, tile, tiled())


def test_what_a_text_says():
    assert str(Tile(64, 128, 32, 8, 4, 8, swap=True, tma=True, halves=True, registers=128)) == (
        "64x128x32 w8 s4 g8 swap tma halves r128"
    )
    assert parse_tile("16x64x128 tma s5") == Tile(16, 64, 128, stages=5, tma=True)
    inner = Tile(128, 256, 64, 8, 4, 8, tma=True)
    both = Tile(128, 128, 64, 4, 6, 4, tma=True, instead=inner)
    assert str(both) == "128x128x64 w4 s6 g4 tma specialised, else 128x256x64 w8 s4 g8 tma"
    assert parse_tile(str(both)) == both


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it begins with '', not with ROWSxCOLSxDEPTH"),
        ("64x64 w4", "it begins with '64x64'"),
        ("64x64x64 w4 fast", "'fast' is not one of w<warps>, s<stages>, g<group>, r<registers>, swap, tma"),
        ("64x64x64 s3 s4", "'s4' says stages a second time"),
        ("48x64x64", "rows is 48, not a power of two"),
        ("64x64x64 w6", "warps is 6, not a power of two up to 16"),
        ("64x64x64 s0", "stages is 0, not a number from 1 to 16"),
        ("64x64x64 r300", "registers is 300"),
        ("64x64x64 specialised", "come together"),
        ("64x64x64, else 64x64x64", "come together"),
    ],
)
def test_a_text_that_is_no_tile(text, told):
    with pytest.raises(TileError, match="tile ") as caught:
        parse_tile(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("route", "64x64x64", "kernel route has no tile; those that have one: combine, down"),
        ("combine", "16x256x1", "combine takes tiles of one row"),
        ("gate_up", "8x64x64", "gate_up takes tiles of at least 16x16x16"),
        ("gate_up", "128x64x64 specialised, else 64x64x64", "gate_up has no form with specialised warps"),
        ("down", "64x64x64 specialised, else 64x64x64", "takes 128 rows, not 64"),
        ("down", "128x64x64 specialised, else 8x64x64", "at least 16x16x16"),
    ],
)
def test_a_tile_that_a_kernel_cannot_take(name, text, told):
    with pytest.raises(TileError) as caught:
        check_tile(name, parse_tile(text), tiled())
    assert told in str(caught.value)


def test_the_kernels_that_are_tiled_are_those_whose_launch_takes_a_tile():
    for name in names():
        if kernel(name).traits.min_arch is not None:
            assert ("tile" in inspect.signature(kernel(name).launch).parameters) == kernel(name).traits.tiled, name
    assert set(TABLES) <= set(tiled())


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_the_sizes_that_tiles_were_found_at_keep_them(sizes):
    for name in TABLES:
        for tile in shipped(name):
            assert fitted(name, tile, sides(name, sizes)) == tile


@pytest.mark.parametrize(
    ("summed", "depth", "stages"),
    [(2048, 128, 3), (2880, 64, 6), (704, 64, 6), (1408, 128, 3), (96, 32, 8), (1000, 128, 3)],
)
def test_a_step_divides_what_is_summed_and_as_much_is_in_flight(summed, depth, stages):
    tile = Tile(16, 128, 128, stages=3, tma=True)
    assert fitted("down", tile, (summed, 2048)) == replace(tile, depth=depth, stages=stages)


def test_a_fitted_step_keeps_the_weights_on_the_copy_engine():
    tensors = operands(hidden=320, inner=192)
    for name, sizes in (
        ("gate_up", (320, 192)),
        ("down", (192, 320)),
        ("grad_act", (320, 192)),
        ("grad_pairs", (384, 320)),
    ):
        for tile in {tile for limit, tile in TABLES[name].ranges(BFLOAT16, 90) if limit is not None}:
            (start, *_) = record_on(tensors, name, True, BFLOAT16, tile=fitted(name, tile, sizes))
            assert start.constants["BOX"] > 0, (name, tile)
            if sizes[0] % tile.depth:
                (before, *_) = record_on(tensors, name, True, BFLOAT16, tile=tile)
                assert before.constants["BOX"] == 0, (name, tile)


def wasted(size: int, side: int) -> float:
    return -(-size // side) * side / size - 1


# The second size, and the columns of the tile for many rows: the first where a narrower one moves fewer bytes.
@pytest.mark.parametrize(
    ("name", "columns", "cols"),
    [
        ("gate_up", 1408, 128),
        ("gate_up", 704, 128),  # 9 % wasted; half the columns read x twice as often
        ("gate_up", 2880, 128),
        ("gate_up", 64, 64),
        ("gate_up", 32, 32),
        ("down", 2880, 256),
        ("down", 2816, 256),
        ("down", 128, 128),
        ("grad_act", 704, 128),
        ("grad_act", 64, 64),
    ],
)
def test_columns_that_are_not_there_are_weighed_against_bytes(name, columns, cols):
    many = TABLES[name].many
    found = fitted(name, many, (2048, columns))
    assert found == replace(many, cols=cols)
    assert wasted(columns, found.cols) <= wasted(columns, many.cols)


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 96, 160, 192, 320, 704, 768, 1408, 2112, 2880, 6400])
@pytest.mark.parametrize("name", [*GROUPED, *SIDES])
def test_a_fitted_tile_never_moves_more_bytes_than_the_tables(name, columns):
    def moved(tile: Tile) -> float:
        parts = 2 if name == "gate_up" else 1
        covered = -(-columns // tile.cols) * tile.cols
        if name in SIDES:
            return covered * -(-columns // tile.rows) * tile.rows * (1 / tile.rows + 1 / tile.cols)
        return covered * (1 / tile.cols + parts / tile.rows)

    for tile in shipped(name)[:-1]:
        found = fitted(name, tile, (columns, columns) if name in SIDES else (2048, columns))
        assert moved(found) <= moved(tile) * 1.0001
        assert found.cols >= 32 and (not found.swap or found.cols >= 64)


def test_a_gradient_of_small_matrices_has_tiles_of_their_size():
    tile = TABLES["grad_down"].many
    assert (tile.rows, tile.cols) == (128, 128)
    found = fitted("grad_down", tile, (2048, 64))
    assert (found.rows, found.cols) == (128, 64)
    assert fitted("grad_gate_up", tile, (64, 32)) == replace(tile, rows=64, cols=32)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("times", [1, 2, 4, 32])
@pytest.mark.parametrize(("columns", "depth"), [(5760, 2880), (2880, 2880), (768, 2048), (8, 5), (28672, 4096)])
def test_pieces_of_columns_are_lines_of_the_cache_where_programs_are_many(columns, depth, times, parts, width):
    tile = columns_tile(columns, depth, times, parts, width)
    check_tile("gate_up_few", tile, tiled())
    piece, programs = tile.cols * width, times * -(-columns // tile.cols)
    step = parts * piece * tile.depth
    assert 32 <= piece <= 128 and tile.depth <= max(16, 2 * depth)
    # The next wider piece leaves fewer than two programs for each multiprocessor.
    assert piece == 128 or times * -(-columns // (2 * tile.cols)) < 264
    assert (tile.stages - 1) * step <= 1 << 16
    # A program that shares its multiprocessor with few others reads more at a time.
    if depth >= 2880:
        assert step == (1 << 14 if piece > 32 and programs < 528 else 1 << 13)


def test_the_tile_for_float32_is_the_tables():
    assert choose_tile("down", torch.float32, 4, 90, (100, 20)) == Tile(16, 32, 32, stages=2)


# What a program says about tiles.

SIZES = BlockSizes(8, 2, 128, 64)


def with_tiles(tiles, kernel_name="gate_up", program=None) -> Program:
    program = forward_program(SIZES) if program is None else program
    variants = tuple(
        replace(
            variant,
            launches=tuple(
                replace(launch, tiles=tiles) if launch.kernel == kernel_name else launch for launch in variant.launches
            ),
        )
        for variant in program.variants
    )
    return replace(program, variants=variants)


def test_a_program_with_tiles_is_its_text_and_one_without_says_nothing_of_them():
    bare = forward_program(SIZES)
    assert '"tiles"' not in bare.to_text()
    tuned = with_tiles(((8, "16x64x64 w4 s3 tma"), (64, None), (None, "64x64x64 w4 s3")))
    assert Program.from_text(tuned.to_text()) == tuned
    assert Program.from_text(tuned.to_text()).to_text() == tuned.to_text() != bare.to_text()


@pytest.mark.parametrize(
    ("tiles", "name", "told"),
    [
        (((8, "16x64x64"),), "gate_up", "only the last is None: [8]"),
        (((None, "16x64x64"), (None, None)), "gate_up", "must grow from 1"),
        (((8, None), (8, "16x64x64"), (None, None)), "gate_up", "must grow from 1"),
        (((0, None), (None, "16x64x64")), "gate_up", "must grow from 1"),
        (((True, None), (None, "16x64x64")), "gate_up", "must grow from 1"),
        (((None, "16x64"),), "gate_up", "launch 3 (gate_up): tile '16x64'"),
        (((None, "16x64x64"),), "route", "kernel route has no tile"),
    ],
)
def test_tiles_that_a_program_may_not_have(tiles, name, told):
    with pytest.raises(ProgramError) as caught:
        with_tiles(tiles, name).to_text()
    assert told in str(caught.value)


def recorded(program: Program, tokens: int, *, backward: bool = False) -> list[launching.Start]:
    weights = weights_of(SIZES, "cpu")
    with launching.recording() as starts:
        launcher.run(inputs_of(SIZES, tokens, weights, "cpu", backward=backward), program.to_text())
    return starts


def gate_up_of(starts: list[launching.Start]) -> launching.Start:
    (found,) = (start for start in starts if start.kernel.__name__ == "gate_up_kernel")
    return found


def test_a_launch_takes_the_tile_of_its_range():
    small, large = "16x64x64 w4 s3 tma", "128x64x32 w8 s4 g8"
    program = with_tiles(((50, small), (100, None), (None, large)))
    for tokens, text in ((3, small), (50, small), (101, large), (5000, large)):
        tile, start = parse_tile(text), gate_up_of(recorded(program, tokens))
        assert (start.constants["BM"], start.constants["BN"], start.constants["BK"]) == (
            tile.rows,
            tile.cols,
            tile.depth,
        )
        assert (start.warps, start.stages, start.constants["GROUP"]) == (tile.warps, tile.stages, tile.group)
    own = gate_up_of(recorded(forward_program(SIZES), 80))
    assert gate_up_of(recorded(program, 80)).constants == own.constants


def test_every_tiled_kernel_takes_its_tile_from_the_program():
    text = {"combine": "1x128x1 w1 s3", "gate_up_few": "1x16x64 w2 s1", "down_few": "1x32x64 w2 s1"}
    seen = set()
    for program, backward in ((forward_program(SIZES), False), (backward_program(SIZES), True)):
        for name in {launch.kernel for variant in program.variants for launch in variant.launches} & set(tiled()):
            tile = text.get(name, "32x16x32 w4 s2")
            tuned = with_tiles(((None, tile),), name, program)
            for tokens in (1, 40):
                variant = prepare(program.to_text()).variant_of(tokens)
                if name not in [launch.kernel.name for launch in variant.launches]:
                    continue
                before, after = (recorded(p, tokens, backward=backward) for p in (program, tuned))
                # grad_act has a sum over its column tiles behind it, where there are several.
                code = [
                    [
                        (s.kernel, s.constants, s.warps, s.stages)
                        for s in starts
                        if s.kernel.__name__ != "sum_parts_kernel"
                    ]
                    for starts in (before, after)
                ]
                changed = [a[0].__name__ for a, b in zip(*code, strict=True) if a != b]
                assert len(changed) == 1, (name, tokens, changed)
                seen.add(name)
    assert seen == set(tiled())


def test_on_a_cpu_tiles_change_nothing():
    torch.manual_seed(0)
    sizes = BlockSizes(4, 2, 32, 16)
    weights = {key: [torch.randn_like(t) * 0.1 for t in tensors] for key, tensors in weights_of(sizes, "cpu").items()}
    tensors = [torch.randn(5, 32, dtype=BFLOAT16), *inputs_of(sizes, 5, weights, "cpu")[1:]]
    bare = forward_program(sizes)
    (plain,) = torch.ops.moepdl.chain(tensors, bare.to_text())
    (tuned,) = torch.ops.moepdl.chain(tensors, with_tiles(((None, "16x16x16"),), program=bare).to_text())
    assert torch.equal(plain, tuned)
