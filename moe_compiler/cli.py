"""The command line, `moepdl` or `python -m moe_compiler`: ask the compiler what it did, would do, or can do.

    moepdl demo                                 compile small models and show what happened
    moepdl bench block                          measure one MoE block: floor, moepdl, eager, Inductor, peers
    moepdl plan --ranks 8                       how an expert-parallel block would run over many ranks, simulated
    moepdl explain module:factory               what compiling a model would do; factory() gives (model, args[, kwargs])
    moepdl passes                               the passes in their order
    moepdl opt GRAPH.py --passes a,b [--out F]  run passes on a graph of a dump
    moepdl report DUMP -o report.html           a dump as .html, .json, .txt, .dot or .mmd
    moepdl diff DUMP [pass]                     what each pass changed
    moepdl calibrate                            measure this GPU, so that predicted times are its own (a minute)
    moepdl tune --shape qwen3                   find the fastest tiles of this GPU for a block, and keep them
    moepdl env                                  versions, device, and whether kernels can be chained programmatically

Every command takes `--json`. Exit codes: 0 done, 1 failed, 2 called wrongly. An error says what, why and what to try;
`MOEPDL_VERBOSE=1` adds the stack. Torch is imported only by the commands that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_compiler.errors import MoepdlError, OptionError, UsageError, near_name

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from moe_compiler.graph_pass import GraphPass
    from moe_compiler.report import Report

__all__ = ["main"]

DONE, FAILED, MISUSED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` are the arguments after the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = {"demo": _demo, "bench": _bench, "plan": _plan}.get(arguments[0]) if arguments else None
    if own is not None:  # has a command line of its own
        return _guarded(lambda: own(arguments[1:]), as_json="--json" in arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return MISUSED
    return _guarded(lambda: options.run(options), as_json=options.json)


def _guarded(run: Callable[[], int], *, as_json: bool) -> int:
    """Errors of ours as text (or JSON) on stderr; a closed pipe and an interrupt end quietly."""
    try:
        return run()
    except BrokenPipeError:
        # The reader (`| head`) has left. Point stdout elsewhere, or the interpreter complains while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return 130
    except Exception as raised:
        if os.environ.get("MOEPDL_VERBOSE", "") not in ("", "0"):
            traceback.print_exc()
        error = _ours(raised) or MoepdlError(
            f"{type(raised).__name__}: {raised}",
            why="not an error of moepdl's own",
            try_="MOEPDL_VERBOSE=1 for the stack",
        )
        if as_json:
            print(json.dumps(error.to_dict(), sort_keys=True), file=sys.stderr)
        else:
            print(f"moepdl: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, (UsageError, OptionError)) else FAILED


def _ours(error: BaseException | None) -> MoepdlError | None:
    """The MoepdlError in an exception's chain: Dynamo wraps what a backend raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MoepdlError):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _parser() -> argparse.ArgumentParser:
    prose, _, commands = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="moepdl", description=prose, epilog=commands, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=None, json=False)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=help, description=help, parents=[common])
        sub.set_defaults(run=run)
        return sub

    subparsers.add_parser("demo", help="compile small models and show what happened (moepdl demo --help)")
    subparsers.add_parser("bench", help="measure one MoE block on this device (moepdl bench block --help)")
    subparsers.add_parser("plan", help="how an expert-parallel block would run over many ranks (moepdl plan --help)")
    explain = command("explain", _explain, "what compiling a model would do, by a dry run of the backend")
    explain.add_argument("factory", metavar="MODULE:FACTORY", help="a function that returns (model, args[, kwargs])")
    explain.add_argument("-o", "--out", type=Path, help="also save the report here, as the suffix says")
    explain.add_argument("--options", default="{}", metavar="JSON", help="what options={...} would be")
    explain.add_argument(
        "--measure",
        action="store_true",
        help="find the tiles of this GPU and what each programmatic edge gains on it, and keep them",
    )
    command("passes", _passes, "the passes in the order they run, with level, numerics and first line of text")
    opt = command("opt", _opt, "run passes on a graph file of a dump and print the graph they leave")
    opt.add_argument("graph", type=Path, metavar="GRAPH.py")
    opt.add_argument("--passes", required=True, metavar="A,B", help="names of passes, in the order to run them")
    opt.add_argument("--out", type=Path, metavar="FILE", help="write the resulting graph file here")
    report = command("report", _report, "a report out of a dump folder")
    report.add_argument("dump", type=Path, metavar="DUMP", help="the folder of options['dump'], or a frame in it")
    report.add_argument("-o", "--out", type=Path, help="file to write; without it the report is printed")
    report.add_argument("--frame", help="which frame, e.g. 0_0; by default all of them in one report")
    diff = command("diff", _diff, "what each pass changed in the graphs of a dump, as unified diffs")
    diff.add_argument("dump", type=Path, metavar="DUMP", help="the folder of options['dump'], or a frame in it")
    diff.add_argument("name", nargs="?", metavar="PASS", help="only this pass")
    calibrate = command("calibrate", _calibrate, "measure this GPU, so that predicted times are its own (a minute)")
    calibrate.add_argument("--workers", type=int, help="processes that compile kernels; by default one a core")
    calibrate.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table here, not where it is used")
    tune = command("tune", _tune, "find the fastest tiles of this GPU for a block of given sizes, and keep them")
    tune.add_argument(
        "--shape",
        required=True,
        metavar="SHAPE",
        help="a shape of `moepdl bench block`, or its sizes as E,k,H,I: 128,8,2048,768",
    )
    tune.add_argument(
        "--tokens", type=int, nargs="+", metavar="T", help="numbers of tokens; by default 1 4 16 64 256 1024 4096"
    )
    tune.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="time to search; by default 60")
    tune.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of weights and tokens")
    tune.add_argument("--train", action="store_true", help="also the forward that saves, and the backward")
    tune.add_argument("--workers", type=int, help="processes that compile kernels; by default one a core, at most 16")
    tune.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the table here, not where it is used")
    command("env", _env, "versions, device, options set in the environment, and whether PDL is possible here")
    return parser


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))


def _demo(arguments: Sequence[str]) -> int:
    from moe_compiler import demo

    return int(demo.main(list(arguments)) or DONE)


def _bench(arguments: Sequence[str]) -> int:
    from moe_compiler.bench import command

    return command.main(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from moe_compiler.exchange_plan import command

    return command.main(arguments)


def _explain(options: argparse.Namespace) -> int:
    factory = _find_factory(options.factory)
    settings = _parse_options(options.options)
    if options.measure:
        if settings.get("tune", "full") != "full":
            raise UsageError(f'--measure means tune="full", and --options says {settings["tune"]!r}')
        settings["tune"] = "full"
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(
            f"{options.factory} returned {type(made).__name__}, not (model, args) or (model, args, kwargs)",
            try_="return model, (input_ids,)",
        )
    model, args, *rest = made
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    from moe_compiler.backend import explain

    # What the model prints belongs beside the report, not in the middle of its JSON.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        report = explain(model, *args, options=settings, **(rest[0] if rest else {}))
    if options.out is not None:
        report.save(options.out)
    _show(report, options.json)
    if not options.json and report.schedule:
        from moe_compiler.viz.timeline import schedule_text

        times = f"times predicted for {report.predictions}" if report.predictions else ""
        measured = f"gains {report.measured}" if report.measured else ""
        tiles = f"tiles {report.tiles}" if report.tiles else ""
        source = "".join(f", {text}" for text in (times, measured, tiles) if text)
        print(f"\nlaunches by chain: start and duration{source}\n{schedule_text(report)}")
        for dag in report.dags:
            for branch in dag.folded_branches():
                print(f"{dag.direction} {branch}")
    return DONE


def _find_factory(text: str) -> Callable[[], Any]:
    module_name, separator, attribute = text.partition(":")
    if not separator or not module_name or not attribute:
        raise UsageError(f"{text!r} is not MODULE:FACTORY", try_="e.g. mymodels.mixtral:tiny")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script, unlike `python -m`, does not look here
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise UsageError(
            f"there is no module {module_name!r}",
            why="modules are looked for in the current folder and where Python looks",
            try_="run the command where the module lies, or set PYTHONPATH",
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = near_name(name, dir(found))
            raise UsageError(
                f"module {module_name!r} has no {attribute!r}", try_=near or "the name of a function in that module"
            )
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{text} is a {type(found).__name__}, not a function", try_="a function without arguments")
    return found


def _parse_options(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"--options is not JSON: {error.msg} at column {error.colno}", try_='\'{"pdl": "off"}\''
        ) from None
    if not isinstance(value, dict):
        raise UsageError("--options is not a JSON object", try_='\'{"pdl": "off"}\'')
    return value


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        _print_json(report.to_dict())
    else:
        print(report)


def _passes(options: argparse.Namespace) -> int:
    from moe_compiler.pipeline import PIPELINE

    rows: list[dict[str, Any]] = [
        {
            "order": order,
            "phase": "before autograd" if phase == "capture" else "forward and backward",
            "name": graph_pass.name,
            "level": graph_pass.level.name.lower(),
            "numerics": graph_pass.numerics,
            "summary": graph_pass.summary,
        }
        for order, (phase, graph_pass) in enumerate(PIPELINE)
    ]
    if options.json:
        _print_json(rows)
        return DONE
    width = max(len(row["name"]) for row in rows)
    phase = ""
    for row in rows:
        if row["phase"] != phase:
            phase = row["phase"]
            print(f"{phase}:")
        print(
            f"  {row['order']} {row['name']:<{width}}  leaves {row['level']:<9} {row['numerics']:<9} {row['summary']}"
        )
    return DONE


def _opt(options: argparse.Namespace) -> int:
    from moe_compiler.graph_file import load_graph
    from moe_compiler.graph_pass import Context
    from moe_compiler.graph_text import render_graph
    from moe_compiler.options import resolve
    from moe_compiler.pipeline import known_names, run_passes
    from moe_compiler.report import Report

    chosen = _named_passes([name.strip() for name in options.passes.split(",") if name.strip()])
    phase = chosen[0][0]
    module = load_graph(options.graph)
    settings = resolve(None, known_names=known_names())
    report = Report(
        frame=options.graph.stem, status="unchanged", options=settings.to_dict(), origins=dict(settings.origins)
    )
    phase = phase if phase == "capture" else "backward" if "_backward_" in options.graph.name else "forward"
    context = Context(settings, phase, report)
    at = _level_of(module)
    rewrites = run_passes(module, tuple(graph_pass for _, graph_pass in chosen), context)
    report.status = "rewritten" if rewrites else "unchanged"
    names = ", ".join(graph_pass.name for _, graph_pass in chosen)
    text = render_graph(module, f"{options.graph.name} after {names}", f"from {options.graph.name}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        code = None if options.out is not None else text
        _print_json({"rewrites": rewrites, "report": report.to_dict(), "graph": code})
    if not rewrites:
        for _, graph_pass in chosen:
            needed = _level_before(graph_pass.name)
            if needed != at:
                print(
                    f"nothing was rewritten: {options.graph.name} is at level {at}, and {graph_pass.name} works on a "
                    f"graph of level {needed}",
                    file=sys.stderr,
                )
                break
    if options.json:
        return DONE
    from moe_compiler.dump import passes_text

    print(passes_text(report.passes, times=True), end="", file=sys.stderr)
    for miss in report.misses:
        print(f"missed {miss.candidate}: {miss.reason}", file=sys.stderr)
    if options.out is None:
        print(text, end="")
    return DONE


def _level_of(module: GraphModule) -> str:
    """The first level that has all of our operators in this graph, in lower case."""
    from moe_compiler.moe_ir import Level, vocabulary_errors

    return next((level.name.lower() for level in Level if not vocabulary_errors(module.graph, level)), "mixed")


def _level_before(name: str) -> str:
    """The level of the graphs that a pass works on: the one that the pass before it leaves."""
    from moe_compiler.pipeline import PIPELINE

    names = [graph_pass.name for _, graph_pass in PIPELINE]
    level = PIPELINE[max(names.index(name) - 1, 0)][1].level
    return level.name.lower()


def _named_passes(names: Sequence[str]) -> list[tuple[str, GraphPass]]:
    """(phase, pass) of each name; all of one phase."""
    from moe_compiler.pipeline import PIPELINE

    known = {graph_pass.name: (phase, graph_pass) for phase, graph_pass in PIPELINE}
    if not names:
        raise UsageError("--passes is empty", why=f"the passes are {', '.join(known)}", try_="--passes canonicalize")
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no pass {name!r}",
                why=f"the passes are {', '.join(known)}",
                try_=near_name(name, known) or "one of these names",
            )
    chosen = [known[name] for name in names]
    if len({phase for phase, _ in chosen}) > 1:
        raise UsageError(
            f"{', '.join(names)} do not run on one graph",
            why="some run before autograd, on the captured graph, the others on the forward and the backward graph",
            try_="one call for each: moepdl passes shows which run where",
        )
    return chosen


def _report(options: argparse.Namespace) -> int:
    from moe_compiler.dump import load_report
    from moe_compiler.report import Report

    report = Report.merge([load_report(frame) for frame in _frames(options.dump, options.frame)])
    if options.out is None:
        _show(report, options.json)
        return DONE
    path = report.save(options.out)
    if options.json:
        _print_json({"path": str(path), "summary": report.summary()})
    else:
        print(path)
    return DONE


def _frames(dump: Path, wanted: str | None) -> list[Path]:
    from moe_compiler.dump import find_frames

    frames = find_frames(dump)
    if wanted is None:
        return frames
    chosen = [frame for frame in frames if frame.name == wanted.replace("/", "_")]
    if not chosen:
        names = [frame.name for frame in frames]
        raise UsageError(
            f"{dump} has no frame {wanted!r}",
            why=f"it has {', '.join(names)}",
            try_=near_name(wanted, names) or "one of these names",
        )
    return chosen


def _diff(options: argparse.Namespace) -> int:
    from moe_compiler.dump import find_frames, pass_diffs

    found = []
    frames = find_frames(options.dump)
    for frame in frames:
        for file, text in pass_diffs(frame, options.name):
            found.append({"frame": f"{frame.parent.name}/{frame.name}", "file": file, "diff": text})
    if options.json:
        _print_json(found)
        return DONE
    for entry in found:
        if len(frames) > 1:
            print(f"# {entry['frame']}")
        print(entry["diff"], end="")
    return DONE


def _calibrate(options: argparse.Namespace) -> int:
    from moe_compiler.calibrate import calibrate

    try:
        model, path = calibrate(
            workers=options.workers, path=options.out, say=lambda text: print(f"moepdl: {text}", file=sys.stderr)
        )
    except RuntimeError as error:
        raise MoepdlError(
            f"nothing was calibrated: {error}",
            why="predicted times are measured on the GPU that they are for",
            try_="run it where torch.cuda.is_available(); without a calibration the shipped tables are used",
        ) from error
    if options.json:
        _print_json({"path": str(path), "device": model.device, "kernels": sorted(model.kernels)})
    else:
        print(path)
    return DONE


def _tune(options: argparse.Namespace) -> int:
    import torch

    from moe_compiler.progress import Progress
    from moe_compiler.tuning.command import record, report_lines, sizes_of, tune_shape
    from moe_compiler.tuning.compile_pool import CompilePool
    from moe_compiler.tuning.tile_table import table_path
    from moe_compiler.tuning.tune_block import LADDER

    tokens = sorted(set(options.tokens or LADDER))
    if tokens[0] < 1 or not options.budget > 0:
        raise UsageError(
            "--tokens are numbers from 1 on, and --budget is a time", try_="--tokens 1 64 4096 --budget 60"
        )
    sizes = sizes_of(options.shape, getattr(torch, options.dtype))
    try:
        with Progress("tune") as progress, CompilePool(options.workers) as pool:
            found = tune_shape(
                sizes,
                tokens,
                budget_s=options.budget,
                pool=pool,
                train=options.train,
                out=options.out,
                say=progress.step,
            )
    except torch.OutOfMemoryError as error:
        raise MoepdlError(
            "nothing was tuned: the block does not fit into the device's free memory",
            why=str(error).splitlines()[0],
            try_="fewer tokens: --tokens 1 64 1024",
        ) from error
    except RuntimeError as error:
        if isinstance(error, MoepdlError):
            raise
        raise MoepdlError(
            f"nothing was tuned: {error}",
            why="tiles are timed on the GPU that they are for",
            try_="run it where torch.cuda.is_available(); without it the shipped tiles are used",
        ) from error
    path = options.out or table_path(torch.cuda.get_device_name())
    if options.json:
        _print_json({"path": str(path), "blocks": [record(tuning) for tuning in found]})
    else:
        print("\n".join(report_lines(found, path)))
    return DONE


def _env(options: argparse.Namespace) -> int:
    from moe_compiler import __version__, device
    from moe_compiler.options import not_options

    facts: dict[str, Any] = {"moepdl": __version__, **device.describe()}
    off = device.why_no_pdl("cuda" if "capability" in facts else "cpu")
    facts["pdl"] = f"not available: {off}" if off else "available"
    facts["tested"] = ", ".join(
        f"torch {torch} with {f'triton {own}' if own else 'no triton'}" for torch, own in device.TESTED
    )
    facts["untested"] = device.untested_versions()
    facts["environment"] = {key: value for key, value in sorted(os.environ.items()) if key.startswith("MOEPDL_")}
    facts["no_option"] = not_options(os.environ)
    if options.json:
        _print_json(facts)
        return DONE
    width = max(map(len, facts))
    for key, value in facts.items():
        if isinstance(value, dict):
            if key == "no_option":
                flags = [f"{name} sets no option" + (f" (try {near})" if near else "") for name, near in value.items()]
                value = ", ".join(flags)
            else:
                value = " ".join(f"{name}={text}" for name, text in value.items()) or "no MOEPDL_ variable is set"
        if value != "":
            print(f"{key:<{width}}  {value}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
