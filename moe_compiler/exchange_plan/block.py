"""The operations of an expert-parallel block in their order: the compiler's launches with the exchanges between them.

The launches are those of `block_program`, so what `plan.variants` chooses for the rows of a rank; what each takes is
its expression in `cost` at the rows that the rank computes, with the device's numbers. The exchanges are the operators
of expert parallelism in their start / wait form:

    forward    router_logits, route, ep_dispatch_start, ep_dispatch_wait, order ... combine, ep_combine_start, _wait
    backward   ep_redispatch_start, _wait, grad_act ... combine, ep_return_weights_start, _wait, ep_combine_start, _wait

A start makes the rows ready to leave and sends them, a wait ends when the rank has everything of that exchange. Between
the two an order puts what needs neither:

    plain        nothing
    filler       the shared expert, and in the backward the gradients of weights
    local_first  also the rank's own rows: gate_up (grad_act) of them while the others travel, then the others' down
                 (grad_pairs) before their own, so that those leave first
    chunks       also the other chunks of the tokens

Each part of the rows has launches of its own, so what splitting costs (weights read again, tiles filled in part, one
more launch) is in the times. The backward's parts each add to the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import networkx as nx
import torch
from torch import Tensor

from moe_compiler.block_program import BlockSizes, backward_program, forward_program
from moe_compiler.cost import load_cost
from moe_compiler.device_model import DeviceModel
from moe_compiler.exchange_plan.links import Transport
from moe_compiler.exchange_plan.traffic import Load, Part, Traffic
from moe_compiler.runtime_kernels.chain.program import Launch

__all__ = ["ORDERS", "Block", "Op", "Rows", "Way", "dag_of", "layers", "operations"]

ORDERS = ("plain", "filler", "local_first", "chunks")
# Kernels that work on every slot, and those that compute live rows only but fill the others with zeros.
_BY_SLOT = frozenset({"order", "order_count", "order_scatter", "combine", "grad_input_weights"})
_ZEROED = frozenset({"down", "grad_pairs"})
# Whose numbers a copy of rows and a dense matmul are given.
_COPY, _MATMUL = "combine", "gate_up"
_ID_BYTES, _SCALAR_BYTES = 8, 4


@dataclass(frozen=True)
class Block:
    """A block of a model: its sizes, the width of its shared expert (0: none), and whether the forward saves."""

    sizes: BlockSizes
    shared: int = 0
    save: bool = False


@dataclass(frozen=True)
class Way:
    """How a block runs: a transport with its CTAs, an order of `ORDERS`, and chunks of the tokens."""

    transport: Transport
    ctas: int
    order: str = "plain"
    chunks: int = 1

    @property
    def label(self) -> str:
        """For a reader: "push with 16 CTAs, local rows first"."""
        ctas = f" with {self.ctas} CTAs" if len(self.transport.shares) > 1 else ""
        order = {
            "plain": "no overlap",
            "filler": "filler only",
            "local_first": "local rows first",
            "chunks": f"{self.chunks} chunks",
        }[self.order]
        return f"{self.transport.name}{ctas}, {order}"


@dataclass(frozen=True)
class Rows:
    """What an exchange moves: bytes of a row; home: from where the experts are back to the tokens' ranks."""

    bytes: int
    home: bool
    of: int = 1


@dataclass(frozen=True)
class Op:
    """One operation of every rank. us: float64 [classes], what it takes alone on the current stream.

    kind    "launch" on the current stream; "send": the flight that a start begins, on the exchanges' stream; "wait"
    rows    what a send moves; flight: the send that a wait ends
    pdl     a programmatic launch, where a launch stands before it
    """

    name: str
    kind: str
    us: Tensor
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    pdl: bool = False
    rows: Rows | None = None
    flight: str = ""


@dataclass(frozen=True)
class _Builder:
    block: Block
    traffic: Traffic
    model: DeviceModel
    way: Way
    every_slot: bool
    ops: list[Op] = field(default_factory=list)

    def times(self, kernel: str, load: Load) -> Tensor:
        """Microseconds of a launch of a kernel."""
        numbers = self.model.kernels[kernel]
        named = self.block.sizes.named
        bytes_of, work_of = load_cost(kernel, tuple(sorted((name, named[name]) for name in "HINw")))
        rows, pairs, k = load.rows, load.pairs, self.traffic.k
        if self.every_slot and kernel in _BY_SLOT:
            rows, pairs = torch.full_like(rows, load.slots), torch.full_like(pairs, load.slots * k)
        moved = bytes_of(rows, pairs, load.hit, load.experts) + torch.zeros_like(rows)
        if self.every_slot and kernel in _ZEROED:
            moved = moved + (load.slots * k - pairs) * named["H"] * named["w"]
        return numbers.times_us(moved, work_of(rows, pairs, load.hit, load.experts) + torch.zeros_like(rows))

    def copy_us(self, moved: Tensor) -> Tensor:
        """Microseconds of a kernel that moves bytes and computes nothing to speak of."""
        return self.model.kernels[_COPY].times_us(moved, torch.zeros_like(moved))

    def launch(self, item: Launch, load: Load, part: str, given: dict[str, str]) -> None:
        """A launch of the program; its buffers are the part's own but those that `given` names."""

        def name(buffer: str) -> str:
            return given.get(buffer, f"{buffer}.{part}" if part else buffer)

        self.ops.append(
            Op(
                f"{item.kernel}.{part}" if part else item.kernel,
                "launch",
                self.times(item.kernel, load),
                tuple(name(buffer) for buffer in item.ins.values() if buffer is not None),
                tuple(name(buffer) for buffer in item.outs.values()),
                pdl=item.pdl,
            )
        )

    def matmul(self, name: str, rows: Tensor, inner: int, outer: int, reads: str, writes: str, times: int = 1) -> None:
        """A dense matmul [rows, inner] x [inner, outer], `times` of its size, as Inductor runs the shared expert's."""
        w = self.block.sizes.named["w"]
        moved = (inner * outer + rows * (inner + outer)) * w * times
        us = self.model.kernels[_MATMUL].times_us(moved, 2 * rows * inner * outer * times)
        self.ops.append(Op(name, "launch", us, (reads,), (writes,)))

    def start(self, name: str, suffix: str, rows: Rows, reads: Sequence[str], prepared: Tensor | None) -> None:
        """Begin an exchange. prepared: bytes that a kernel moves first (own rows to their slots, rows packed)."""
        full = name + suffix
        us = torch.zeros_like(self.traffic.tokens) if prepared is None else self.copy_us(prepared)
        self.ops.append(Op(f"{full}_start", "launch", us, tuple(reads), (f"{full}.token",)))
        zero = torch.zeros_like(us)
        self.ops.append(Op(full, "send", zero, (f"{full}.token",), (f"{full}.sent",), rows=rows))

    def wait(self, name: str, suffix: str, reads: Sequence[str], writes: Sequence[str], moved: Tensor | None) -> None:
        """End an exchange; moved: bytes of the kernel that adds up what arrived."""
        full = name + suffix
        us = torch.zeros_like(self.traffic.tokens) if moved is None else self.copy_us(moved)
        self.ops.append(Op(f"{full}_wait", "wait", us, (f"{full}.sent", *reads), tuple(writes), flight=full))

    def out_bytes(self, row: int, of: int) -> Tensor:
        """Bytes that the start of a dispatch moves: own rows to their slots, and rows packed where they must be."""
        t = self.traffic
        packed = t.near + t.far if self.way.transport.packs else torch.zeros_like(t.near)
        return 2.0 * row * (t.kept + packed) / of

    def home_bytes(self, row: int, of: int) -> Tensor:
        """Bytes that the end of a combine moves: the rows of a token's ranks added up."""
        t = self.traffic
        return row * (t.kept + t.near + t.far + t.tokens) / of


def operations(
    block: Block, traffic: Traffic, model: DeviceModel, way: Way, direction: str, *, every_slot: bool = True
) -> tuple[Op, ...]:
    """The operations of one direction ("forward" or "backward") of a block, in the order of the current stream.

    every_slot: as the kernels do, the sort, the sum over k and the filling with zeros go over unused slots and choices
    of other ranks too; False: as if they did not.
    """
    builder = _Builder(block, traffic, model, way, every_slot)
    (_forward if direction == "forward" else _backward)(builder)
    return tuple(builder.ops)


@lru_cache(maxsize=64)
def _router(sizes: BlockSizes, save: bool, tokens: int) -> tuple[Launch, ...]:
    launches = forward_program(sizes, save=save).variant_for(tokens).launches
    return tuple(item for item in launches if item.kernel in ("router_logits", "route"))


@lru_cache(maxsize=256)
def _experts(sizes: BlockSizes, save: bool, slots: int, direction: str) -> tuple[Launch, ...]:
    program = backward_program(sizes) if direction == "backward" else forward_program(sizes, save=save, router=False)
    return program.variant_for(slots).launches


def _parts(way: Way) -> tuple[Part, ...]:
    if way.order == "local_first":
        return (Part("local", "local"), Part("remote", "remote"))
    if way.chunks > 1:
        return tuple(Part(f"chunk{index}", "all", way.chunks) for index in range(way.chunks))
    return (Part(""),)


def _launches(builder: _Builder, part: Part, direction: str) -> tuple[Launch, ...]:
    """The launches over the rows of a part, with the experts that a rank has at most."""
    sizes = builder.block.sizes
    own = replace(sizes, experts=max(int(builder.traffic.experts.max()), 1))
    return _experts(own, builder.block.save, builder.traffic.slots(part), direction)


def _run(builder: _Builder, items: Iterable[Launch], part: Part, given: dict[str, str]) -> None:
    load = builder.traffic.load(part)
    for item in items:
        builder.launch(item, load, part.name, given)


def _halves(launches: Sequence[Launch]) -> tuple[Sequence[Launch], Sequence[Launch]]:
    """Before the down projection, and from there on."""
    at = next(index for index, item in enumerate(launches) if item.kernel.startswith("down"))
    return launches[:at], launches[at:]


def _suffix(part: Part) -> str:
    return f".{part.name}" if part.name.startswith("chunk") else ""


def _shared(builder: _Builder, half: int, backward: bool) -> None:
    """Half of the shared expert: gate and up, or down; in the backward down's two gradients, or gate's and up's."""
    width, hidden, rows = builder.block.shared, builder.block.sizes.hidden, builder.traffic.tokens
    if width and not backward:
        sizes = ((hidden, 2 * width), (width, hidden))[half]
        names = ("x", "shared_act") if half == 0 else ("shared_act", "shared_y")
        builder.matmul(("shared_gate_up", "shared_down")[half], rows, *sizes, *names)
    elif width:
        sizes = ((width, hidden), (hidden, 2 * width))[half]
        names = ("grad_y", "shared_grad_act") if half == 0 else ("shared_grad_act", "shared_grad_x")
        builder.matmul(("shared_grad_down", "shared_grad_gate_up")[half], rows, *sizes, *names, times=2)


def _forward(builder: _Builder) -> None:
    block, t, way = builder.block, builder.traffic, builder.way
    h, w, k = block.sizes.hidden, block.sizes.named["w"], t.k
    out_row, home_row = h * w + k * (_ID_BYTES + w), h * w
    parts, overlapped = _parts(way), way.order != "plain"
    tokens = int(t.tokens.max())
    every = torch.full_like(t.tokens, float(block.sizes.experts))
    own = Load(float(tokens), t.tokens, t.tokens * k, every, every)
    router = replace(builder, every_slot=False)
    for item in _router(block.sizes, block.save, tokens):
        router.launch(item, own, "", {})

    exchanges = [part for part in parts if part.name != "remote"]
    inputs = {p.name: {"x": f"rows{_suffix(p)}", "ids": f"row_ids{_suffix(p)}", "w": f"row_weights{_suffix(p)}"}
              for p in parts}
    halves = {p.name: _halves(_launches(builder, p, "forward")) for p in parts}

    def dispatch(part: Part) -> None:
        own_slots = ("rows.own", "row_ids.own", "row_weights.own")
        builder.start("ep_dispatch", _suffix(part), Rows(out_row, False, part.of), ("x", "ids", "w"),
                      builder.out_bytes(out_row, part.of))
        if way.order == "local_first":
            builder.ops[-2] = replace(builder.ops[-2], writes=(*builder.ops[-2].writes, *own_slots))

    def arrived(part: Part) -> None:
        builder.wait("ep_dispatch", _suffix(part), (), tuple(inputs[part.name].values()), None)

    def home(part: Part, outs: Sequence[str]) -> None:
        builder.start("ep_combine", _suffix(part), Rows(home_row, True, part.of), outs, None)

    def summed(part: Part, outs: Sequence[str], y: str) -> None:
        builder.wait("ep_combine", _suffix(part), outs, (y,), builder.home_bytes(home_row, part.of))

    if way.order == "local_first":
        local, remote = parts
        mine = {"x": "rows.own", "ids": "row_ids.own", "w": "row_weights.own"}
        dispatch(local)
        _shared(builder, 0, False)
        _run(builder, halves["local"][0], local, mine)
        arrived(local)
        _run(builder, (*halves["remote"][0], *halves["remote"][1]), remote, inputs["remote"])
        home(local, ("y.remote",))
        _run(builder, halves["local"][1], local, mine)
        _shared(builder, 1, False)
        summed(local, ("y.local",), "y")
        return
    ahead = 2 if way.chunks > 1 else 1
    for part in exchanges[:ahead]:
        dispatch(part)
    if overlapped:
        _shared(builder, 0, False)
    for index, part in enumerate(exchanges):
        arrived(part)
        _run(builder, (*halves[part.name][0], *halves[part.name][1]), part, {**inputs[part.name]})
        home(part, (f"y.{part.name}" if part.name else "y",))
        for later in exchanges[index + ahead : index + ahead + 1]:
            dispatch(later)
    if overlapped:
        _shared(builder, 1, False)
    for part in exchanges:
        out = f"y.{part.name}" if part.name else "y"
        summed(part, (out,), f"sum{_suffix(part)}")
    if not overlapped:
        _shared(builder, 0, False)
        _shared(builder, 1, False)


_WEIGHT_GRADIENTS = ("grad_down", "grad_gate_up")


def _backward(builder: _Builder) -> None:
    block, t, way = builder.block, builder.traffic, builder.way
    h, w, k = block.sizes.hidden, block.sizes.named["w"], t.k
    row, scalars = h * w, k * _SCALAR_BYTES
    parts = _parts(way)
    exchanges = [part for part in parts if part.name != "remote"]
    launches = {p.name: _launches(builder, p, "backward") for p in parts}

    def given(part: Part) -> dict[str, str]:
        grad = {"local": "grad_rows.own"}.get(part.name, f"grad_rows{_suffix(part)}")
        return {"grad_y": grad, "x": "rows", "w": "row_weights"}

    def run(part: Part, *kernels: str) -> None:
        chosen = [item for item in launches[part.name] if not kernels or item.kernel in kernels]
        _run(builder, chosen, part, given(part))

    def dispatch(part: Part) -> None:
        builder.start("ep_redispatch", _suffix(part), Rows(row, False, part.of), ("grad_y", "slots"),
                      builder.out_bytes(row, part.of))
        if way.order == "local_first":
            builder.ops[-2] = replace(builder.ops[-2], writes=(*builder.ops[-2].writes, "grad_rows.own"))

    def arrived(part: Part) -> None:
        builder.wait("ep_redispatch", _suffix(part), (), (f"grad_rows{_suffix(part)}",), None)

    def send_weights(part: Part, made: Sequence[str]) -> None:
        builder.start("ep_return_weights", _suffix(part), Rows(scalars, True, part.of), made, None)

    def weights_home(part: Part) -> None:
        builder.wait("ep_return_weights", _suffix(part), (), (f"grad_weights{_suffix(part)}",),
                     builder.home_bytes(scalars, part.of))

    def send_rows(part: Part, made: Sequence[str]) -> None:
        builder.start("ep_combine", _suffix(part), Rows(row, True, part.of), made, None)

    def rows_home(part: Part, made: Sequence[str] = ()) -> None:
        builder.wait("ep_combine", _suffix(part), made, (f"grad_sum{_suffix(part)}",), builder.home_bytes(row, part.of))

    def named(buffer: str, part: Part) -> str:
        return f"{buffer}.{part.name}" if part.name else buffer

    if way.order == "plain":
        (part,) = parts
        dispatch(part)
        arrived(part)
        run(part)
        send_weights(part, (named("grad_w", part),))
        weights_home(part)
        send_rows(part, (named("grad_x", part),))
        rows_home(part)
        _shared(builder, 0, True)
        _shared(builder, 1, True)
        return
    if way.order == "local_first":
        local, remote = parts
        dispatch(local)
        _shared(builder, 0, True)
        run(local, "grad_act")
        arrived(local)
        run(remote, "grad_act")
        send_weights(local, ("grad_w.remote",))
        run(remote, "grad_pairs", "combine")
        send_rows(local, ("grad_x.remote",))
        run(local, "grad_pairs", "combine")
        _shared(builder, 1, True)
        run(local, *_WEIGHT_GRADIENTS)
        run(remote, *_WEIGHT_GRADIENTS)
        weights_home(local)
        rows_home(local, ("grad_x.local",))
        return
    ahead = 2 if way.chunks > 1 else 1
    for part in exchanges[:ahead]:
        dispatch(part)
    _shared(builder, 0, True)
    for index, part in enumerate(exchanges):
        arrived(part)
        run(part, "grad_act")
        send_weights(part, (named("grad_w", part),))
        run(part, "grad_pairs", "combine")
        send_rows(part, (named("grad_x", part),))
        for later in exchanges[index + ahead : index + ahead + 1]:
            dispatch(later)
    _shared(builder, 1, True)
    for part in exchanges:
        run(part, *_WEIGHT_GRADIENTS)
    for part in exchanges:
        weights_home(part)
        rows_home(part)


def layers(ops: Sequence[Op], count: int) -> tuple[Op, ...]:
    """The operations of `count` equal layers, one after the other; names and buffers get the layer's number."""
    if count == 1:
        return tuple(ops)
    found = []
    for layer in range(count):
        mark = f"@{layer}"
        found += [
            replace(
                op,
                name=op.name + mark,
                reads=tuple(name + mark for name in op.reads),
                writes=tuple(name + mark for name in op.writes),
                flight=op.flight + mark if op.flight else "",
            )
            for op in ops
        ]
    return tuple(found)


def dag_of(ops: Sequence[Op]) -> nx.DiGraph:
    """The dependencies between operations by their names: "raw" by buffer, "order" between the group's exchanges.

    Node attribute `op`. Raises ValueError when an operation reads what a later one writes, or a name stands twice.
    """
    dag = nx.DiGraph()
    writer: dict[str, str] = {}
    wrote = {name for op in ops for name in op.writes}
    sent = ""
    for op in ops:
        if op.name in dag:
            raise ValueError(f"{op.name} stands twice")
        dag.add_node(op.name, op=op)
        for name in op.reads:
            if name in writer:
                dag.add_edge(writer[name], op.name, kind="raw")
            elif name in wrote:
                raise ValueError(f"{op.name} reads {name}, which is only written later")
        for name in op.writes:
            writer[name] = op.name
        if op.kind == "send":
            if sent and not dag.has_edge(sent, op.name):
                dag.add_edge(sent, op.name, kind="order")
            sent = op.name
    return dag
