"""`moepdl bench block`: measure one MoE block on this device; print a table, write JSON, Markdown and a picture.

    moepdl bench block                                          Qwen3-30B-A3B's block, forward, many numbers of tokens
    moepdl bench block --shape mixtral olmoe --tokens 1 64 4096
    moepdl bench block --shape 64,8,2048,1024,512               sizes: experts, k, hidden, intermediate, shared
    moepdl bench block --direction forward forward_backward --peers mine.py
    moepdl bench block --from out/bench/qwen3.json              table and picture again, of a file from elsewhere

Every way gets the same tokens and weights and is checked against float64 first; what is wrong is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_compiler.bench.results import (
    DIRECTIONS,
    FORWARD,
    FORWARD_BACKWARD,
    GRAPH,
    MODES,
    NOGRAPH,
    Results,
    load,
    markdown,
    table,
    title_of,
)
from moe_compiler.bench.shapes import NAMED, find_shape
from moe_compiler.errors import MoepdlError, UsageError

__all__ = ["main"]

DONE, FAILED, INTERRUPTED = 0, 1, 130

TOKENS = {
    ("cuda", FORWARD): (1, 4, 8, 16, 32, 64, 128, 512, 1024, 2048, 4096, 8192),
    ("cuda", FORWARD_BACKWARD): (2048, 8192),
    ("cpu", FORWARD): (1, 8, 64, 256),
    ("cpu", FORWARD_BACKWARD): (256,),
}
# Inductor is compiled for each number of tokens anew, twice where few: so for at most so many of them, unless asked.
REFERENCES = 5


def main(argv: Sequence[str]) -> int:
    """Run `moepdl bench` with these arguments; 0: done, 1: moepdl was wrong or failed, 130: interrupted.

    Raises UsageError and OptionError for what cannot be meant, MoepdlError for what cannot be done.
    """
    arguments = _parser().parse_args(list(argv))
    if arguments.results is not None:
        return _again(arguments)
    shapes = [find_shape(text) for text in dict.fromkeys(arguments.shape or ["qwen3"])]
    tokens = None if arguments.tokens is None else _tokens(arguments.tokens, "--tokens")
    options = _backend_options(arguments.backend_options)
    device = _device(arguments.device)
    directions = list(dict.fromkeys(arguments.direction))
    modes = _modes(arguments.mode, device)
    cases = [
        (direction, count, modes[direction])
        for direction in directions
        for count in tokens or TOKENS[device, direction]
    ]
    reference = _references(arguments.reference_tokens, [count for _, count, _ in cases])
    from moe_compiler.bench.running import Request, run

    folder = arguments.out or Path("out/bench")
    request = Request(
        shapes=shapes,
        cases=cases,
        reference=reference,
        device=device,
        dtype=arguments.dtype or ("bfloat16" if device == "cuda" else "float32"),
        options=options,
        peers=arguments.peers,
        static=arguments.static or device == "cpu",
        seed=arguments.seed,
        rounds=arguments.rounds,
        measure_floor=arguments.measure_floor,
    )
    found, interrupted = run(request, folder)
    if not arguments.json:
        for results in found:
            _show(results)
    code = _finish(arguments, found, folder)
    return INTERRUPTED if interrupted else code


def _parser() -> argparse.ArgumentParser:
    prose, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="moepdl bench", description="measure parts of a model on this device")
    block = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "block", help=prose, description=prose, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = block.add_argument
    add("--shape", nargs="+", metavar="SHAPE", help=f"{', '.join(NAMED)}, or sizes E,k,H,I[,shared]; default qwen3")
    add(
        "--tokens",
        nargs="+",
        metavar="T",
        help="default: 1 to 8192 forward, 2048 and 8192 with backward; fewer on a CPU",
    )
    add("--direction", nargs="+", choices=DIRECTIONS, default=[FORWARD], help="default forward")
    add(
        "--mode",
        nargs="+",
        choices=MODES,
        help="in one CUDA graph, or call by call with the host's time; default both; nograph with backward, on a CPU",
    )
    add("--peers", nargs="+", type=Path, default=[], metavar="FILE.py", help="files with functions peer_NAME(block)")
    add(
        "--reference-tokens",
        nargs="+",
        metavar="T",
        help=f"where Inductor is compiled too: numbers of --tokens, all, or none; default {REFERENCES} of them",
    )
    add("--backend-options", nargs="+", default=[], metavar="KEY=VALUE", help="options of the backend, e.g. pdl=off")
    add("--static", action="store_true", help="compile moepdl for each number of tokens anew, as on a CPU")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default bfloat16, on a CPU float32")
    add("--seed", type=int, default=0, help="of weights and inputs (default 0)")
    add("--rounds", type=int, default=20, help="timings of each way on a GPU (default 20)")
    add("--measure-floor", action="store_true", help="measure bandwidth and matmul rate even of a known device")
    add(
        "--out", type=Path, help="folder for SHAPE.json, .md and .svg (default out/bench; with --from: beside the file)"
    )
    add(
        "--from",
        dest="results",
        type=Path,
        metavar="RESULTS.json",
        help="measure nothing, write table and picture again",
    )
    add("--no-plot", action="store_true", help="draw no picture")
    add("--json", action="store_true", help="print the results as one JSON value instead of tables")
    return parser


def _tokens(texts: Iterable[str], option: str) -> tuple[int, ...]:
    found = []
    for text in texts:
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(
                f"{option}: {text!r} is no number of tokens",
                why="it is a whole number from 1 on",
                try_=f"{option} 1 64",
            )
        found.append(int(text))
    return tuple(sorted(set(found)))


def _backend_options(texts: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UsageError(f"--backend-options: {text!r} is not KEY=VALUE", try_="--backend-options pdl=off")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _device(wanted: str) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda, but there is no CUDA device", why="torch.cuda.is_available() is False", try_="--device cpu"
        )
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _modes(wanted: Sequence[str] | None, device: str) -> dict[str, tuple[str, ...]]:
    """The modes of each direction."""
    if wanted is not None:
        if device != "cuda" and GRAPH in wanted:
            raise UsageError(
                "--mode graph needs a GPU", why=f"there are no CUDA graphs on a {device}", try_="--mode nograph"
            )
        chosen = tuple(mode for mode in MODES if mode in wanted)
        return dict.fromkeys(DIRECTIONS, chosen)
    return {FORWARD: MODES if device == "cuda" else (NOGRAPH,), FORWARD_BACKWARD: (NOGRAPH,)}


def _references(wanted: Sequence[str] | None, tokens: Sequence[int]) -> frozenset[int]:
    """The numbers of tokens at which Inductor is compiled."""
    tokens = sorted(set(tokens))
    if wanted == ["none"]:
        return frozenset()
    if wanted == ["all"] or (wanted is None and len(tokens) <= REFERENCES):
        return frozenset(tokens)
    if wanted is None:  # spread evenly, first and last among them
        return frozenset(tokens[round(i * (len(tokens) - 1) / (REFERENCES - 1))] for i in range(REFERENCES))
    found = _tokens(wanted, "--reference-tokens")
    strange = [count for count in found if count not in tokens]
    if strange:
        raise UsageError(
            f"--reference-tokens: {strange[0]} is not measured",
            why=f"the numbers of tokens are {', '.join(map(str, tokens))}",
            try_=f"--tokens with {strange[0]} among them",
        )
    return frozenset(found)


def _again(arguments: argparse.Namespace) -> int:
    """`--from`: Markdown and picture of results that are there."""
    results = load(arguments.results)
    folder = arguments.out or arguments.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{arguments.results.stem}.md").write_text(markdown(results), encoding="utf-8")
    if not arguments.json:
        _show(results)
    return _finish(arguments, [results], folder, [arguments.results.stem])


def _show(results: Results) -> None:
    print(title_of(results))
    for direction in dict.fromkeys(row["direction"] for row in results.rows):
        print(f"\n{direction}, us\n{table([row for row in results.rows if row['direction'] == direction])}")
    for row in results.rows:
        for way, text in row["problems"].items():
            print(f"{row['direction']} T={row['tokens']} {row['mode']}: {way}: {text}")
    print()


def _finish(
    arguments: argparse.Namespace, found: Sequence[Results], folder: Path, names: Sequence[str] | None = None
) -> int:
    """Pictures, the JSON for --json, the list of files; the exit code."""
    names = names or [results.file_name for results in found]
    if not arguments.no_plot:
        from moe_compiler.bench.plot import draw

        for results, name in zip(found, names, strict=True):
            if not results.rows:
                continue
            try:
                draw(results, folder / f"{name}.svg")
            except MoepdlError as error:  # the numbers are there all the same
                print(f"moepdl: {error}", file=sys.stderr)
                break
    if arguments.json:
        print(json.dumps([results.to_dict() for results in found], indent=1, allow_nan=False))
    else:
        for name in names:
            files = [
                path.name for path in (folder / f"{name}{end}" for end in (".json", ".md", ".svg")) if path.exists()
            ]
            print(f"{folder}: {', '.join(files)}")
    wrong = any(
        way == "moepdl" and not text.startswith("out of memory")
        for results in found
        for row in results.rows
        for way, text in ((title.split(" ")[0].rstrip(","), text) for title, text in row["problems"].items())
    )
    return FAILED if wrong else DONE
