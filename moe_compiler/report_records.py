"""The records of a report: what was matched, missed, broken, run and launched, as plain values.

They hold text and numbers, never tensors, nodes or symbols: whoever fills them turns those into text (`plain`), so that
a record can be stored, sent between processes and read without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ChainRecord",
    "DagRecord",
    "EdgeRecord",
    "FragmentRecord",
    "GraphRecord",
    "LaunchRecord",
    "MatchRecord",
    "MissRecord",
    "PassRecord",
    "VariantRecord",
    "plain",
]


def plain(value: Any) -> Any:
    """The value as JSON has it. Symbols become their text, and so do infinities and NaN, for which JSON has no
    number.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    return str(value)


@dataclass(frozen=True)
class MatchRecord:
    """A block that was recognised.

    block:       where it sits, e.g. `layers.0.mlp`
    formulation: name of the spelling that bound it
    router:      name of the router rule, or None when the router stays with Inductor; `router_why` then says why,
                 at which line, and what would help; also where only its end stays, "..., then Inductor"
    where:       the user's line, `file:line: code`
    sizes:       E, k, T, H, I (and others) as text; symbolic ones keep their symbol
    attributes:  what the canonical operators carry: score, order, renormalize, activation, weight_at, layout, dtype,
                 ...
    count:       how many equal blocks this record stands for
    left_alone:  why a recognised block was not rewritten; empty when it was
    """

    block: str
    formulation: str
    router: str | None = None
    router_why: str = ""
    where: str = ""
    sizes: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    count: int = 1
    left_alone: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", {str(key): str(value) for key, value in self.sizes.items()})
        object.__setattr__(self, "attributes", plain(self.attributes))


@dataclass(frozen=True)
class MissRecord:
    """A candidate that no formulation bound; the attempt with most steps passed is the one shown.

    candidate:   the anchor's operator, e.g. `topk`; `where` is its user line
    formulation: the nearest one, which passed `steps_passed` of `steps_total` steps and failed at `step`
    reason:      what did not hold at `node`, whose user line is `at`
    hint:        what would make it match; where the step has no advice of its own, the example to follow
    """

    candidate: str
    where: str
    formulation: str
    steps_passed: int
    steps_total: int
    step: str
    reason: str
    node: str = ""
    hint: str = ""
    at: str = ""
    count: int = 1


@dataclass(frozen=True)
class FragmentRecord:
    """A place where Dynamo ended a graph early, or gave a frame up.

    reason:   what broke it; `where` is the user's line, `file:line: code`
    remedy:   what helps
    function: the Python function whose frame it was, when it is known
    compiled: is there a graph up to this place; False for a frame that runs in eager and never reached a backend
    """

    reason: str
    where: str = ""
    remedy: str = ""
    function: str = ""
    compiled: bool = True
    count: int = 1


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass. `delta` maps operator names to how many more (or fewer) of them the graph holds
    afterwards.
    """

    name: str
    phase: str  # "capture", "forward" or "backward"
    level: str
    numerics: str
    rewrites: int
    seconds: float = 0.0
    delta: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch of a chain. `reads`, `writes` and `weights` name inputs and buffers; `weights` may be read
    before the wait.
    """

    kernel: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    waits: bool = False
    triggers: bool = False
    pdl: bool = False
    predicted_us: float | None = None
    stream: int = 0


@dataclass(frozen=True)
class EdgeRecord:
    """A dependence between two launches, given by their positions in the variant's list.

    kind:         "raw", "war", "waw" (by storage), "order" (a collective's order) or "effect" (a host effect)
    programmatic: the consumer is launched with the PDL attribute and may start before the producer ends; `why` says
                  why, or why not
    predicted_us: predicted gain of the programmatic edge, None when there is no model for it
    through:      the buffers that carry the dependence
    """

    producer: int
    consumer: int
    kind: str = "raw"
    programmatic: bool = False
    why: str = ""
    predicted_us: float | None = None
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class VariantRecord:
    """What a chain launches when T <= max_tokens (None: any T); the first variant that fits is taken at call time.

    at_tokens: the T that predicted times are for, None without predictions
    """

    name: str
    max_tokens: int | None = None
    launches: tuple[LaunchRecord, ...] = ()
    edges: tuple[EdgeRecord, ...] = ()
    at_tokens: int | None = None

    @property
    def programmatic(self) -> int:
        """Number of programmatic edges."""
        return sum(edge.programmatic for edge in self.edges)

    @property
    def predicted_us(self) -> float | None:
        """Predicted time of the variant: its launches, less what its programmatic edges gain; None when any is open."""
        times = [launch.predicted_us for launch in self.launches]
        known = [time for time in times if time is not None]
        if len(known) < len(times) or not known:
            return None
        return max(sum(known) - sum(edge.predicted_us or 0.0 for edge in self.edges if edge.programmatic), 0.0)

    @property
    def predicted_text(self) -> str:
        """ ", 23 us predicted at T=4", or nothing."""
        time = self.predicted_us
        return "" if time is None or self.at_tokens is None else f", {time:.0f} us predicted at T={self.at_tokens}"

    @property
    def range_text(self) -> str:
        return "any T" if self.max_tokens is None else f"T <= {self.max_tokens}"


@dataclass(frozen=True)
class ChainRecord:
    """A chain of launches, one operator in Inductor's code. `direction` is "forward" or "backward"."""

    name: str
    direction: str
    variants: tuple[VariantRecord, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class GraphRecord:
    """The graph as a pass left it: runnable Python in `code`, kept when the pass changed something. `number` orders
    the files of a dump.
    """

    number: int
    name: str
    phase: str
    code: str
    lines: int = 0

    def __post_init__(self) -> None:
        if not self.lines:
            object.__setattr__(self, "lines", self.code.count("\n"))


@dataclass(frozen=True)
class DagRecord:
    """The dependency DAG of one direction, as values to draw.

    nodes: dicts with `id`, `label`, `kind` ("compute", "exchange", "input", "output", ...), `bytes` and `flops`
           (number, text or None), and the `grid` of a tiled kernel; a `group` names the block of a node; with
           predictions also `predicted_us`, `slack_us` (how much later it may start), `critical` (on the longest path)
    edges: dicts with `source`, `target` (node ids), `kind` as in EdgeRecord, and optionally `programmatic`
    """

    direction: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    edges: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", plain(self.nodes))
        object.__setattr__(self, "edges", plain(self.edges))
