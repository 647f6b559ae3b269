"""The picture of one result: time against tokens on logarithmic axes, the floor, moepdl and every peer.

Needs matplotlib (`pip install moepdl[bench]`). The same results give the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_compiler.bench.results import Results, title_of
from moe_compiler.errors import MoepdlError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_TITLES = {
    ("forward", "graph"): "forward, in a CUDA graph",
    ("forward", "nograph"): "forward, call by call",
    ("forward_backward", "graph"): "forward + backward, in a CUDA graph",
    ("forward_backward", "nograph"): "forward + backward, call by call",
}
OURS_COLOUR, FLOOR_COLOUR = "#c1272d", "#444444"
# Of the peers, in order; all of them readable in grey and told apart by their marks as well.
COLOURS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#8c6d31", "#999999")
MARKS = "svD^Pph"


def draw(results: Results, path: Path) -> Path:
    """Write the picture to `path`, as its suffix says (.svg, .png); one panel a direction and mode.

    Raises MoepdlError where matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoepdlError(
            f"no picture was drawn: {error}",
            why="pictures are drawn by matplotlib, which is not installed",
            try_="pip install 'moepdl[bench]', then `moepdl bench block --from RESULTS.json`, here or elsewhere",
        ) from error
    groups = results.groups()
    settings = {"svg.hashsalt": "moepdl", "font.size": 9.0, "svg.fonttype": "none"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.2 * len(groups), 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(groups), squeeze=False)[0]
        colours = {name: i for i, name in enumerate(results.peers())}
        for panel, group in zip(axes, groups, strict=True):
            _panel(panel, results, group, colours)
        device = results.environment.get("device", "")
        figure.suptitle(f"One MoE block, {title_of(results)}\n{device}, {results.environment.get('dtype', '')}")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata)
    return path


def _panel(panel: Axes, results: Results, group: tuple[str, str], colours: dict[str, int]) -> None:
    rows = sorted(
        (row for row in results.rows if (row["direction"], row["mode"]) == group), key=lambda row: row["tokens"]
    )

    def line(values: list[tuple[int, float | None]], **style: Any) -> None:
        known = [(tokens, us) for tokens, us in values if us is not None]
        if known:
            panel.plot([tokens for tokens, _ in known], [us for _, us in known], **style)

    line(
        [(row["tokens"], row["floor_us"]) for row in rows],
        label="floor",
        color=FLOOR_COLOUR,
        linestyle="--",
        linewidth=1.2,
        marker="_",
    )
    for name, index in colours.items():
        line(
            [(row["tokens"], row["peers"].get(name)) for row in rows],
            label=name,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKS[index % len(MARKS)],
            markersize=4,
            linewidth=1.1,
        )
    line(
        [(row["tokens"], row["us"]) for row in rows],
        label="moepdl",
        color=OURS_COLOUR,
        marker="o",
        markersize=4.5,
        linewidth=2,
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    tokens = [row["tokens"] for row in rows]
    panel.set_xticks(tokens, [str(value) for value in tokens], rotation=45 if len(tokens) > 7 else 0)
    panel.minorticks_off()
    _plain_times(panel, [us for row in rows for us in (row["us"], row["floor_us"], *row["peers"].values()) if us])
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_xlabel("tokens T")
    panel.set_ylabel("microseconds")
    panel.set_title(_TITLES[group], fontsize=9)
    panel.legend(frameon=False, fontsize=8)


def _plain_times(panel: Axes, values: list[float]) -> None:
    """Ticks at 1, 2 and 5 of each power of ten, written out."""
    if not values:
        return
    low, high = min(values) / 1.15, max(values) * 1.15
    ticks = [m * 10.0**power for power in range(-2, 9) for m in (1, 2, 5) if low <= m * 10.0**power <= high]
    panel.set_ylim(low, high)
    panel.set_yticks(ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])
