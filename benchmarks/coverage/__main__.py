"""Compile every MoE class of the installed transformers and write which ones are rewritten, and why others are not.

    python -m benchmarks.coverage                     # all classes; what this version measured before is kept
    python -m benchmarks.coverage --only mixtral gpt_oss --anew
    python -m benchmarks.coverage --page              # write the page again from the numbers

Each class is built small (fp32) and run in a process of its own. Writes docs/coverage.json after each class, and
docs/coverage.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.coverage.cells import COLUMNS
from benchmarks.coverage.classes import find_experts
from benchmarks.coverage.page import render, totals
from benchmarks.coverage.runner import run
from benchmarks.timing import ROOT, commit
from moe_compiler.progress import Progress
from moe_compiler.timing import environment

JSON = ROOT / "docs" / "coverage.json"
LIMIT_S = 300.0


def version() -> str:
    """A hash of what decides a row: our sources and the versions of torch and transformers."""
    import torch
    import transformers

    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for folder in ("moe_compiler", "passes", "runtime_kernels", "benchmarks/coverage"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "page.py":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def as_text(data: dict[str, Any]) -> str:
    """The data as JSON, a line a row."""
    head = json.dumps({key: value for key, value in data.items() if key != "rows"})
    return head[:-1] + ', "rows": [\n' + ",\n".join(json.dumps(row) for row in data["rows"]) + "\n]}\n"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--only", nargs="*", default=[], metavar="NAME", help="folders or classes; others keep their rows")
    p.add_argument("--anew", action="store_true", help="measure again what this version has measured already")
    p.add_argument("--page", action="store_true", help="measure nothing, write the page")
    p.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a class")
    p.add_argument("--out", type=Path, default=JSON, help="the JSON file; the page lies beside it")
    p.add_argument("--logs", type=Path, default=ROOT / "out" / "coverage", help="a folder for what the classes print")
    arguments = p.parse_args(argv)
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in known.get("rows", [])}
    now, stamp = version(), commit()
    classes = find_experts()
    rows = {experts.name: rows[experts.name] for experts in classes if experts.name in rows}
    with Progress("coverage") as progress:
        for index, experts in enumerate(classes):
            chosen = not arguments.only or experts.folder in arguments.only or experts.name in arguments.only
            measured = rows.get(experts.name, {}).get("version") == now and not arguments.anew
            if arguments.page or not chosen or measured:
                continue
            progress.step(f"{index + 1} of {len(classes)}: {experts.name}")
            row = run(experts, arguments.limit, arguments.logs)
            rows[experts.name] = {**row, "version": now, "commit": stamp}
            ordered = [rows[each.name] for each in classes if each.name in rows]
            data = {"environment": environment("cpu"), "columns": list(COLUMNS), "rows": ordered}
            arguments.out.write_text(as_text(data))
            cells = row.get("cells", {})
            print(experts.name, row.get("not built") or " | ".join(cells[c]["text"] for c in COLUMNS), flush=True)
    data = json.loads(arguments.out.read_text())
    arguments.out.with_suffix(".md").write_text(render(data))
    for line in totals(data):
        print(line)
    wrong = [row["name"] for row in data["rows"] if any(c["status"] == "wrong" for c in row.get("cells", {}).values())]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
