"""A chain under way on a second stream, while the current one goes on with what is independent of it.

    fork   an event of the current stream, which the side stream waits for: all that was launched before is complete
    chain  on the side stream
    join   an event of the side stream, which the current stream waits for: the chain is complete

Both are full dependencies, no programmatic ones: a chain's first launch is a plain one in any case.

Why no memory is handed to anybody too early. The caching allocator knows one stream for each block of memory, the one
it was allocated on, and hands a freed block only to a later request of the same stream, on the grounds that what is
launched there runs later too. In a graph that is being captured it keeps to the same rule, with memory of the graph's
own. So:

- What the chain needs in between is allocated while the side stream is current, belongs to it, and is freed to it.
  Only a later chain on the same side stream can get it, and that one runs after this one.
- The results are allocated before the fork, on the current stream, and belong to it. Whoever had their memory before
  was launched on it before the fork, so the chain, behind the fork, writes after them. Nobody can free them before the
  join, since the `Flight` alone has them until then.
- The operands are the caller's. The `Flight` holds every one of them until the join, so their memory is not freed
  before it. Whoever gets it then is launched on the current stream behind the join. That Inductor does not use it
  again without freeing it is a matter of the operators' arguments, see `beside`.

A chain that is never joined (an error came in between) is let go of with its `Flight`: its memory is then marked as
used by the side stream, so that the allocator waits for that before it hands it on. Where a graph was being captured
there is nothing to protect: a capture with a fork that was never joined is invalid, and nothing of it is ever run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.chain.launcher import run
from moe_compiler.runtime_kernels.chain.prepared import flatten, prepare

__all__ = ["Flight", "side_of", "take_off"]

# By device and handle of the stream that is forked from. One for each, so that two captures never share a stream.
_sides: dict[tuple[int, int], torch.cuda.Stream] = {}


def side_of(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream beside `main`, always the same."""
    key = main.device_index, main.cuda_stream
    side = _sides.get(key)
    # torch has a number of streams and deals them out in turn, so a new one can be the current one itself.
    while side is None or side.cuda_stream == main.cuda_stream:
        side = _sides[key] = torch.cuda.Stream(main.device)
    return side


class Flight:
    """A chain under way on a side stream, with everything that must stay until it is joined."""

    def __init__(self, outputs: Sequence[Tensor], operands: Sequence[Tensor], side: torch.cuda.Stream) -> None:
        self._outputs = list(outputs)
        self._operands = tuple(operands)
        self._side = side
        self._landed = False
        self._done = side.record_event()

    def land(self) -> list[Tensor]:
        """Make the current stream wait for the chain; its results. Once."""
        torch.cuda.current_stream(self._side.device).wait_event(self._done)
        self._landed = True
        self._operands = ()
        return self._outputs

    def __del__(self) -> None:
        if not self._landed and suppress is not None:  # it is None at the end of the process
            with suppress(RuntimeError, AttributeError):
                for tensor in (*self._operands, *self._outputs):
                    tensor.record_stream(self._side)


def take_off(tensors: Sequence[Tensor], text: str) -> Flight:
    """Launch a chain on the side stream of the current one. The tensors' device must be the current one.

    Raises what `launcher.run` raises; whatever was launched until then has been joined.
    """
    outputs = prepare(text).outputs_for(tensors)
    main = torch.cuda.current_stream()
    side = side_of(main)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            run(tensors, text, outputs)
    except BaseException:
        main.wait_stream(side)
        raise
    return Flight(flatten(list(outputs.values())), tensors, side)
