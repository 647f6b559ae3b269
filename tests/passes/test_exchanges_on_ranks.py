"""Exchanges that a model wrote, replaced, on two processes: results and gradients against float64.

The processes run all scenarios once (tests/passes/exchange_worker.py); each test reads one of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import of_scenario, run_ranks

WORKER = "tests.passes.exchange_worker"
QUICK = ("one_module_an_expert", "equal_parts")
LONG = (
    "functional",
    "autograd",
    "in_place",
    "in_parts",
    "in_a_checkpoint",
    "skewed",
    "different_numbers_of_tokens",
    "equal_parts_skewed",
    "without_the_pass",
    "masked",
    "through_inductor",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two"), 200, QUICK)


@pytest.fixture(scope="module")
def two_long(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two_long"), 560, LONG)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", QUICK)
def test_as_in_eager_and_as_in_float64(two, name):
    for text in of_scenario(two, name):
        assert "exchange: 2 ranks over torch.distributed (gloo), E=4 contiguous" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in LONG if name not in ("without_the_pass", "masked")])
def test_as_in_eager_and_as_in_float64_at_length(two_long, name):
    for text in of_scenario(two_long, name):
        assert "exchange: 2 ranks over torch.distributed (gloo), E=4 contiguous, 48 slots for each source" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_pass_can_be_left_out(two_long):
    for notes in of_scenario(two_long, "without_the_pass"):
        assert sum("is disabled by" in note for note in notes) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_masked_ids_and_a_sum_over_all_ranks(two_long):
    for found in of_scenario(two_long, "masked"):
        assert found == ["one_hot_loop"]
