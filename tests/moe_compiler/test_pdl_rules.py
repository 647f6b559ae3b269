"""The rules of programmatic launch against the races that people have shipped.

Each case is a public report (named in `thread`), the launches that made it, the rule that must refuse them, and the
mended launches, which must pass. `LEFT_OUT` says why the others of the collection are not cases of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from moe_compiler.pdl_rules import RULES, Grid, Kind, Trigger, Wait, check, check_captured, done, may_run


def f(*names: str) -> frozenset[str]:
    return frozenset(names)


def plain(name: str, reads: str = "", writes: str = "", **facts) -> Grid:
    return Grid(name, reads=f(*reads.split()), writes=f(*writes.split()), **facts)


def pdl(name: str, reads: str = "", writes: str = "", **facts) -> Grid:
    """An attributed kernel that does everything right unless `facts` say otherwise."""
    return plain(name, reads, writes, **{"attribute": True, "trigger": Trigger.AFTER_WAIT, **facts})


@dataclass(frozen=True)
class Case:
    id: str
    thread: str
    pattern: str
    rule: str
    bad: tuple[Grid, ...]
    good: tuple[Grid, ...]


def mend(grids: tuple[Grid, ...], at: int, **facts) -> tuple[Grid, ...]:
    return (*grids[:at], replace(grids[at], **facts), *grids[at + 1 :])


def case(id: str, thread: str, pattern: str, rule: str, bad: tuple[Grid, ...], at: int, **mended) -> Case:
    return Case(id, thread, pattern, rule, bad, mend(bad, at, **mended))


GEMM = (plain("producer", "x", "a", trigger=Trigger.AFTER_WAIT), pdl("gemm", "a w", "y", constants=f("w")))
WAITLESS = (plain("producer", "x", "a", trigger=Trigger.AFTER_WAIT), pdl("consumer", "a", "y", wait=Wait.NONE))
SOME = (plain("producer", "x", "a", trigger=Trigger.AFTER_WAIT), pdl("consumer", "a", "y", wait=Wait.SOME))


def early(*names: str) -> tuple[Grid, ...]:
    """A consumer that reads these before its wait; the producer writes them."""
    return (
        plain("producer", "x", " ".join(names), trigger=Trigger.AFTER_WAIT),
        pdl("consumer", "", "y", early_reads=f(*names)),
    )


def late(case_grids: tuple[Grid, ...]) -> dict[str, frozenset[str]]:
    return {"early_reads": f(), "reads": case_grids[1].early_reads}


CASES = (
    case("B1", "triton 11905", "P-c", "R6", early("a"), 1, **late(early("a"))),
    case("B2", "wait dropped in a warp-specialised loop", "P-c", "R2", WAITLESS, 1, wait=Wait.ALL),
    case("B5", "tokenspeed PR 1000", "P-a", "R2", WAITLESS, 1, attribute=False),
    case("B6", "tokenspeed PR 536", "P-a", "R2", WAITLESS, 1, wait=Wait.ALL),
    case(
        "B7",
        "flash-attention PR 2481",
        "P-a",
        "R2",
        (plain("backward", "dO", "delta"), pdl("preprocess", "O dO", "delta", wait=Wait.NONE)),
        1,
        wait=Wait.ALL,
    ),
    case("B8", "flash-attention PR 2643", "P-a", "R3", SOME, 1, wait=Wait.ALL),
    case("B9", "llama.cpp PR 23690", "P-a", "R2", WAITLESS, 1, wait=Wait.ALL),
    case(
        "B10",
        "llama.cpp PR 23825",
        "P-c",
        "R7",
        (GEMM[0], pdl("attention", "a w", "y", constants=f("w"), non_coherent=f("a", "w"))),
        1,
        non_coherent=f("w"),
    ),
    case("B11", "CCCL 5297", "P-b", "R6", early("keys"), 1, **late(early("keys"))),
    case("B12", "CCCL 9134", "P-f", "R14", mend(GEMM, 1, compiled_for=80), 1, compiled_for=90),
    case("B13", "CUTLASS 2760", "P-a", "R2", WAITLESS, 1, wait=Wait.ALL),
    case("B14", "CUTLASS 2962", "P-b", "R6", early("problem_shapes"), 1, **late(early("problem_shapes"))),
    case("B15", "CUTLASS PR 3279", "P-a", "R3", SOME, 1, wait=Wait.ALL),
    Case(
        "B16",
        "TensorRT-LLM PR 14668",
        "P-d",
        "R4",
        # The first warp's trigger counts for the block while its peers still write; the consumer trusts it.
        (
            plain("quant", "x", "scales", trigger=Trigger.BEFORE_WAIT),
            pdl("norm", "h", "h2", wait=Wait.NONE, trigger=Trigger.BEFORE_WAIT),
            pdl("gemm", "scales h2", "y"),
        ),
        (
            plain("quant", "x", "scales", trigger=Trigger.AFTER_WAIT),
            pdl("norm", "h", "h2"),
            pdl("gemm", "scales h2", "y"),
        ),
    ),
    case(
        "B19",
        "TensorRT-LLM PR 14066",
        "P-e",
        "R12",
        (plain("experts", "x", "y"), pdl("dispatch", "y", "sent", spins=True), pdl("combine", "sent", "out")),
        1,
        attribute=False,
        trigger=Trigger.NONE,
    ),
    case(
        "B20",
        "sglang PR 34789",
        "P-e",
        "R12",
        (
            plain("join", kind=Kind.JOIN),
            plain("experts", "x", "y", trigger=Trigger.AFTER_WAIT),
            pdl("finalize", "y", "out", fills_device=True),
        ),
        2,
        fills_device=False,
    ),
    case(
        "B21",
        "flashinfer PR 3835",
        "P-e",
        "R12",
        (
            plain("all-reduce", "x", "y", spins=True, trigger=Trigger.AFTER_WAIT),
            pdl("finalize", "y", "out"),
        ),
        0,
        trigger=Trigger.NONE,
    ),
    case("B22", "flashinfer 2708", "P-f", "R2", WAITLESS, 1, wait=Wait.ALL),
    case("B23", "DeepGEMM PR 447", "P-f", "R2", WAITLESS, 1, attribute=False),
    case("B24", "flashinfer PR 5081", "P-b", "R6", early("residual"), 1, **late(early("residual"))),
    case("B25", "sglang PR 38409", "P-b", "R6", early("slots"), 1, **late(early("slots"))),
    case("B26", "quack 206", "P-a", "R3", mend(SOME, 1, reads=f("cu_seqlens")), 1, wait=Wait.ALL),
    Case(
        "B27",
        "TensorRT-LLM PR 8786",
        "P-d",
        "R6",
        # The trigger stood before the writes, and the consumer read the metadata ahead of its wait.
        early("offsets"),
        mend(early("offsets"), 1, early_reads=f(), reads=f("offsets")),
    ),
    case("B28", "vllm 56030", "P-f", "R14", mend(GEMM, 1, device=89), 1, device=90),
    case(
        "B29",
        "vllm PR 30716",
        "-",
        "R8",
        (plain("router", "x", "ids"), plain("fill", "", "y", kind=Kind.FILL), pdl("experts", "ids", "y")),
        2,
        attribute=False,
    ),
    Case(
        "B30",
        "kekzl/imp PR 1833",
        "P-a",
        "R15",
        mend(GEMM, 1, audited=False),
        mend(GEMM, 1, audited=True),
    ),
    case(
        "B31",
        "pegainfer 569",
        "P-b",
        "R6",
        # Chains back to back: the head of the next one starts in the tail of the last.
        (pdl("head", "x", "a", early_reads=f("w")), pdl("tail", "a", "y")),
        0,
        attribute=False,
    ),
    case("B32", "flashinfer PR 4806", "P-f", "R15", mend(GEMM, 1, audited=False), 1, attribute=False),
    case("B33", "flashinfer 4172", "P-e", "R10", mend(GEMM, 1, interprocess_event=True), 1, interprocess_event=False),
    case("B34", "flashinfer PR 4685", "P-a", "R3", SOME, 1, wait=Wait.ALL),
)
LEFT_OUT = {
    "B3": "a compiler that aborts: nothing is launched",
    "B4": "an error of an older triton's frontend: the supported versions do not have it",
    "B17": "its cause is disputed: by the specification the reported code is legal",
    "B18": "its cause was never published",
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_race_is_refused_and_its_mended_twin_passes(case):
    broken = check(case.bad)
    assert case.rule in {violation.rule.split()[0] for violation in broken}, [str(v) for v in broken]
    assert [str(v) for v in check(case.good)] == []


def test_every_case_is_there_or_says_why_not_and_every_pattern_has_one():
    known = {f"B{i}" for i in range(1, 35)}
    assert {case.id for case in CASES} | set(LEFT_OUT) == known
    assert len(CASES) >= 24
    assert {case.pattern for case in CASES} >= {"P-a", "P-b", "P-c", "P-d", "P-e", "P-f"}


def test_every_rule_refuses_something():
    cooperative = mend(GEMM, 1, cooperative=True)
    collective = (plain("x", "", "a"), pdl("all_reduce", "a", "a", kind=Kind.COLLECTIVE))
    zeroing = (plain("reader", "y", "z", trigger=Trigger.AFTER_WAIT), pdl("zero", "x", "", early_writes=f("y")))
    refused = {v.rule for grids in (*(c.bad for c in CASES), cooperative, collective, zeroing) for v in check(grids)}
    assert refused == set(RULES)


# Rules that are no check of a launch: what the two sets mean, and what is read back from a captured graph.
ELSEWHERE = {"R1": (may_run, done), "R9": (check_captured,)}


def test_each_of_the_fifteen_rules_is_a_check_of_its_own():
    named = [rule.split()[0] for rule in RULES]
    assert sorted([*named, *ELSEWHERE], key=lambda rule: int(rule[1:])) == [f"R{n}" for n in range(1, 16)]
    assert len({*RULES.values()}) == len(RULES)


def test_a_trigger_promises_nothing_about_data():
    """R1: wherever the producer triggers, a consumer that waits may read its data, and one that does not may not."""
    for trigger in Trigger:
        waiting = mend(GEMM, 0, trigger=trigger)
        assert done(waiting, 1) == {0} and check(waiting) == []
        hasty = mend(waiting, 1, wait=Wait.NONE)
        assert may_run(hasty, 1) == {0} and done(hasty, 1) == f() and check(hasty)


ROUTED = (
    plain("route", "logits", "ids", trigger=Trigger.AFTER_WAIT),
    pdl("gate_up", "x ids", "act"),
    pdl("down", "act", "y", early_reads=f("ids")),
)


def test_what_the_grand_producer_wrote_may_be_read_early_only_behind_a_parent_that_waits():
    assert check(ROUTED) == []
    for parent in (
        {"trigger": Trigger.BEFORE_WAIT},
        {"wait": Wait.NONE},
        {"wait": Wait.SOME},
    ):
        broken = check(mend(ROUTED, 1, **parent))
        assert any(v.rule.startswith("R6") and v.storage == "ids" and v.launch == 2 for v in broken)
    # The parent's own result is never ready.
    assert any(v.storage == "act" for v in check(mend(ROUTED, 2, early_reads=f("ids", "act"))))


def test_weights_may_be_read_early_only_behind_a_launch_of_ours():
    chain = (plain("route", "x", "ids"), pdl("experts", "ids", "y", early_reads=f("w")))
    assert check(chain) == []
    assert "what ran before the sequence" in str(check(chain[1:])[0])
    foreign = (plain("optimizer", "g", "w", kind=Kind.FOREIGN), *chain[1:])
    assert "optimizer may still be writing" in str(check(foreign)[0])
    # Attributed from the first launch on, it is as if the launch before the sequence were the neighbour.
    waiting = (pdl("route", "x", "ids"), chain[1])
    assert check(waiting) == []
    assert check((replace(waiting[0], trigger=Trigger.BEFORE_WAIT), chain[1]))


def test_what_may_run_and_what_is_done():
    chain = (plain("a"), pdl("b"), pdl("c"), pdl("d"))
    assert [may_run(chain, k) for k in range(4)] == [f(), {0}, {1}, {2}]
    assert [done(chain, k) for k in range(4)] == [f(), {0}, {0, 1}, {0, 1, 2}]
    loose = mend(chain, 1, wait=Wait.NONE)
    assert may_run(loose, 2) == {0, 1}
    assert done(loose, 1) == f() and done(loose, 2) == {1} and done(loose, 3) == {1, 2}
    eager = mend(chain, 1, trigger=Trigger.BEFORE_WAIT)
    assert may_run(eager, 2) == {0, 1} and done(eager, 2) == {0, 1}
    assert may_run((pdl("first"),), 0) == {-1}
    assert may_run((plain("fill", kind=Kind.FILL), pdl("next")), 1) == f()


def test_memory_that_is_used_again_is_written_after_a_wait_that_covers_its_readers():
    chain = (plain("a", "x", "buffer"), pdl("b", "buffer", "t"), pdl("c", "t", "buffer"))
    assert check(chain) == []
    broken = check(mend(chain, 1, wait=Wait.NONE))
    assert {(v.rule.split()[0], v.launch, v.storage) for v in broken} >= {("R4", 1, "buffer"), ("R4", 2, "buffer")}


def test_captured_edges_are_those_planned():
    planned = {(0, 1), (1, 2)}
    assert check_captured(ROUTED, frozenset(planned)) == []
    (missing,) = check_captured(ROUTED, frozenset({(0, 1)}))
    assert "was planned to be programmatic and is not" in str(missing)
    (extra,) = check_captured(mend(ROUTED, 2, attribute=False), frozenset(planned))
    assert "launch 2 (down) has an edge from launch 1 that is programmatic and not planned" in str(extra)
