"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import pdl_probes
from benchmarks.pdl_probes import edges, gain, gluon, progress, races, remainder
from benchmarks.pdl_probes.kernels import SLEEP_NS
from benchmarks.timing import RESULTS, table, write
from moe_compiler.demo import ignore_known_warnings

PARTS = ("races", "edges", "progress", "remainder", "remainder_gain", "gluon", "gain")


def _shape(sizes: dict[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sizes.items()) + ", bf16, router included; medians."


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=(pdl_probes.__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    p.add_argument("--replays", type=int, default=3000)
    p.add_argument("--tokens", nargs="*", type=int, default=list(gain.TOKENS), help="of the table of gains")
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    ignore_known_warnings()
    printed: list[str] = []

    def save(name: str, title: str, rows: list[dict[str, Any]], *notes: str) -> None:
        write(arguments.out, name, title, rows, device="cuda", notes=notes)
        printed.append(f"{title}\n{table(rows)}")

    replays = arguments.replays
    parts: dict[str, Callable[[], None]] = {
        "races": lambda: save(
            "pdl",
            "Races provoked on purpose",
            races.rows(replays),
            f"Each sequence in one graph, {replays} replays; the sleep is {SLEEP_NS // 1000} us.",
        ),
        "edges": lambda: save(
            "pdl_edges",
            "Edges of a captured graph",
            edges.rows(),
            "The consumer is launched with the attribute.",
        ),
        "progress": lambda: save(
            "pdl_progress",
            "Early dependents and a second stream",
            progress.rows(),
            f"Medians of {progress.ROUNDS} replays of one graph; the dependents carry the attribute and wait.",
            f"A block that polls gives up after {progress.GIVE_UP_NS // 1000} us.",
        ),
        "remainder": lambda: save(
            "pdl_inductor",
            "The attribute outside of our chains",
            remainder.rows(replays),
            f"P9: both ways in one graph, {replays} replays, inputs that change; a value differs by more than 1e-3.",
            "attribute: programmatic edges of the captured graph.",
        ),
        "remainder_gain": lambda: save(
            "pdl_inductor_gain",
            "What Inductor's attribute gains around a chain",
            remainder.gain_rows(replays),
            "norm, block, residual, norm; " + _shape(remainder.BLOCK),
            "on: triton.enable_pdl for the kernels around the chain; the chain itself is the same in both.",
        ),
        "gluon": lambda: save(
            "pdl_gluon",
            "The attribute and Gluon",
            gluon.rows(),
            "Compiled for sm_90 and read by the audit.",
        ),
        "gain": partial(_gain, save, replays, arguments.tokens),
    }
    failed: list[str] = []
    for name in arguments.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            parts[name]()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            if isinstance(error, TimeoutError):
                break  # the device is stuck: nothing after this can be measured
    print("\n\n".join([*printed, *failed]), flush=True)
    if failed and "TimeoutError" in failed[-1]:
        os._exit(1)  # leaving in order would wait for the device
    return 1 if failed else 0


def _gain(save: Callable[..., None], replays: int, tokens: Sequence[int]) -> None:
    save("pdl_boundary", "What a boundary of tiny kernels gains", gain.boundary(), "One graph, replayed alone.")
    compiled = gain.ways()
    rows = [gain.row(compiled, count, max(100, replays * 64 // max(64, count))) for count in tokens]
    save(
        "pdl_gain",
        "What the attribute gains a block's chain",
        rows,
        _shape(gain.SIZES),
        "One call in a graph; the replays of both are timed in turns, alone on the device.",
        "Bits compared at every replay, with a stream of memory traffic beside.",
    )


if __name__ == "__main__":
    sys.exit(main())
