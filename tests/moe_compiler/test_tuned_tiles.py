"""Tuned tiles as values and in a file: which numbers of tokens a point serves, what a table keeps and refuses."""

from __future__ import annotations

import json

import pytest
import torch

from moe_compiler.block_program import BlockSizes, backward_program, forward_program
from moe_compiler.runtime_kernels.tiles import TileError, parse_tile
from moe_compiler.tuning import tile_table
from moe_compiler.tuning.tile_table import look_up, made_with, read_tiles, table_path, tiles_digest, write_row
from moe_compiler.tuning.tuned_tiles import (
    Stored,
    block_text,
    blocks_of,
    missing,
    options_text,
    plain,
    ranges,
    with_tiles,
)

SMALL, LARGE = parse_tile("16x64x64 w4 s3 tma"), parse_tile("128x64x32 w8 s4 g8")
S, L = str(SMALL), str(LARGE)
BLOCK = "E8 k2 H128 I64 N128 bfloat16 silu gate=rows down=rows"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEPDL_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({}, ()),
        ({8: None}, ()),
        ({8: SMALL}, ((3, None), (16, S), (None, None))),
        ({1: SMALL}, ((2, S), (None, None))),
        ({8: SMALL, 32: LARGE}, ((3, None), (16, S), (64, L), (None, None))),
        ({8: SMALL, 32: SMALL}, ((3, None), (64, S), (None, None))),
        ({8: SMALL, 33: LARGE}, ((3, None), (16, S), (66, L), (None, None))),
        ({8: SMALL, 100: LARGE}, ((3, None), (16, S), (49, None), (200, L), (None, None))),
        ({8: None, 32: LARGE}, ((16, None), (64, L), (None, None))),
        # 4096 tokens are 1024 rows an expert: the tiles are full, and more tokens change nothing.
        ({1024: SMALL, 4096: LARGE}, ((511, None), (2048, S), (None, L))),
    ],
)
def test_a_point_serves_the_numbers_of_tokens_around_it(points, expected):
    assert ranges(points, 0.25) == expected


@pytest.mark.parametrize("known", [{1: SMALL}, {3: SMALL, 5: None, 77: LARGE}, {8: SMALL, 64: LARGE, 4096: SMALL}])
def test_ranges_say_of_each_number_of_tokens_what_the_nearest_point_says(known):
    found = ranges(known, 0.25)
    for tokens in range(1, 9000, 7):
        text = next(tile for limit, tile in found if limit is None or tokens <= limit)
        served = not missing({"down": known}, "down", [tokens])
        nearest = min(known, key=lambda own: max(own / tokens, tokens / own))
        tile = known[nearest] if served else None
        if tokens > max(known) >= 1024:
            tile = known[max(known)]
        assert text == (None if tile is None else str(tile)), tokens


def test_what_is_missing():
    points = {"down": {4: SMALL, 64: None}}
    assert missing(points, "down", [1, 2, 4, 8, 9, 31, 32, 128, 129]) == [1, 9, 31, 129]
    assert missing(points, "gate_up", [4]) == [4]


def test_a_program_gets_the_tiles_of_each_variants_own_range():
    program = forward_program(BlockSizes(16, 2, 128, 64))
    limits = [variant.max_tokens for variant in program.variants]
    assert limits == [2, 2048, None]
    points = {"gate_up": {1: SMALL, 1024: SMALL, 4096: LARGE}, "gate_up_few": {2: parse_tile("1x16x64 w2 s1")}}
    few, sorted_, blocked = with_tiles(program, points, 2 / 16).variants

    def tiles(variant, name):
        return next(launch.tiles for launch in variant.launches if launch.kernel == name)

    assert tiles(few, "gate_up_few") == ((None, "1x16x64 w2 s1"),)
    assert tiles(sorted_, "gate_up") == ((511, None), (None, S))
    assert tiles(blocked, "gate_up") == ((None, L),)
    assert tiles(sorted_, "down") == ()
    assert with_tiles(with_tiles(program, points, 2 / 16), {}, 2 / 16) == program


def test_a_block_is_told_by_sizes_data_type_activation_and_layout():
    sizes = BlockSizes(8, 2, 128, 64)
    weights = [
        Stored("gate", 1, "bfloat16", (8, 128, 128), (128 * 128, 128, 1)),
        Stored("down", 1, "bfloat16", (8, 128, 64), (128 * 64, 64, 1)),
    ]
    assert block_text(forward_program(sizes), sizes.named, weights) == BLOCK
    assert block_text(forward_program(sizes, save=True), sizes.named, weights) == f"{BLOCK} saving"
    assert block_text(backward_program(sizes), sizes.named, weights) == f"{BLOCK} backward"
    for layout, expected in {
        "turned": (Stored("gate", 1, "bfloat16", (8, 128, 128), (128 * 128, 1, 128)), "gate=columns"),
        "in turns": (Stored("gate", 1, "bfloat16", (8, 64, 128), (128 * 128, 256, 1)), "gate=rows/256"),
        "both in turns": (Stored("gate", 1, "bfloat16", (8, 2, 64, 128), (128 * 128, 128, 256, 1)), "gate=turns:rows"),
        "both in turns, turned": (
            Stored("gate", 1, "bfloat16", (8, 2, 64, 128), (128 * 128, 1, 2, 128)),
            "gate=turns:columns",
        ),
        "a list": (Stored("gate", 8, "bfloat16", (128, 128), (128, 1)), "gate=list:rows"),
        "a view": (Stored("gate", 1, "bfloat16", (8, 64, 64), (9999, 300, 2)), "gate=strided/300"),
    }.values():
        assert str(layout) == expected


def test_the_text_to_paste_has_the_kernels_with_a_tile_that_won():
    blocks = {BLOCK: {"gate_up": {4: SMALL, 64: None}, "down": {64: None}}, f"{BLOCK} saving": {"down": {64: None}}}
    text = options_text(blocks)
    assert json.loads(text.removeprefix("options=")) == {"tiles": {BLOCK: {"gate_up": {"4": S, "64": "own"}}}}
    assert options_text({BLOCK: {"down": {64: None}}}) == ""


def test_texts_and_back():
    blocks = {BLOCK: {"gate_up": {4: SMALL, 64: None}, "down": {4096: LARGE}}}
    data = plain(blocks)
    assert data == {BLOCK: {"down": {"4096": L}, "gate_up": {"4": S, "64": "own"}}}
    assert blocks_of(json.loads(json.dumps(data))) == blocks


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "tiles are a dict of blocks, not list"),
        ({"qwen3": {}}, "block 'qwen3' does not begin with its sizes"),
        ({BLOCK: "fast"}, "its kernels are a dict, not str"),
        ({BLOCK: {"up": {}}}, "kernel 'up': no such kernel has tiles; those that have them: combine, down"),
        ({BLOCK: {"down": S}}, "its tiles are a dict by number of tokens, not str"),
        ({BLOCK: {"down": {"many": S}}}, "'many' is no number of tokens"),
        ({BLOCK: {"down": {"0": S}}}, "'0' is no number of tokens"),
        ({BLOCK: {"down": {"4": "64x64"}}}, "kernel 'down', T=4: tile '64x64'"),
        ({BLOCK: {"combine": {"4": S}}}, "kernel 'combine', T=4: combine takes tiles of one row"),
    ],
)
def test_what_is_no_table_of_tiles_is_told_with_its_place(data, told):
    with pytest.raises(TileError) as caught:
        blocks_of(data)
    assert told in str(caught.value)


def test_a_row_is_kept_and_completed():
    path = table_path("NVIDIA H200")
    assert path.name == "nvidia_h200.tiles.json"
    assert look_up("NVIDIA H200", BLOCK) == ({}, "this block is not in the table; `moepdl tune` adds it")
    write_row(path, "NVIDIA H200", BLOCK, {"down": {4: SMALL, 64: None}})
    write_row(path, "NVIDIA H200", f"{BLOCK} saving", {"down": {4: LARGE}})
    write_row(path, "NVIDIA H200", BLOCK, {"down": {4: LARGE, 8: SMALL}, "gate_up": {8: None}})
    assert look_up("NVIDIA H200", BLOCK) == ({"down": {4: LARGE, 8: SMALL, 64: None}, "gate_up": {8: None}}, "")
    assert look_up("NVIDIA H200", f"{BLOCK} saving") == ({"down": {4: LARGE}}, "")
    assert read_tiles(path)[BLOCK]["down"][8] == SMALL


def test_a_row_of_other_sources_is_passed_over_told_and_replaced(monkeypatch):
    path = table_path("NVIDIA H200")
    write_row(path, "NVIDIA H200", BLOCK, {"down": {4: SMALL}, "gate_up": {4: SMALL}})
    assert made_with().startswith("triton ") and ", kernels " in made_with()
    monkeypatch.setattr(tile_table, "made_with", lambda: "triton 9.9, kernels ffffffffffff")
    points, why = look_up("NVIDIA H200", BLOCK)
    assert points == {} and made_with() in why and "triton 9.9" in why and "moepdl tune" in why
    write_row(path, "NVIDIA H200", BLOCK, {"down": {4: LARGE}})
    assert look_up("NVIDIA H200", BLOCK) == ({"down": {4: LARGE}}, "")


@pytest.mark.parametrize("text", ["", "[]", '{"blocks": 3}', '{"blocks": {"x": {"tiles": {}, "made_with": ""}}}'])
def test_a_broken_table_is_named_with_what_helps(text):
    path = table_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"nvidia_h200\.tiles\.json is no table of tiles .* delete it, `moepdl tune`"):
        look_up("NVIDIA H200", BLOCK)


def test_the_digest_of_a_table_changes_with_it(monkeypatch):
    assert tiles_digest() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert tiles_digest() == ""
    write_row(table_path("NVIDIA H200"), "NVIDIA H200", BLOCK, {"down": {4: SMALL}})
    before = tiles_digest()
    write_row(table_path("NVIDIA H200"), "NVIDIA H200", BLOCK, {"down": {4: LARGE}})
    assert len(before) == 16 and tiles_digest() not in ("", before)
