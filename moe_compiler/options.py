"""The options of the backend: one frozen dataclass that is the schema, the documentation and the parser's table.

A value comes from its default, from `torch.compile(..., options={...})` or from the environment variable
`MOEPDL_<KEY>`, which wins as `TORCH_LOGS` does; `Options.origins` says which. Nothing is guessed: an unknown key or
name is an error that lists those there are, and suggests one when it is nearly spelled so; a bad value is an error that
lists what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_compiler.errors import OptionError, near_name

PREFIX = "MOEPDL_"
# Variables of the prefix that other parts read: the command line, the Makefile.
NOT_OPTIONS = ("MOEPDL_CACHE_DIR", "MOEPDL_VERBOSE", "MOEPDL_VENV")
TRUE_TEXTS = ("1", "true", "on", "yes")
FALSE_TEXTS = ("0", "false", "off", "no")
# Valid values to suggest where the user's resembles none.
_EXAMPLES: dict[str, Any] = {
    "require_match": True,
    "dump": "out",
    "inductor": {"max_autotune": True},
    "tiles": "tiles.json",
}


def _told(doc: str, allowed: str, *, choices: tuple[Any, ...] = (), in_key: bool = True) -> dict[str, Any]:
    """Metadata of a field: `allowed` is shown to users, `choices` is the finite set, `in_key` says it changes code."""
    return {"doc": doc, "allowed": allowed, "choices": choices, "in_key": in_key}


def _option(default: Any, doc: str, allowed: str, *, choices: tuple[Any, ...] = (), in_key: bool = True) -> Any:
    """A field with an immutable default."""
    return field(default=default, metadata=_told(doc, allowed, choices=choices, in_key=in_key))


def _words(default: str, doc: str, *others: str, in_key: bool = True) -> Any:
    """A field whose value is one word of a finite set."""
    choices = (default, *others)
    return _option(default, doc, ", ".join(json.dumps(choice) for choice in choices), choices=choices, in_key=in_key)


@dataclass(frozen=True)
class Options:
    """Everything a user can set; each field is one key of `options={...}` and one variable `MOEPDL_<KEY>`."""

    pdl: str = _words(
        "auto",
        'launch producer and consumer kernels programmatically; "on" is an error where that is impossible',
        "on",
        "off",
    )
    overlap: str = _words(
        "auto",
        "overlap all-to-all exchanges with compute, and chains with what is independent of them, on a second stream; "
        '"on" wherever it is right, "auto" where it is predicted to gain, in CUDA graphs',
        "on",
        "off",
    )
    chunks: str | int = _option(
        "auto", "number of token chunks of an overlapped exchange", '"auto" or an int >= 1', choices=("auto",)
    )
    capacity: int = _option(
        0,
        "the most tokens that a rank of an expert-parallel group ever has; 0: agreed between the ranks when a block is "
        "compiled first",
        "an int >= 0",
    )
    timeout_s: int | float = _option(
        30, "seconds that a rank of an expert-parallel group waits for the others before it is an error", "a number > 0"
    )
    disable: tuple[str, ...] = _option(
        (), "passes and formulations to leave out, by exact name", "a list of pass or formulation names"
    )
    require_match: bool | int = _option(
        False,
        "fail when fewer blocks matched than this (True: at least one)",
        "False, True or an int >= 0",
        in_key=False,
    )
    remainder: str = _words(
        "inductor", 'what compiles the rest of the graph; "eager" runs it as it is, for tests and debugging', "eager"
    )
    verify: str = _words(
        "structural",
        'checks between passes; "numeric" also compares values before and after each pass',
        "numeric",
        "off",
    )
    numerics: str = _words(
        "strict",
        '"strict" never adds a rounding that the source does not have; "fast" may, and the report says where',
        "fast",
    )
    memory: str = _words(
        "normal",
        '"low": a forward chain whose temporary memory would pass 512 MiB runs over chunks of the tokens; the report '
        "says which chains do, and why others do not",
        "low",
    )
    tune: str = _words(
        "cached",
        'tiles of kernels and gains of programmatic edges: "cached" takes what was measured on this device and never '
        'measures, "full" measures what is missing, "off" goes by shipped tables and predictions alone',
        "full",
        "off",
    )
    tune_budget_s: int | float = _option(
        60, 'seconds that tune="full" may search for the tiles of one block', "a number > 0", in_key=False
    )
    tiles: dict[str, Any] = field(
        default_factory=dict,
        metadata=_told(
            "tiles of kernels, by block, as `moepdl tune` prints them; they count before tuned ones",
            "a dict, or the path of a file that `moepdl tune` wrote (in the environment: a path or JSON)",
        ),
    )
    dryrun: bool = _option(
        False,
        "analyse and report, and leave the graph to the remainder unchanged",
        "True or False",
        choices=(False, True),
    )
    on_error: str = _words(
        "raise",
        'on an internal error; "fallback" warns once and compiles the unchanged graph',
        "fallback",
    )
    dump: str | None = _option(
        None, "folder for the graphs, the schedule and the report of each compilation", "a path or None", in_key=False
    )
    inductor: dict[str, Any] = field(
        default_factory=dict,
        metadata=_told("config patches that are handed to Inductor", "a dict (in the environment: JSON)"),
    )
    mode: str | None = _option(
        None, "what torch.compile(mode=) means to Inductor", "a name of torch._inductor.list_mode_options() or None"
    )

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, metadata={"option": False})

    def source_of(self, key: str) -> str:
        """How the user wrote the key: the variable `MOEPDL_<KEY>`, or `options["<key>"]`."""
        return PREFIX + key.upper() if self.origins.get(key) == "environment" else f'options["{key}"]'

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values, without the origins: `resolve(options.to_dict(), ...)` gives an equal object."""
        values = {key: getattr(self, key) for key in keys()}
        values["disable"] = list(self.disable)
        values["inductor"] = dict(self.inductor)
        values["tiles"] = _plain_tiles(self.tiles)
        return values

    def cache_key(self) -> str:
        """Stable text of every option that can change generated code; a part of the key of compiled results."""
        values = {key: _stable(getattr(self, key)) for key, spec in _specs().items() if spec.metadata["in_key"]}
        values["disable"] = sorted(self.disable)
        values["tiles"] = _plain_tiles(self.tiles)
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    def changed(self) -> dict[str, Any]:
        """The values that differ from their defaults: what one pastes into `options={...}` to get the same
        compilation.
        """
        defaults = Options().to_dict()
        return {key: value for key, value in self.to_dict().items() if value != defaults[key]}


def _plain_tiles(tiles: Mapping[str, Any]) -> dict[str, Any]:
    """Tiles as texts. Without any, which is usual, nothing is imported: what reads tiles imports torch."""
    if not tiles:
        return {}
    from moe_compiler.tuning.tuned_tiles import plain

    return plain(tiles)


def _specs() -> dict[str, dataclasses.Field[Any]]:
    return {spec.name: spec for spec in dataclasses.fields(Options) if spec.metadata.get("option", True)}


def keys() -> tuple[str, ...]:
    """All option keys, in the order of the documentation."""
    return tuple(_specs())


def describe() -> list[dict[str, Any]]:
    """One dict a key: `key`, `env`, `default`, `allowed`, `doc`. The command line and the documentation print this."""
    defaults = Options().to_dict()
    return [
        {
            "key": key,
            "env": PREFIX + key.upper(),
            "default": defaults[key],
            "allowed": spec.metadata["allowed"],
            "doc": spec.metadata["doc"],
        }
        for key, spec in _specs().items()
    ]


def resolve(
    options: Mapping[str, Any] | None,
    *,
    mode: str | None = None,
    environ: Mapping[str, str] = os.environ,
    known_names: Collection[str],
) -> Options:
    """The options of one compilation: defaults, then the arguments of `torch.compile`, then the environment.

    options:     what `torch.compile(options=)` was given
    mode:        what `torch.compile(mode=)` was given
    environ:     where `MOEPDL_<KEY>` is looked up; empty text counts as unset
    known_names: pass and formulation names that `disable` may hold
    Raises OptionError.
    """
    specs = _specs()
    given = dict(options or {})
    for key in given:
        if key not in specs:
            raise _unknown(f"options has no key {key!r}", str(key), specs, "the keys are")
    if mode is not None:
        if given.get("mode") is not None:
            raise OptionError(
                f'mode={mode!r} and options["mode"]={given["mode"]!r} are both given',
                why="they mean the same thing",
                try_='keep options={"mode": ...} only; torch.compile takes mode= or options=, not both',
            )
        given["mode"] = mode

    values: dict[str, Any] = {}
    origins = dict.fromkeys(specs, "default")
    for key, value in given.items():
        values[key] = _check(key, value, f"options[{key!r}]".replace("'", '"'), known_names)
        origins[key] = "argument"
    for variable, text in environ.items():
        key = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or not text.strip():
            continue
        if key in specs:
            values[key] = _check(key, _PARSERS.get(key, str.strip)(text), variable, known_names)
            origins[key] = "environment"
        elif difflib.get_close_matches(key, specs, n=1, cutoff=0.75):
            # Other variables of this prefix are not ours to judge; one that is nearly a key is a slip of the pen.
            raise _unknown(f"{variable} is set, and there is no option {key!r}", key, specs, "the keys are")
    return Options(**values, origins=origins)


def _unknown(what: str, name: str, known: Collection[str], introduction: str) -> OptionError:
    return OptionError(
        what, why=f"{introduction} {', '.join(known)}", try_=near_name(name, known) or "one of these names"
    )


def not_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables `MOEPDL_*` that set no option, each with what its name may have meant, or ""."""
    found = {}
    for name in sorted(environ):
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key not in _specs() and name not in NOT_OPTIONS:
            nearest = near_name(key, _specs())
            found[name] = PREFIX + nearest.upper() if nearest else ""
    return found


def _bad(key: str, value: Any, source: str, why: str = "") -> OptionError:
    spec = _specs()[key]
    why = why or f"allowed: {spec.metadata['allowed']}"
    words = {str(choice): choice for choice in spec.metadata["choices"]}
    if isinstance(value, bool) and {"on", "off"} <= words.keys():
        nearest = "on" if value else "off"
    else:
        nearest = next(iter(difflib.get_close_matches(str(value).lower(), words, n=1, cutoff=0.5)), "")
    if key == "disable" and isinstance(value, str):
        valid: Any = _parse_names(value)
    elif key == "dryrun" and isinstance(value, (int, float)):
        valid = bool(value)
    elif nearest:
        valid = words[nearest]
    else:
        valid = _EXAMPLES.get(key, Options().to_dict()[key])
    suggestion = f"{key}={valid!r}".replace("'", '"')
    return OptionError(f"{source}={value!r} is not allowed".replace("'", '"'), why=why, try_=suggestion)


def _check(key: str, value: Any, source: str, known_names: Collection[str]) -> Any:
    """The value in its canonical type, or OptionError; `source` is how the user wrote the key."""
    check = _CHECKS.get(key)
    if check is not None:
        return check(key, value, source, known_names)
    choices = _specs()[key].metadata["choices"]
    # `in` alone would take 0 for False and 1 for True.
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise _bad(key, value, source)
    return value


def _check_chunks(key: str, value: Any, source: str, _: Collection[str]) -> str | int:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise _bad(key, value, source)


def _check_capacity(key: str, value: Any, source: str, _: Collection[str]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _bad(key, value, source)


def _check_require_match(key: str, value: Any, source: str, _: Collection[str]) -> bool | int:
    if isinstance(value, int) and value >= 0:
        return value
    raise _bad(key, value, source)


def _check_disable(key: str, value: Any, source: str, known_names: Collection[str]) -> tuple[str, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, (list, tuple, set, frozenset))
        or not all(isinstance(name, str) for name in value)
    ):
        raise _bad(key, value, source)
    names = sorted(value) if isinstance(value, (set, frozenset)) else list(dict.fromkeys(value))
    for name in names:
        if name not in known_names:
            raise _unknown(
                f"{source}: there is no pass or formulation {name!r}", name, sorted(known_names), "the names are"
            )
    return tuple(names)


def _check_seconds(key: str, value: Any, source: str, _: Collection[str]) -> int | float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise _bad(key, value, source)


def _check_tiles(key: str, value: Any, source: str, _: Collection[str]) -> dict[str, Any]:
    """The blocks of a dict, or of a file that has a table of them; what a file says now is what counts."""
    if value == {}:
        return {}
    from moe_compiler.tuning.tile_table import read_tiles
    from moe_compiler.tuning.tuned_tiles import blocks_of

    try:
        if isinstance(value, (str, Path)) and str(value):
            return read_tiles(Path(os.path.expanduser(str(value))))
        return blocks_of(value)
    except OSError as error:
        raise OptionError(
            f"{source}: {value} cannot be read",
            why=str(error.strerror or error),
            try_="the path of a file that `moepdl tune --out FILE` wrote",
        ) from error
    except ValueError as error:
        raise OptionError(
            f"{source} is not allowed", why=str(error), try_="what `moepdl tune` prints, or the path of its file"
        ) from error


def _check_dump(key: str, value: Any, source: str, _: Collection[str]) -> str | None:
    if value is None or (isinstance(value, (str, Path)) and str(value)):
        return None if value is None else os.path.expanduser(str(value))
    raise _bad(key, value, source)


def _check_inductor(key: str, value: Any, source: str, _: Collection[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _bad(key, value, source)
    if value:
        from torch._inductor import list_options

        known = list_options()
        for name in value:
            if name not in known:
                # A name without its group (`cudagraphs` for `triton.cudagraphs`) is nearer than any spelling.
                grouped = [option for option in known if option.rpartition(".")[2] == name]
                raise OptionError(
                    f"{source}: Inductor has no option {name!r}",
                    why="the names are those of torch._inductor.list_options(), groups with a dot: triton.cudagraphs",
                    try_=next(iter(grouped), "") or near_name(name, known) or "print(torch._inductor.list_options())",
                )
    return dict(value)


def _check_mode(key: str, value: Any, source: str, _: Collection[str]) -> str | None:
    if value is None:
        return None
    from torch._inductor import list_mode_options

    modes = tuple(list_mode_options())
    if value not in modes:
        raise OptionError(
            f"{source}={value!r} is not allowed".replace("'", '"'),
            why=f"allowed: {', '.join(modes)}",
            try_=near_name(str(value), modes) or "one of these names",
        )
    return value


_CHECKS: dict[str, Callable[[str, Any, str, Collection[str]], Any]] = {
    "chunks": _check_chunks,
    "require_match": _check_require_match,
    "tune_budget_s": _check_seconds,
    "capacity": _check_capacity,
    "timeout_s": _check_seconds,
    "tiles": _check_tiles,
    "disable": _check_disable,
    "dump": _check_dump,
    "inductor": _check_inductor,
    "mode": _check_mode,
}


def _parse_number(text: str) -> str | int:
    """An int where the text is one, else the text: the check then says what is allowed."""
    text = text.strip()
    return int(text) if text.removeprefix("-").isdecimal() else text


def _parse_flag(text: str) -> str | bool:
    word = text.strip().lower()
    return True if word in TRUE_TEXTS else False if word in FALSE_TEXTS else text.strip()


def _parse_require_match(text: str) -> str | bool | int:
    number = _parse_number(text)
    return number if isinstance(number, int) else _parse_flag(text)


def _parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad(
            "inductor", text, PREFIX + "INDUCTOR", why=f"not JSON: {error.msg} at column {error.colno}"
        ) from None


def _parse_seconds(text: str) -> str | int | float:
    """A number where the text is one, else the text: the check then says what is allowed."""
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _parse_tiles(text: str) -> Any:
    if not text.strip().startswith("{"):
        return text.strip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad("tiles", text, PREFIX + "TILES", why=f"not JSON: {error.msg} at column {error.colno}") from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "tune_budget_s": _parse_seconds,
    "capacity": _parse_number,
    "timeout_s": _parse_seconds,
    "tiles": _parse_tiles,
    "chunks": _parse_number,
    "require_match": _parse_require_match,
    "disable": _parse_names,
    "dryrun": _parse_flag,
    "inductor": _parse_json,
}


def _stable(value: Any) -> Any:
    """JSON-ready and equal in every process: an address in a `repr` would make each run miss the cache."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _stable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_stable(item), sort_keys=True) for item in value)
    uuid = getattr(value, "uuid", None)
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    return [name, _stable(uuid())] if callable(uuid) else name
