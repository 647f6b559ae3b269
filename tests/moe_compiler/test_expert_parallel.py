"""Sharded models on several processes: equal to the whole model on one, compiled and in eager; states, errors, limits.

The processes run all scenarios once (tests/moe_compiler/expert_parallel_worker.py); each test reads one of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import of_scenario, run_ranks

WORKER = "tests.moe_compiler.expert_parallel_worker"
QUICK = (
    "packed_static",
    "overlapped",
    "biases_and_packed_in_turns",
    "in_eager",
    "sizes_that_change",
    "states",
    "refusals",
    "too_many_tokens_in_a_call",
    "ranks_that_disagree",
    "a_rank_that_does_not_compile",
    "a_rank_that_dies_before_its_backward",
)
LONG = (
    "in_chunks",
    "checkpointed",
    "packed_bfloat16_round_robin",
    "one_module_an_expert",
    "without_the_pass",
    "through_inductor",
    "too_many_tokens_at_compile_time",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("transformers", reason="the worker shards transformers' own blocks")
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two"), 240, QUICK)


@pytest.fixture(scope="module")
def two_long(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("transformers", reason="the worker shards transformers' own blocks")
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two_long"), 400, LONG)


@pytest.mark.parametrize("name", ["biases_and_packed_in_turns", "in_eager", "states", "overlapped"])
def test_as_on_one_process(two, name):
    of_scenario(two, name)


def test_the_report_shows_the_exchange(two):
    for text in of_scenario(two, "packed_static"):
        assert "exchange: 2 ranks over torch.distributed (gloo), E=8 contiguous, 48 slots for each source" in text
        # 48 rows of 32 floats, 2 ids and 2 weights go to the other rank, 48 rows come back.
        assert "a rank sends 6.91 kB out and 6.14 kB back" in text


def test_the_report_shows_what_exchanges_overlap_with(two):
    for text in of_scenario(two, "overlapped"):
        assert "forward ep_dispatch: beside 1 matmul\n" in text and "forward ep_combine: beside 2 matmuls\n" in text
        assert "backward ep_redispatch: beside 3 matmuls\n" in text


def test_one_rank_compiles_anew_and_asks_nobody(two):
    compiled = of_scenario(two, "sizes_that_change")
    assert compiled[0] == 1 and compiled[1] > 1


def test_what_cannot_be_sharded_says_why_and_changes_nothing(two):
    texts = of_scenario(two, "refusals")[0]
    parts = (
        "no experts were found",
        "the model has no module 'expert'",
        "placement 'nearest' is not known",
        "got str as its mesh",
        "the mesh has 2 dimensions",
        "are shared between ranks already",
        "quantised: experts.gate_up_proj is int8",
        "head.weight is also experts.1.up.weight",
    )
    for text, part in zip(texts, parts, strict=True):
        assert part in text and "\n  why: " in text and "\n  try: " in text


def test_too_many_tokens_are_an_error_on_every_rank(two):
    mine, theirs = of_scenario(two, "too_many_tokens_in_a_call")
    assert "experts got 17 tokens on one rank, and its exchange has room for 16" in mine
    assert 'try: options={"capacity": 32}' in mine
    assert "rank 0 cannot take part: experts got 17 tokens" in theirs


def test_ranks_that_compile_different_plans_are_told_on_every_rank(two):
    for text in of_scenario(two, "ranks_that_disagree"):
        assert text.startswith("experts: rank 1 compiled it with capacity 64, rank 0 with 32\n")


def test_a_rank_that_does_not_compile_is_named(two):
    text = of_scenario(two, "a_rank_that_does_not_compile")[1]
    assert text.startswith("no answer from rank 0 when experts was compiled, in group")


@pytest.mark.slow
@pytest.mark.timeout(460)
@pytest.mark.parametrize(
    "name", ["packed_bfloat16_round_robin", "through_inductor", "too_many_tokens_at_compile_time", "checkpointed"]
)
def test_as_on_one_process_at_length(two_long, name):
    of_scenario(two_long, name)


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_a_chunk_travels_while_another_is_computed(two_long):
    for text in of_scenario(two_long, "in_chunks"):
        assert "16 slots for each source (agreed by 2 ranks, the largest has 33 tokens), 3 chunks" in text
        assert "forward ep_combine: beside order, gate_up, down, combine\n" in text


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_a_list_of_modules_is_one_exchange(two_long):
    for texts in of_scenario(two_long, "one_module_an_expert"):
        assert "one_hot_loop" in texts[0] and "exchange: 2 ranks" in texts[0]


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_what_stays_gathered_is_told(two_long):
    for notes in of_scenario(two_long, "without_the_pass"):
        assert any(note.startswith("2 weights that ranks share gathered whole at every call") for note in notes)


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_eight_ranks(tmp_path):
    pytest.importorskip("transformers", reason="the worker shards transformers' own blocks")
    names = [name for name in QUICK if name != "a_rank_that_does_not_compile"]
    found = run_ranks(WORKER, 8, tmp_path, 600, names)
    for name in names[:-1]:
        of_scenario(found, name)
    of_scenario([one for rank, one in enumerate(found) if rank != 1], names[-1])
