"""Run many cases: `python -m tests.properties.run --cases 2000 --jobs 2`.

    --seed 17                 one case by its seed, with what it is; --case "formulation=where k=3" by its name
    --shrink                  and the plainest case that fails in the same way
    --first 5000              seeds from there on, for other cases than those of docs/properties.md

What was run is kept in out/properties/ and not run again until a source file changes; docs/properties.json and
docs/properties.md are written from it (--write none leaves them). Exits with 1 when a case is wrong, or fewer than 95 %
of those that Dynamo captures whole are matched.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.properties.case import DIMENSIONS, Case, draw, parse, shrink

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 240
NEEDED = 0.95


def _start() -> None:
    """In each worker: one thread, our names defined, no messages of the compiler."""
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import transformers.integrations.moe  # noqa: F401 - defines transformers::grouped_mm_fallback


def run_one(seed: int, case: Case | None = None) -> dict[str, Any]:
    """The outcome of a seed's case (or of another case) within the time limit, as plain values."""
    import warnings

    from tests.properties import check

    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"not done within {LIMIT_S} s")

    chosen = case if case is not None else draw(seed)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = check.run(chosen, seed)
    finally:
        signal.alarm(0)
    return {**outcome.to_dict(), "seconds": round(time.perf_counter() - started, 2)}


def sources() -> str:
    """A digest of the files that the outcomes depend on."""
    digest = hashlib.sha256()
    for folder in ("moe_compiler", "passes", "runtime_kernels", "tests/properties"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _remembered(path: Path) -> dict[int, dict[str, Any]]:
    if not path.exists():
        return {}
    return {item["seed"]: item for item in map(json.loads, path.read_text().splitlines())}


def run_many(seeds: Iterable[int], jobs: int, path: Path) -> list[dict[str, Any]]:
    """Outcomes in the order of the seeds; those already in `path` are not run again."""
    seeds = list(seeds)
    done = _remembered(path)
    left = [seed for seed in seeds if seed not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    started, shown, tally = time.monotonic(), 0.0, Counter(done[seed]["status"] for seed in seeds if seed in done)
    if left:
        # Workers are replaced now and then: Dynamo and the compilers keep something of every module.
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, _start, maxtasksperchild=150) as pool, path.open("a") as file:
            for count, outcome in enumerate(pool.imap_unordered(run_one, left), 1):
                done[outcome["seed"]] = outcome
                tally[outcome["status"]] += 1
                file.write(json.dumps(outcome) + "\n")
                file.flush()
                if outcome["status"] == "wrong":
                    print(f"\nwrong: seed {outcome['seed']}: {outcome['case']}\n  {outcome['detail']}", flush=True)
                now = time.monotonic()
                if now - shown > (1 if sys.stdout.isatty() else 30) or count == len(left):
                    shown, rate = now, (now - started) / count
                    counts = ", ".join(f"{number} {name}" for name, number in tally.most_common())
                    end = "\r" if sys.stdout.isatty() else "\n"
                    print(
                        f"{count} of {len(left)}: {counts}; {rate * (len(left) - count):.0f} s left ",
                        end=end,
                        flush=True,
                    )
    return [done[seed] for seed in seeds]


def summary(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals, totals by value of each dimension, and every case that was not matched."""
    captured = [item for item in outcomes if item["status"] in ("matched", "missed", "wrong")]
    by_dimension: dict[str, dict[str, dict[str, int]]] = {}
    for item in captured:
        case = parse(item["case"])
        for name in DIMENSIONS:
            value = str(getattr(case, name))
            counts = by_dimension.setdefault(name, {}).setdefault(value, {"cases": 0, "matched": 0})
            counts["cases"] += 1
            counts["matched"] += item["status"] == "matched"
    order = {name: list(map(str, values)) for name, values in DIMENSIONS.items()}
    rate = sum(item["status"] == "matched" for item in captured) / max(len(captured), 1)
    return {
        "cases": len(outcomes),
        "captured": len(captured),
        "match_rate": round(rate, 4),
        "statuses": dict(Counter(item["status"] for item in outcomes).most_common()),
        "formulations": dict(Counter(name for item in outcomes for name in item["formulations"]).most_common()),
        "routers": dict(Counter(name for item in outcomes for name in item["routers"]).most_common()),
        "dimensions": {
            name: {value: by_dimension[name][value] for value in order[name] if value in by_dimension[name]}
            for name in order
            if name in by_dimension
        },
        "unmatched": [
            {key: item[key] for key in ("seed", "case", "status", "detail")}
            for item in outcomes
            if item["status"] != "matched"
        ],
    }


def _environment() -> dict[str, str]:
    import torch

    found = {"torch": torch.__version__.partition("+")[0], "python": sys.version.split()[0]}
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        pass
    return found


def markdown(data: dict[str, Any]) -> str:
    """docs/properties.md."""
    versions = ", ".join(f"{name} {version}" for name, version in data["environment"].items())
    lines = [
        "# Random MoE blocks",
        "",
        f"{data['cases']} modules, drawn from seeds {data['first']} to {data['first'] + data['cases'] - 1}"
        f" by `tests/properties/case.py`, compiled and compared with float64, forward and backward ({versions}).",
        f"Dynamo captured {data['captured']} of them whole; **{data['match_rate']:.1%}** of those were matched,"
        " exactly once a block.",
        f"Made by `python -m tests.properties.run --cases {data['cases']}`; `--seed N` runs one of them again.",
        "",
        "| outcome | cases | meaning |",
        "|---|---|---|",
    ]
    meaning = {
        "matched": "one match a block, numbers and gradients within the accuracy rule, passes at a fixed point",
        "missed": "right, but left to Inductor; the reason is below",
        "wrong": "another value, another gradient, a match too many, a pass not at its fixed point, or an error",
        "not captured": "Dynamo does not make one graph of the module",
        "not a model": "eager itself fails, or has no clear choice of experts",
    }
    lines += [f"| {name} | {data['statuses'].get(name, 0)} | {text} |" for name, text in meaning.items()]
    reasons: dict[str, list[dict[str, Any]]] = {}
    for item in data["unmatched"]:
        reasons.setdefault(f"{item['status']}: {item['detail']}", []).append(item)
    if reasons:
        lines += ["", "## Not matched", "", "| cases | why | one of them |", "|---|---|---|"]
        for why, items in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
            text = why.replace("|", "\\|")
            lines.append(f"| {len(items)} | {text} | `--seed {items[0]['seed']}` |")
    lines += ["", "## By formulation and router", "", "| found as | blocks |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in {**data["formulations"], **data["routers"]}.items()]
    lines += [
        "",
        "## By dimension",
        "",
        "Matched of captured, for each value.",
        "",
        "| dimension | value: matched / cases |",
        "|---|---|",
    ]
    for name, values in data["dimensions"].items():
        cells = ", ".join(f"{value}: {n['matched']}/{n['cases']}" for value, n in values.items())
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def one(case: Case, seed: int, shrinking: bool) -> int:
    """Run and print one case."""
    _start()
    outcome = run_one(seed, case)
    print(
        f"seed {seed}: {case}\n{outcome['status']}: {outcome['detail'] or outcome['formulations']} {outcome['routers']}"
    )
    if shrinking and outcome["status"] != "matched":
        status = outcome["status"]
        small = shrink(case, lambda c: run_one(seed, c)["status"] == status)
        again = run_one(seed, small)
        print(f'plainest: --seed {seed} --case "{small}"\n{again["status"]}: {again["detail"]}')
    return int(outcome["status"] == "wrong")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties.run", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seed", type=int, help="run the case of this seed alone")
    parser.add_argument("--case", help="run the case of this name alone")
    parser.add_argument("--shrink", action="store_true", help="with --seed or --case: find the plainest that fails so")
    parser.add_argument("--write", default=str(ROOT / "docs"), help="the folder for properties.json and .md, or none")
    options = parser.parse_args(arguments)
    if options.seed is not None or options.case is not None:
        seed = options.seed or 0
        return one(draw(seed) if options.case is None else parse(options.case), seed, options.shrink)
    path = ROOT / "out" / "properties" / f"{sources()}.jsonl"
    outcomes = run_many(range(options.first, options.first + options.cases), options.jobs, path)
    data = {"first": options.first, "environment": _environment(), **summary(outcomes)}
    if options.write != "none":
        folder = Path(options.write)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "properties.json").write_text(json.dumps(data, indent=1) + "\n")
        (folder / "properties.md").write_text(markdown(data))
    counts = ", ".join(f"{number} {name}" for name, number in data["statuses"].items())
    print(f"{data['cases']} cases: {counts}; {data['match_rate']:.1%} of {data['captured']} captured ones matched")
    return int(data["statuses"].get("wrong", 0) > 0 or data["match_rate"] < NEEDED)


if __name__ == "__main__":
    raise SystemExit(main())
