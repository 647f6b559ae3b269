"""The records of a report: what was matched, missed, broken, run and launched, as plain values.

They hold text and numbers, never tensors, nodes or symbols: whoever fills them turns those into text (`plain`), so that
a record can be stored, sent between processes and read without torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = [
    "BranchRecord",
    "ChainRecord",
    "DagRecord",
    "EdgeRecord",
    "ExchangeRecord",
    "FragmentRecord",
    "GraphRecord",
    "LaunchRecord",
    "MatchRecord",
    "MissRecord",
    "OverlapRecord",
    "PassRecord",
    "VariantRecord",
    "fold",
    "plain",
    "plural",
]

R = TypeVar("R")


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


def fold(records: Sequence[R], *, ignore: str | tuple[str, ...]) -> list[R]:
    """Records that agree in everything but `ignore` and their count become the first of them, with the counts
    added. Keeps order.
    """
    folded: dict[str, Any] = {}
    left_out = {"count", *((ignore,) if isinstance(ignore, str) else ignore)}
    for record in records:
        fields = {key: value for key, value in dataclasses.asdict(record).items() if key not in left_out}  # type: ignore[call-overload]
        key = json.dumps(fields, sort_keys=True, default=str)
        seen = folded.get(key)
        folded[key] = record if seen is None else dataclasses.replace(seen, count=seen.count + record.count)  # type: ignore[attr-defined]
    return list(folded.values())


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 chain`, `2 chains`; `many` is the plural where it is not the noun with an s."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


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
class ExchangeRecord:
    """The exchange of an expert-parallel block.

    block:           where it sits, e.g. `layers.0.mlp`; `where` is the user's line
    group, ranks:    the process group's name, and how many ranks it has
    experts:         of the whole group; placement: how they are spread
    capacity:        slots a rank has for each source, in each chunk; `agreed` says where it comes from
    dispatch_bytes, combine_bytes: what a rank sends to all the others together in a forward, in all chunks
    transport:       what carries it
    chunks:          into how many parts the tokens are cut
    """

    block: str
    where: str
    group: str
    ranks: int
    experts: int
    placement: str
    capacity: int
    agreed: str
    dispatch_bytes: int
    combine_bytes: int
    transport: str
    chunks: int = 1
    count: int = 1

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        parts = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"exchange{times}: {plural(self.ranks, 'rank')} over {self.transport}, E={self.experts} {self.placement}, "
            f"{self.capacity} slots for each source ({self.agreed}){parts}; a rank sends {_size(self.dispatch_bytes)} "
            f"out and {_size(self.combine_bytes)} back"
        )


@dataclass(frozen=True)
class OverlapRecord:
    """What is computed while an exchange travels.

    direction: "forward" or "backward"; exchange: which of the block's; block: where it sits
    matmuls:   how many dense matmuls were brought in between; stages: of expert blocks, what runs in between
    """

    direction: str
    exchange: str
    block: str
    matmuls: int
    stages: tuple[str, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        beside = [plural(self.matmuls, "matmul")] if self.matmuls else []
        beside += [", ".join(dict.fromkeys(self.stages))] if self.stages else []
        return f"{self.direction} {self.exchange}{times}: beside {' and '.join(beside) or 'nothing'}"


def _size(count: int) -> str:
    """Bytes as a reader wants them: 3.21 MB."""
    return next(
        (f"{count / unit:.3g} {name}" for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= unit),
        f"{count} B",
    )


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
    before the wait. `cost` has the text of its `bytes`, `flops` and `grid` in T, as far as they are known. `tiles`: by
    range of T ("T <= 12", "any T"), where they were tuned or given; "own" where the kernel chooses.
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
    cost: dict[str, str] = field(default_factory=dict)
    tiles: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EdgeRecord:
    """A dependence between two launches, given by their positions in the variant's list.

    kind:         "raw", "war", "waw" (by storage), "order" (neighbours in a stream that share nothing; a collective's
                  order) or "effect" (a host effect)
    programmatic: the consumer is launched with the PDL attribute and may start before the producer ends; `why` says
                  why, or why not
    predicted_us: predicted gain of the programmatic edge, None when there is no model for it
    measured_us:  what the chain was measured to take longer without the programmatic edge, None when it was not
    through:      the buffers that carry the dependence
    """

    producer: int
    consumer: int
    kind: str = "raw"
    programmatic: bool = False
    why: str = ""
    predicted_us: float | None = None
    through: tuple[str, ...] = ()
    measured_us: float | None = None


@dataclass(frozen=True)
class MemoryRecord:
    """What a variant allocates at one time besides inputs, weights and outputs: `bytes` at T = `tokens`.

    chunk_tokens: the most tokens of a chunk where options["memory"] is "low"; None: the launches take all at once
    whole:        why "low" leaves the variant as it is, "" where it does not or was not asked for
    """

    tokens: int
    bytes: int
    chunk_tokens: int | None = None
    whole: str = ""

    def __str__(self) -> str:
        text = f"{self.bytes / 1e6:.3g} MB at T={self.tokens} beside inputs and outputs"
        if self.chunk_tokens is not None:
            text += f", in chunks of at most {self.chunk_tokens} tokens"
        return text + (f'; options["memory"]="low" leaves it whole: {self.whole}' if self.whole else "")


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
    memory: MemoryRecord | None = None

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
class BranchRecord:
    """A branch of a graph that may run beside a chain: a shared expert.

    nodes, operators:    its nodes in graph order, and what they are; beside: the stages that it may overlap with
    bytes, flops:        of its matmuls, in T
    predicted_us, times_at: time of each matmul, by node, and for which T
    gain_us, at_tokens:  what a second stream is predicted to gain, and for which T; None without a prediction
    overlapped, limit:   whether the chain has a second stream, and up to which T (None: any)
    why:                 the reason, either way
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    beside: tuple[str, ...]
    bytes: str
    flops: str
    predicted_us: dict[str, float] = field(default_factory=dict)
    gain_us: float | None = None
    at_tokens: int | None = None
    count: int = 1
    times_at: int | None = None
    overlapped: bool = False
    limit: int | None = None
    why: str = ""

    @property
    def matmuls(self) -> int:
        """How many of the operators are dense matmuls."""
        return sum(operator.endswith("mm") for operator in self.operators)

    def __str__(self) -> str:
        time = f", {sum(self.predicted_us.values()):.1f} us predicted" if self.predicted_us else ""
        time += f" at T={self.times_at}" if time and self.times_at is not None else ""
        gain = ""
        if self.gain_us is not None:
            gain = f"; a second stream is predicted to gain {self.gain_us:.1f} us at T={self.at_tokens}"
        streams = "it runs on the chain's stream"
        if self.overlapped:
            streams = f"the chain has a second stream for {'any T' if self.limit is None else f'T <= {self.limit}'}"
        streams += f" ({self.why})" if self.why else ""
        times = f" x{self.count}" if self.count > 1 else ""
        return (
            f"branch{times} of {plural(len(self.nodes), 'node')} ({plural(self.matmuls, 'matmul')}{time}) may overlap "
            f"with {', '.join(self.beside)}{gain}; {streams}"
        )


@dataclass(frozen=True)
class DagRecord:
    """The dependency DAG of one direction, as values to draw.

    nodes: dicts with `id`, `label`, `kind` ("compute", "exchange", "input", "output", ...), `bytes` and `flops`
           (number, text or None), and the `grid` of a tiled kernel; a `group` names the block of a node; with
           predictions also `predicted_us`, `slack_us` (how much later it may start), `critical` (on the longest path)
    edges: dicts with `source`, `target` (node ids), `kind` as in EdgeRecord, and optionally `programmatic`
    branches: what may run beside the chains; their nodes are of kind "branch"
    """

    direction: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    edges: list[dict[str, Any]] = field(default_factory=list)
    branches: tuple[BranchRecord, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", plain(self.nodes))
        object.__setattr__(self, "edges", plain(self.edges))

    def check(self) -> None:
        """Raise ValueError unless ids are unique, edges join nodes of the record, and all lead forward in its order."""
        place = {node["id"]: index for index, node in enumerate(self.nodes)}
        if len(place) < len(self.nodes):
            raise ValueError(f"the {self.direction} DAG has two nodes of one id")
        for edge in self.edges:
            source, target = edge["source"], edge["target"]
            lost = next((end for end in (source, target) if end not in place), None)
            if lost is not None:
                raise ValueError(f"an edge of the {self.direction} DAG ends at {lost}, which is no node of it")
            if place[source] >= place[target]:
                raise ValueError(f"the {self.direction} DAG's edge from {source} to {target} leads back")

    def __str__(self) -> str:
        """A line a node with what it costs and waits for, then the branches."""
        before: dict[str, list[str]] = {}
        for edge in self.edges:
            before.setdefault(edge["target"], []).append(f"{edge['source']} {edge['kind']}")
        lines = [f"{self.direction}: {plural(len(self.nodes), 'node')}, {plural(len(self.edges), 'edge')}"]
        for node in self.nodes:
            facts = [f"{key} {node[key]}" for key in ("bytes", "flops", "grid") if key in node]
            if "predicted_us" in node:
                facts.append(f"{node['predicted_us']:.1f} us")
            if "slack_us" in node:
                facts.append("critical" if node.get("critical") else f"slack {node['slack_us']:.1f} us")
            waits = f" after {', '.join(before[node['id']])}" if node["id"] in before else ""
            lines.append(f"  {node['id']} ({node.get('kind', 'compute')}){waits}" + "".join(f"; {f}" for f in facts))
        return "\n".join([*lines, *(f"  {branch}" for branch in self.folded_branches())])

    def folded_branches(self) -> list[BranchRecord]:
        """The branches, equal layers folded."""
        return fold(self.branches, ignore=("nodes", "beside", "predicted_us"))
