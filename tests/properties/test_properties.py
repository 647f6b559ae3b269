"""Random MoE blocks, some always and a hundred in all, and the generator's own tests.

Two thousand and more: `python -m tests.properties.run`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.properties import run
from tests.properties.case import DIMENSIONS, NAMES, Case, draw, normal, parse, shrink, simpler
from tests.properties.check import Outcome

ALWAYS, SEEDS = range(30), range(100)
# Of those that Dynamo captures whole.
MATCHED = 0.95


@pytest.fixture(scope="session")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """What became of a seed's block, run once whatever the number of processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "random-blocks"
    folder.mkdir(exist_ok=True)

    def outcome(seed: int) -> dict:
        path: Path = folder / f"{seed}.json"
        if not path.exists():
            made = folder / f"{seed}.{os.getpid()}"
            made.write_text(json.dumps(run.run_one(seed, draw(seed, quick=True))))
            made.replace(path)
        return json.loads(path.read_text())

    return outcome


@pytest.fixture(scope="module", autouse=True)
def operators():
    pytest.importorskip("transformers", reason="the random blocks call transformers' grouped matmul")
    run._start()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in ALWAYS else pytest.mark.slow) for seed in SEEDS]
)
def test_a_random_block_is_right_and_matched_at_most_once(seed: int, outcome_of: Callable[[int], dict]):
    outcome = outcome_of(seed)
    assert outcome["status"] in ("matched", "missed", "not captured"), f"{outcome['case']}: {outcome['detail']}"
    assert outcome["status"] == "matched" or outcome["detail"]


@pytest.mark.parametrize("seeds", [ALWAYS, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=["always", "all"])
def test_most_random_blocks_are_matched(seeds: range, outcome_of: Callable[[int], dict]):
    captured = [o for o in map(outcome_of, seeds) if o["status"] != "not captured"]
    matched = [o for o in captured if o["status"] == "matched"]
    missed = "\n".join(f"{o['case']}: {o['detail']}" for o in captured if o not in matched)
    assert len(captured) >= 0.9 * len(seeds)
    assert len(matched) >= MATCHED * len(captured), f"{len(matched)} of {len(captured)}\n{missed}"


# The generator


def test_a_case_is_its_seeds_and_its_names():
    assert draw(5) == draw(5) != draw(6)
    for seed in range(300):
        case = draw(seed)
        assert parse(str(case)) == case == normal(case)
    assert str(Case()) == "plain" and parse("plain") == Case()
    with pytest.raises(ValueError, match="no dimension"):
        parse("colour=red")
    with pytest.raises(ValueError, match="formulation is one of batched"):
        parse("formulation=magic")


def test_every_value_of_every_dimension_is_drawn():
    assert set(DIMENSIONS) == set(NAMES)
    plain = Case()
    seen: dict[str, set] = {name: set() for name in NAMES}
    for seed in range(1500):
        case = draw(seed)
        for name in NAMES:
            seen[name].add(getattr(case, name))
    for field in fields(Case):
        assert getattr(plain, field.name) == next(iter(DIMENSIONS[field.name]))
        assert seen[field.name] == set(DIMENSIONS[field.name]), field.name


def test_a_failing_case_shrinks_to_what_makes_it_fail():
    def fails(case: Case) -> bool:
        return case.renorm == "eps" and case.k > 2

    start = next(case for case in map(draw, range(2000)) if fails(case))
    small = shrink(start, fails)
    assert fails(small) and not any(fails(other) for other in simpler(small))
    assert set(str(small).split()) <= {"k=3", "k=4", "renorm=eps", "experts=4", "mode=training"}


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The check can fail: another scale in the float64 run, and in the router's operator."""
    from moe_compiler.moe_ir import RouterSpec
    from tests.properties import routers

    case = parse("scale=2.5 renorm=sum mode=training")
    assert run.run_one(3, case)["status"] == "matched"
    exact = routers.exact_weights
    with monkeypatch.context() as patch:
        patch.setattr(routers, "exact_weights", lambda c, *rest: exact(replace(c, scale=1.0), *rest))
        assert run.run_one(3, case)["status"] == "not a model"
    arguments = RouterSpec.args
    monkeypatch.setattr(RouterSpec, "args", lambda spec: arguments(replace(spec, scale=1.0)))
    outcome = run.run_one(3, case)
    assert outcome["status"] == "wrong" and "error" in outcome["detail"]


def test_the_summary_counts_by_dimension():
    statuses = ["matched", "matched", "missed", "not captured"]
    made = [
        {**Outcome(seed, str(draw(seed)), status, "why").to_dict(), "seconds": 0.1}
        for seed, status in enumerate(statuses)
    ]
    data = run.summary(made)
    assert (data["cases"], data["captured"], data["match_rate"]) == (4, 3, 0.6667)
    assert sum(n["cases"] for n in data["dimensions"]["dtype"].values()) == 3
    text = run.markdown({"first": 0, "environment": {"torch": "2"}, **data})
    assert "66.7%" in text and "| missed | 1 |" in text and "`--seed 2`" in text
