"""What a user reads of an error: what and where first, then why and try; the same after crossing a process border."""

from __future__ import annotations

import pickle

import pytest

from moe_compiler import errors
from moe_compiler.errors import (
    CapacityError,
    KernelError,
    MoepdlError,
    PassError,
    PdlUnavailable,
    PeerError,
    PlanMismatchError,
    VerifyError,
)


def test_text_has_what_with_the_user_line_then_why_and_try():
    error = PdlUnavailable(
        'options["pdl"]="on" but device 0 is sm_80',
        why="programmatic launch needs sm_90",
        try_='pdl="auto"',
        where="model.py:47: w, i = torch.topk(p, k)",
    )
    assert str(error) == (
        'options["pdl"]="on" but device 0 is sm_80 (at model.py:47: w, i = torch.topk(p, k))\n'
        "  why: programmatic launch needs sm_90\n"
        '  try: pdl="auto"'
    )
    assert isinstance(error, RuntimeError)


def test_lines_that_are_not_known_are_left_out():
    assert str(MoepdlError("nothing matched")) == "nothing matched"
    assert str(MoepdlError("a", try_="b")) == "a\n  try: b"


def test_pass_error_names_pass_invariant_node_line_and_how_to_go_on():
    error = PassError(
        "lower", "a wait has no start", invariant="one wait a start", node="wait_3", where="m.py:3: y = f(x)"
    )
    assert str(error).splitlines() == [
        "pass lower: a wait has no start [invariant: one wait a start] [node: wait_3] (at m.py:3: y = f(x))",
        '  try: options={"disable": ["lower"]}',
    ]
    assert error.pass_name == "lower"
    assert (error.invariant, error.node, error.where) == ("one wait a start", "wait_3", "m.py:3: y = f(x)")


def test_pass_error_points_at_its_repro():
    assert "and attach /d/repro.py to a bug report" in str(PassError("lower", "broke", repro="/d/repro.py"))


@pytest.mark.parametrize(
    "error",
    [
        MoepdlError("a", why="b", try_="c", where="d:1: e"),
        PassError("lower", "broke", invariant="acyclic", node="n", why="w"),
        VerifyError("stale read", check="wait before read", node="down"),
        KernelError("gate_up", "needs sm_90", why="TMA"),
        CapacityError("too many", tokens=40, capacity=32, layer="mlp"),
        PeerError("no answer", ranks=(1, 3), layer="mlp", phase="combine", epoch=7),
        PlanMismatchError("differs", field="chunks", values=("1", "2"), rank=1, layer="mlp"),
    ],
)
def test_an_error_survives_pickling_with_its_fields(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_to_dict_has_the_class_and_the_fields_under_the_words_of_the_text():
    assert KernelError("gate_up", "too large", try_="smaller").to_dict() == {
        "error": "KernelError",
        "kernel": "gate_up",
        "problem": "too large",
        "what": "kernel gate_up: too large",
        "why": "",
        "try": "smaller",
        "where": "",
    }


def test_every_class_is_ours_and_documented():
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    names = {cls.__name__ for cls in classes}
    assert names >= {"OptionError", "CaptureError", "PassError", "VerifyError", "KernelError"}
    assert names >= {"PdlUnavailable", "MatchRequired", "PrepareError"}
    for cls in classes:
        assert issubclass(cls, MoepdlError), cls
        assert (cls.__doc__ or "").strip(), cls


def test_the_exchange_raises_the_compilers_errors_once_it_is_compiled_for():
    from moe_compiler import agreement as _agreement  # noqa: F401 - gives the exchange its errors
    from moe_compiler.runtime_kernels.exchange import faults

    told = {"why": "w", "try_": "t", "layer": "mlp", "phase": "combine", "epoch": 3}
    error = faults.peer_fault("no answer", ranks=(2, 5), **told)
    assert isinstance(error, PeerError) and (error.rank, error.ranks, error.epoch) == (2, (2, 5), 3)
    error = faults.capacity_fault(33, 32, "mlp")
    assert isinstance(error, CapacityError) and (error.tokens, error.capacity) == (33, 32)
    assert error.try_.startswith('options={"capacity": 48}')
