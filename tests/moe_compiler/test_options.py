"""Options: where a value comes from, what is refused and with which words, and what is part of the cache key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_compiler.errors import OptionError
from moe_compiler.options import Options, describe, keys, resolve

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
        "overlap": "auto",
        "chunks": "auto",
        "disable": [],
        "require_match": False,
        "remainder": "inductor",
        "verify": "structural",
        "numerics": "strict",
        "tune": "cached",
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
            'allowed: "auto", "on", "off"',
            'overlap="off"',
        ),
        ({"chunks": 0}, 'options["chunks"]=0 is not allowed', 'allowed: "auto" or an int >= 1', "leave chunks out"),
        (
            {"chunks": True},
            'options["chunks"]=True is not allowed',
            'allowed: "auto" or an int >= 1',
            "leave chunks out",
        ),
        ({"dryrun": 1}, 'options["dryrun"]=1 is not allowed', "allowed: True or False", "leave dryrun out"),
        ({"require_match": -1}, 'options["require_match"]=-1', "allowed: False, True or an int >= 0", "leave require"),
        (
            {"disable": "find_moe"},
            'options["disable"]="find_moe"',
            "a list of pass or formulation names",
            "leave disable",
        ),
        ({"inductor": []}, 'options["inductor"]=[] is not allowed', "a dict", "leave inductor out"),
        ({"dump": 3}, 'options["dump"]=3 is not allowed', "a path or None", "leave dump out"),
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
    one = made({"disable": ["find_moe", "chain_pdl"], "inductor": {"b": 1, "a": 2}})
    two = made({"inductor": {"a": 2, "b": 1}, "disable": ["chain_pdl", "find_moe"]})
    assert one.cache_key() == two.cache_key()


@pytest.mark.parametrize("options", [{"dump": "/tmp/x"}, {"require_match": 3}, {"on_error": "fallback"}])
def test_what_changes_no_code_is_not_in_the_cache_key(options):
    assert made(options).cache_key() == made().cache_key()


@pytest.mark.parametrize(
    "options",
    [
        {"pdl": "off"},
        {"overlap": "off"},
        {"chunks": 2},
        {"disable": ["find_moe"]},
        {"remainder": "eager"},
        {"verify": "off"},
        {"numerics": "fast"},
        {"tune": "off"},
        {"dryrun": True},
        {"inductor": {"x": 1}},
        {"mode": "max-autotune"},
    ],
)
def test_everything_else_is_in_the_cache_key(options):
    assert made(options).cache_key() != made().cache_key()


def test_cache_key_holds_no_address():
    class Pass:
        def uuid(self) -> str:
            return "v1"

    text = made({"inductor": {"hook": Pass(), "function": test_defaults, "plain": object()}}).cache_key()
    assert "0x" not in text
    assert '"v1"' in text
    assert "test_defaults" in text
    assert json.loads(text)["inductor"]["plain"] == "builtins.object"


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
