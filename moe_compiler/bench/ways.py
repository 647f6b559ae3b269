"""What is compared: moepdl, eager, Inductor in each spelling that can win, and peers; each a call of x [T, H]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_compiler.backend import last_reports
from moe_compiler.bench.block import SPELLINGS, Block
from moe_compiler.bench.peers import Peer, PeerBlock
from moe_compiler.report import Report

__all__ = ["EAGER", "INDUCTOR", "OURS", "Compiled", "Way", "inductor_spellings", "usual_spelling"]

OURS, EAGER, INDUCTOR = "moepdl", "eager", "inductor"


@dataclass
class Way:
    """name: its column. call: x [T, H] -> y [T, H]. label: which of a column's ways, e.g. the spelling.

    peer: what it was given, for a peer.
    """

    name: str
    call: Callable[[Tensor], Tensor]
    label: str = ""
    peer: PeerBlock | None = None

    @property
    def title(self) -> str:
        """Name and label, different for each way of a row."""
        return f"{self.name} {self.label}".strip()


def inductor_spellings(block: Block, tokens: int) -> tuple[str, ...]:
    """The spellings that can be Inductor's better one.

    batched_mm reads, writes and reads again one expert a pair; where that is twice all experts, grouped_mm has won.
    """
    if block.gate_up.dtype is not torch.bfloat16:
        return (usual_spelling(block),)
    pairs = tokens * block.shape.k
    return SPELLINGS if pairs <= 2 * block.shape.experts else ("grouped_mm",)


def usual_spelling(block: Block) -> str:
    """grouped_mm, which torch compiles in bfloat16 only; in other types batched_mm."""
    return "grouped_mm" if block.gate_up.dtype is torch.bfloat16 else "batched_mm"


@dataclass
class Compiled:
    """The compiled twins of one block, so that no way's compile stands in another's cache.

    options: of the backend. dynamic: moepdl is compiled once for all T from 2 on, not once for each.
    """

    block: Block
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = True
    _ours: dict[tuple[bool, int], tuple[Callable[[Tensor], Tensor], list[Report]]] = field(default_factory=dict)
    _reports: list[Report] = field(default_factory=list)

    def eager(self) -> Way:
        """The block itself, in the spelling that gathers no weights."""
        return Way(EAGER, self.block, "grouped_mm")

    def inductor(self, spelling: str) -> Way:
        """The block in one spelling, for one number of tokens."""
        twin = self.block.twin(spelling)
        return Way(INDUCTOR, torch.compile(twin, backend="inductor", dynamic=False), spelling)

    def ours(self, x: Tensor) -> Way:
        """moepdl, for the number of tokens of x; compiled, at the latest, by a first call here."""
        from moe_compiler.demo import backend_or_function

        tokens, spelling = x.shape[0], usual_spelling(self.block)
        dynamic = self.dynamic and tokens > 1
        key = (x.requires_grad, 0 if dynamic else tokens)
        if key not in self._ours:
            backend, options = backend_or_function(OURS), dict(self.options)
            twin = self.block.twin(spelling)
            compiled = torch.compile(twin, backend=backend, dynamic=None if dynamic else False, options=options)
            # On a tensor of its own: the mark would make the other ways' compiles dynamic too.
            first = x.detach().requires_grad_(x.requires_grad)
            if dynamic:
                torch._dynamo.maybe_mark_dynamic(first, 0)
            before = last_reports()
            compiled(first)
            reports = [report for report in last_reports() if not any(report is old for old in before)]
            self._ours[key] = compiled, reports
        compiled, self._reports = self._ours[key]
        return Way(OURS, compiled, spelling)

    def not_rewritten(self) -> str:
        """Why what `ours` returned last left the block to Inductor; empty when it did not."""
        if any(report.matches for report in self._reports):
            return ""
        reasons = [reason for r in self._reports for reason in (*r.errors, *(miss.reason for miss in r.misses))]
        return f"not rewritten, what was timed is Inductor's: {'; '.join(reasons) or 'no block was found'}"

    def peers(
        self, peers: Mapping[str, Peer], inputs: Sequence[Tensor], direction: str
    ) -> dict[str, Callable[[], Way | None]]:
        """For each peer a function that makes its way for these inputs, None where it offers none."""
        return {name: partial(self._peer, name, peer, inputs, direction) for name, peer in peers.items()}

    def _peer(self, name: str, peer: Peer, inputs: Sequence[Tensor], direction: str) -> Way | None:
        given = PeerBlock(self.block, inputs, direction)
        call = peer(given)
        return None if call is None else Way(name, call, peer=given)
