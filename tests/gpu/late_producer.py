"""A race harness: a producer that lets its dependents start at once, sleeps, and only then writes what they read.

Everything that a kernel reads (weights excepted) lies in one piece of memory, everything that it writes in another. A
replay poisons both, starts the producer, and starts the kernel with the attribute behind it. The producer sleeps, then
counts what has been written meanwhile, then stores the inputs. A kernel that reads before its wait sees poison, and one
that writes before it is counted.

Poison is all bits set: NaN as a float, -1 as an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_compiler.graph_edges import read_edges

SLEEP_NS = 20_000
CHUNK = 4096
POISON = -1
_ALIGNMENT = 512


@triton.jit
def _late_producer(source, inputs, outputs, early, words, out_words, nanoseconds, CHUNK: tl.constexpr):
    """Trigger, sleep, count the words of `outputs` that are no longer poison, copy `source` to `inputs`."""
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    turns = 0
    while (now - begin < nanoseconds) & (turns < 1000000):
        now = tl.extra.cuda.globaltimer()
        turns += 1
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    found = tl.load(outputs + at, mask=at < out_words, other=-1, volatile=True)
    tl.atomic_add(early, tl.sum((found != -1).to(tl.int32), 0))
    tl.store(inputs + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def careless_copy(source, target, words, CHUNK: tl.constexpr, WAITS: tl.constexpr):
    """Copies without a wait (or, WAITS, with one): what the harness has to catch."""
    if WAITS:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


class Arena:
    """Tensors laid out in one piece of memory, by name; a list of tensors keeps its name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        flat = [(name, tensor) for name, value in values.items() for tensor in _tensors(value)]
        size = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in flat)
        self.words = torch.full((max(size, _ALIGNMENT) // 4,), POISON, dtype=torch.int32, device="cuda")
        self.values: dict[str, Any] = {}
        at = 0
        for name, value in values.items():
            placed = []
            for tensor in _tensors(value):
                view = self.words.view(torch.uint8)[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                view.copy_(tensor)
                placed.append(view)
                at += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            self.values[name] = None if value is None else placed if isinstance(value, list) else placed[0]


def _tensors(value: Any) -> list[Tensor]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def late_producer(source: Tensor, inputs: Tensor, outputs: Tensor, early: Tensor) -> None:
    """Launch the producer: its inputs are complete, as far as a wait can tell, when it ends."""
    programs = triton.cdiv(max(inputs.numel(), outputs.numel()), CHUNK)
    numbers = (inputs.numel(), outputs.numel(), SLEEP_NS)
    _late_producer[(programs,)](source, inputs, outputs, early, *numbers, CHUNK, num_warps=4)


def races(
    inputs: Arena, outputs: Arena, expected: Tensor, launch: Callable[[], object], replays: int
) -> tuple[int, int]:
    """(words written before the producer's end, replays whose results differ from `expected`).

    inputs hold what the kernel has to see; `launch` starts it, with the attribute, on the tensors of both arenas.
    Raises AssertionError when the captured launch is not programmatic: nothing would be shown then.
    """
    source = inputs.words.clone()
    early, wrong = (torch.zeros((), dtype=torch.int32, device="cuda") for _ in range(2))

    def sequence() -> None:
        inputs.words.fill_(POISON)
        outputs.words.fill_(POISON)
        late_producer(source, inputs.words, outputs.words, early)
        launch()
        wrong.add_((outputs.words != expected).any())

    sequence()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        sequence()
    assert any(edge.programmatic for edge in read_edges(graph)), "the kernel was launched plainly"
    graph.instantiate()
    early.zero_()
    wrong.zero_()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return int(early), int(wrong)
