"""Options: where a value comes from, what is refused and with which words, and what is part of the cache key."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from moe_compiler.errors import OptionError
from moe_compiler.options import Options, describe, keys, not_options, resolve

NAMES = frozenset({"find_moe", "raise_moe", "chain_pdl", "grouped_mm"})


def made(options=None, *, mode=None, **environ):
    return resolve(options, mode=mode, environ=environ, known_names=NAMES)


def refused(options=None, *, mode=None, **environ) -> str:
    with pytest.raises(OptionError) as caught:
        made(options, mode=mode, **environ)
    return str(caught.value)


def test_defaults():
    options = made()
    assert options == Options()
    assert options.to_dict() == {
        "pdl": "auto",
        "overlap": "off",
        "chunks": "auto",
        "capacity": 0,
        "timeout_s": 30,
        "disable": [],
        "require_match": False,
        "remainder": "inductor",
        "verify": "structural",
        "numerics": "strict",
        "memory": "normal",
        "tune": "cached",
        "tune_budget_s": 60,
        "tiles": {},
        "dryrun": False,
        "on_error": "raise",
        "dump": None,
        "inductor": {},
        "mode": None,
    }
    assert set(options.origins.values()) == {"default"}
    assert tuple(options.origins) == keys()


def test_environment_wins_over_argument_and_origins_say_so():
    options = made({"pdl": "off", "verify": "numeric"}, MOEPDL_PDL="on")
    assert (options.pdl, options.verify, options.tune) == ("on", "numeric", "cached")
    assert options.origins["pdl"] == "environment"
    assert options.origins["verify"] == "argument"
    assert options.origins["tune"] == "default"


@pytest.mark.parametrize("text", ["", "   "])
def test_empty_environment_text_counts_as_unset(text):
    options = made({"pdl": "off"}, MOEPDL_PDL=text)
    assert options.pdl == "off"
    assert options.origins["pdl"] == "argument"


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("MOEPDL_CHUNKS", "4", "chunks", 4),
        ("MOEPDL_CHUNKS", "auto", "chunks", "auto"),
        ("MOEPDL_CAPACITY", "512", "capacity", 512),
        ("MOEPDL_TIMEOUT_S", "2.5", "timeout_s", 2.5),
        ("MOEPDL_DISABLE", "find_moe, grouped_mm,", "disable", ("find_moe", "grouped_mm")),
        ("MOEPDL_REQUIRE_MATCH", "true", "require_match", True),
        ("MOEPDL_REQUIRE_MATCH", "3", "require_match", 3),
        ("MOEPDL_DRYRUN", "1", "dryrun", True),
        ("MOEPDL_DRYRUN", "off", "dryrun", False),
        ("MOEPDL_DUMP", "/tmp/d", "dump", "/tmp/d"),
        ("MOEPDL_INDUCTOR", '{"max_autotune": true}', "inductor", {"max_autotune": True}),
        ("MOEPDL_MODE", "max-autotune", "mode", "max-autotune"),
    ],
)
def test_environment_text_is_parsed(variable, text, key, value):
    found = getattr(made(**{variable: text}), key)
    assert found == value
    assert type(found) is type(value)


def test_unknown_key_names_the_nearest():
    assert refused({"pld": "on"}).splitlines()[0] == "options has no key 'pld'"
    assert refused({"pld": "on"}).splitlines()[-1] == "  try: pdl"
    assert refused({"require_matches": 1}).endswith("try: require_match")


def test_unknown_name_in_disable_names_the_nearest():
    text = refused({"disable": ["rise_moe"]})
    assert "there is no pass or formulation 'rise_moe'" in text
    assert "chain_pdl, find_moe, grouped_mm, raise_moe" in text
    assert text.endswith("try: raise_moe")


def test_a_far_off_name_is_answered_with_the_names_there_are_and_no_guess():
    for options, names in (
        ({"speed": "max"}, "the keys are pdl, overlap"),
        ({"disable": ["dispatcher"]}, "the names are chain_pdl, find_moe, grouped_mm, raise_moe"),
        ({"mode": "quickest"}, "reduce-overhead, max-autotune-no-cudagraphs"),
    ):
        lines = refused(options).splitlines()
        assert names in lines[1]
        assert lines[2] == "  try: one of these names"
    assert refused({"inductor": {"nope": 1}}).endswith("try: print(torch._inductor.list_options())")


def test_a_slip_in_a_variable_is_an_error_and_a_foreign_variable_is_not():
    assert refused(MOEPDL_VERIFI="off").endswith("try: verify")
    assert made(MOEPDL_VERBOSE="1", MOEPDL_VENV="/tmp/venv") == Options()


@pytest.mark.parametrize(
    ("options", "first", "allowed", "suggestion"),
    [
        ({"pdl": "onn"}, 'options["pdl"]="onn" is not allowed', 'allowed: "auto", "on", "off"', 'pdl="on"'),
        ({"pdl": True}, 'options["pdl"]=True is not allowed', 'allowed: "auto", "on", "off"', 'pdl="on"'),
        (
            {"overlap": False},
            'options["overlap"]=False is not allowed',
            'allowed: "off", "auto", "on"',
            'overlap="off"',
        ),
        ({"capacity": -1}, 'options["capacity"]=-1 is not allowed', "allowed: an int >= 0", "capacity=0"),
        ({"timeout_s": 0}, 'options["timeout_s"]=0 is not allowed', "allowed: a number > 0", "timeout_s=30"),
        ({"chunks": 0}, 'options["chunks"]=0 is not allowed', 'allowed: "auto" or an int >= 1', 'chunks="auto"'),
        (
            {"chunks": True},
            'options["chunks"]=True is not allowed',
            'allowed: "auto" or an int >= 1',
            'chunks="auto"',
        ),
        ({"dryrun": 1}, 'options["dryrun"]=1 is not allowed', "allowed: True or False", "dryrun=True"),
        (
            {"require_match": -1},
            'options["require_match"]=-1',
            "allowed: False, True or an int >= 0",
            "require_match=True",
        ),
        (
            {"disable": "find_moe"},
            'options["disable"]="find_moe"',
            "a list of pass or formulation names",
            'disable=["find_moe"]',
        ),
        ({"inductor": []}, 'options["inductor"]=[] is not allowed', "a dict", 'inductor={"max_autotune": True}'),
        ({"dump": 3}, 'options["dump"]=3 is not allowed', "a path or None", 'dump="out"'),
    ],
)
def test_bad_values_say_what_is_allowed(options, first, allowed, suggestion):
    lines = refused(options).splitlines()
    assert lines[0].startswith(first)
    assert allowed in lines[1]
    assert suggestion in lines[2]


def test_bad_environment_text_names_the_variable():
    assert refused(MOEPDL_TUNE="ful").startswith('MOEPDL_TUNE="ful" is not allowed')
    assert "not JSON" in refused(MOEPDL_INDUCTOR="{")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("nope", "print(torch._inductor.list_options())"),
        ("max_autotun", "max_autotune"),
        ("cudagraphs", "triton.cudagraphs"),
        ("debgu", "debug"),
    ],
)
def test_inductors_keys_are_checked(name, nearest):
    lines = refused({"inductor": {name: 1}}).splitlines()
    assert lines[0] == f"options[\"inductor\"]: Inductor has no option '{name}'"
    assert lines[1].startswith("  why: the names are those of torch._inductor.list_options()")
    assert lines[2].startswith(f"  try: {nearest}")
    assert refused(MOEPDL_INDUCTOR='{"nope": 1}').startswith("MOEPDL_INDUCTOR: Inductor has no option 'nope'")


def test_a_key_of_a_group_of_inductors_is_one():
    patches = {"triton.cudagraphs": True, "max_autotune": True}
    assert made({"inductor": patches}).inductor == patches


def test_what_is_suggested_is_allowed():
    for options in ({"pdl": 3}, {"chunks": -1}, {"dryrun": "x"}, {"dryrun": 0}, {"require_match": "x"}, {"dump": 3}):
        suggestion = refused(options).splitlines()[2].removeprefix("  try: ")
        key, _, value = suggestion.partition("=")
        assert key in options
        made({key: ast.literal_eval(value)})
    assert refused({"disable": "find_moe,grouped_mm"}).endswith('try: disable=["find_moe", "grouped_mm"]')


def test_variables_that_are_no_option():
    environ = {"MOEPDL_PDL": "off", "MOEPDL_VERBOSE": "1", "MOEPDL_FOO": "1", "MOEPDL_VERIFI": "off", "HOME": "/"}
    assert not_options(environ) == {"MOEPDL_FOO": "", "MOEPDL_VERIFI": "MOEPDL_VERIFY"}


def test_mode_may_be_given_either_way_but_not_twice():
    assert made(mode="max-autotune").mode == "max-autotune"
    assert made(mode="max-autotune").origins["mode"] == "argument"
    assert made({"mode": "reduce-overhead"}).mode == "reduce-overhead"
    text = refused({"mode": "reduce-overhead"}, mode="max-autotune")
    assert "mode='max-autotune' and options[\"mode\"]='reduce-overhead' are both given" in text


def test_mode_must_be_one_of_inductors():
    text = refused({"mode": "max-autotun"})
    assert text.startswith('options["mode"]="max-autotun" is not allowed')
    assert "max-autotune-no-cudagraphs" in text
    assert text.endswith("try: max-autotune")


def test_equal_options_have_equal_keys_whatever_their_order():
    one = made({"disable": ["find_moe", "chain_pdl"], "inductor": {"epilogue_fusion": 1, "debug": 2}})
    two = made({"inductor": {"debug": 2, "epilogue_fusion": 1}, "disable": ["chain_pdl", "find_moe"]})
    assert one.cache_key() == two.cache_key()


@pytest.mark.parametrize("options", [{"dump": "/tmp/x"}, {"require_match": 3}])
def test_what_changes_no_code_is_not_in_the_cache_key(options):
    assert made(options).cache_key() == made().cache_key()


@pytest.mark.parametrize(
    "options",
    [
        {"pdl": "off"},
        {"overlap": "auto"},
        {"chunks": 2},
        {"disable": ["find_moe"]},
        {"remainder": "eager"},
        {"verify": "off"},
        {"numerics": "fast"},
        {"tune": "off"},
        {"dryrun": True},
        {"inductor": {"debug": 1}},
        {"mode": "max-autotune"},
    ],
)
def test_everything_else_is_in_the_cache_key(options):
    assert made(options).cache_key() != made().cache_key()


def test_cache_key_holds_no_address():
    class Pass:
        def uuid(self) -> str:
            return "v1"

    patches = {"post_grad_custom_pre_pass": Pass(), "post_grad_custom_post_pass": test_defaults, "debug": object()}
    text = made({"inductor": patches}).cache_key()
    assert "0x" not in text
    assert '"v1"' in text
    assert "test_defaults" in text
    assert json.loads(text)["inductor"]["debug"] == "builtins.object"


def test_to_dict_round_trips_and_changed_is_what_to_paste():
    given = {"pdl": "off", "disable": ["find_moe"], "chunks": 4, "dump": str(Path("/tmp/d"))}
    options = made(given)
    assert made(options.to_dict()) == options
    assert options.changed() == given
    assert made().changed() == {}


def test_describe_documents_every_key():
    table = {entry["key"]: entry for entry in describe()}
    assert tuple(table) == keys()
    assert table["pdl"]["env"] == "MOEPDL_PDL"
    assert table["chunks"]["allowed"] == '"auto" or an int >= 1'
    assert all(entry["doc"] and entry["allowed"] for entry in table.values())
