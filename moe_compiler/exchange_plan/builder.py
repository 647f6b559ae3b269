"""Writes the operations of a block down one after the other, each with what it takes on every class of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from moe_compiler.block_program import BlockSizes, backward_program, forward_program
from moe_compiler.cost import load_cost
from moe_compiler.device_model import DeviceModel
from moe_compiler.exchange_plan.operation import Op, Rows, Way
from moe_compiler.exchange_plan.traffic import Load, Part, Traffic
from moe_compiler.runtime_kernels.chain.program import Launch

__all__ = ["Block", "Builder", "in_part", "shared_us"]

# Kernels that work on every slot, and those that compute live rows only but fill the others with zeros.
_BY_SLOT = frozenset({"order", "order_count", "order_scatter", "combine", "grad_input_weights"})
_ZEROED = frozenset({"down", "grad_pairs"})
# Whose numbers a copy of rows and a dense matmul are given.
_COPY, _MATMUL = "combine", "gate_up"
# What crosses with a row for each of its k choices: its expert, and its weight in the dtype of the tokens.
_ID_BYTES = 8


@dataclass(frozen=True)
class Block:
    """A block of a model: its sizes, the width of its shared expert (0: none), and whether the forward saves."""

    sizes: BlockSizes
    shared: int = 0
    save: bool = False

    @property
    def row_bytes(self) -> int:
        """Of a row of H elements."""
        return self.sizes.hidden * self.sizes.named["w"]

    @property
    def choices_bytes(self) -> int:
        """Of the ids and weights that go with a row."""
        return self.sizes.k * (_ID_BYTES + self.sizes.named["w"])


@dataclass(frozen=True)
class Builder:
    """The operations so far, and what they are written for.

    every_slot: as the kernels do, the sort, the sum over k and the filling with zeros go over unused slots and choices
    of other ranks too; False: as if they did not.
    """

    block: Block
    traffic: Traffic
    model: DeviceModel
    way: Way
    every_slot: bool = True
    ops: list[Op] = field(default_factory=list)

    def parts(self) -> tuple[Part, ...]:
        """The parts of the rows that have launches of their own."""
        if self.way.order == "local_first":
            return (Part("local", "local"), Part("remote", "remote"))
        if self.way.order == "chunks":
            return tuple(Part(f"chunk{index}", "all", self.way.chunks) for index in range(self.way.chunks))
        return (Part(""),)

    def router(self) -> None:
        """The launches of the router, over the rank's own tokens."""
        t, experts = self.traffic, float(self.block.sizes.experts)
        tokens = int(t.tokens.max())
        every = torch.full_like(t.tokens, experts)
        own = Load(float(tokens), t.tokens, t.tokens * t.k, every, every)
        for item in _router(self.block.sizes, self.block.save, tokens):
            self._launch(item, self._times(item.kernel, own, 1, every_slot=False), "", {})

    def launches(self, part: Part, direction: str) -> tuple[Launch, ...]:
        """The compiler's launches over the rows of a part, for as many experts as a rank has at most."""
        own = replace(self.block.sizes, experts=max(int(self.traffic.experts.max()), 1))
        return _experts(own, self.block.save, self.traffic.slots(part), direction)

    def run(
        self, items: Iterable[Launch], part: Part, given: dict[str, str], columns: int = 1, name: str | None = None
    ) -> None:
        """Launches over the rows of a part. Their buffers are the part's own but those that `given` names.

        columns: they make one of so many blocks of the hidden columns, called `name`.
        """
        load = self.traffic.load(part)
        for item in items:
            times = self._times(item.kernel, load, columns, every_slot=self.every_slot)
            self._launch(item, times, part.name if name is None else name, given)

    def shared(self, half: int, *, backward: bool = False) -> None:
        """Half of the shared expert: gate and up, or down; in the backward down's two gradients, or gate's and up's."""
        if not self.block.shared:
            return
        names = ("shared_grad_down", "shared_grad_gate_up") if backward else ("shared_gate_up", "shared_down")
        between = "shared_grad_act" if backward else "shared_act"
        first, last = ("grad_y", "shared_grad_x") if backward else ("x", "shared_y")
        reads, writes = ((first, between), (between, last))[half]
        us = shared_us(self.block, self.model, self.traffic.tokens, half, backward=backward)
        self.ops.append(Op(names[half], "launch", us, (reads,), (writes,)))

    def start(
        self, name: str, rows: Rows, reads: Sequence[str], prepared: Tensor | None, own: Sequence[str] = ()
    ) -> None:
        """Begin an exchange. prepared: bytes that a kernel moves before; own: what it writes besides the rows sent."""
        us = torch.zeros_like(self.traffic.tokens)
        started = us if prepared is None else self._copy_us(prepared)
        self.ops.append(Op(f"{name}_start", "launch", started, tuple(reads), (f"{name}.token", *own)))
        self.ops.append(Op(name, "send", us, (f"{name}.token",), (f"{name}.sent",), rows=rows))

    def wait(self, name: str, reads: Sequence[str], writes: Sequence[str], moved: Tensor | None) -> None:
        """End an exchange; moved: bytes of the kernel that adds up what arrived."""
        us = torch.zeros_like(self.traffic.tokens) if moved is None else self._copy_us(moved)
        self.ops.append(Op(f"{name}_wait", "wait", us, (f"{name}.sent", *reads), tuple(writes), flight=name))

    def out_bytes(self, row: int, of: int) -> Tensor:
        """Bytes that the start of a dispatch moves: own rows to their slots, and rows packed where they must be."""
        t = self.traffic
        packed = t.near + t.far if self.way.out.transport.packs else torch.zeros_like(t.near)
        return 2.0 * row * (t.kept + packed) / of

    def home_bytes(self, row: int, of: int) -> Tensor:
        """Bytes that the end of a way home moves: the rows of a token's ranks added up."""
        t = self.traffic
        return row * (t.kept + t.near + t.far + t.tokens) / of

    def _copy_us(self, moved: Tensor) -> Tensor:
        return self.model.kernels[_COPY].times_us(moved, torch.zeros_like(moved))

    def _times(self, kernel: str, load: Load, columns: int, *, every_slot: bool) -> Tensor:
        named = {**self.block.sizes.named, "H": self.block.sizes.hidden // columns}
        bytes_of, work_of = load_cost(kernel, tuple(sorted((name, named[name]) for name in "HINw")))
        rows, pairs, every = load.rows, load.pairs, load.slots * self.traffic.k
        if every_slot and kernel in _BY_SLOT:
            rows, pairs = torch.full_like(rows, load.slots), torch.full_like(pairs, every)
        zero = torch.zeros_like(rows)
        moved = bytes_of(rows, pairs, load.hit, load.experts) + zero
        if every_slot and kernel in _ZEROED:
            moved = moved + (every - pairs) * named["H"] * named["w"]
        work = work_of(rows, pairs, load.hit, load.experts) + zero
        return self.model.kernels[kernel].times_us(moved, work)

    def _launch(self, item: Launch, us: Tensor, part: str, given: dict[str, str]) -> None:
        def name(buffer: str) -> str:
            return given.get(buffer, in_part(buffer, part))

        reads = tuple(name(buffer) for buffer in item.ins.values() if buffer is not None)
        writes = tuple(name(buffer) for buffer in item.outs.values())
        self.ops.append(Op(in_part(item.kernel, part), "launch", us, reads, writes, pdl=item.pdl))


def shared_us(block: Block, model: DeviceModel, rows: Tensor, half: int, *, backward: bool) -> Tensor:
    """Microseconds of half of the shared expert, as Inductor's dense matmuls; see `Builder.shared`. rows: float64."""
    gate_up, down = (block.sizes.hidden, 2 * block.shared), (block.shared, block.sizes.hidden)
    inner, outer = ((down, gate_up) if backward else (gate_up, down))[half]
    products = 2 if backward else 1
    moved = (inner * outer + rows * (inner + outer)) * block.sizes.named["w"] * products
    return model.kernels[_MATMUL].times_us(moved, 2 * rows * inner * outer * products)


def in_part(name: str, part: str) -> str:
    """A buffer or a launch of a part."""
    return f"{name}.{part}" if part else name


@lru_cache(maxsize=64)
def _router(sizes: BlockSizes, save: bool, tokens: int) -> tuple[Launch, ...]:
    launches = forward_program(sizes, save=save).variant_for(tokens).launches
    return tuple(item for item in launches if item.kernel in ("router_logits", "route"))


@lru_cache(maxsize=256)
def _experts(sizes: BlockSizes, save: bool, slots: int, direction: str) -> tuple[Launch, ...]:
    program = backward_program(sizes) if direction == "backward" else forward_program(sizes, save=save, router=False)
    return program.variant_for(slots).launches
