"""Where Dynamo broke a model into pieces: what broke, at which line of the user's, and what helps.

Three sources, since a break is seen in different places: the graph that ended there carries its reason; a frame that
Dynamo skipped, or that left no graph, never reaches a backend and is found among the frames that Dynamo has looked at;
and `fullgraph=True` raises what really stands in the way.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch.fx import GraphModule

from moe_compiler import torch_private
from moe_compiler.report import FragmentRecord

__all__ = ["WATCH", "Watch", "fragment", "fragment_of_error", "fragment_of_graph", "sentence"]

_PREPARE = "moe_compiler.prepare(model), where this is a loop over experts: no flag helps where Python waits for data"
_SIZES = "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
_NUMBERS = "torch._dynamo.config.capture_scalar_outputs = True"
_THEN = "; where a loop or branch then depends on it, moe_compiler.prepare(model)"
_SHOWN = "fullgraph=True makes it an error with Dynamo's own explanation; take what it names out of the model"

_OWN_ERROR = (
    "look for code that is skipped under torch.compile (is_compiling()): give the model the input that it makes up "
    "there in eager, an attention_mask for example"
)
_LARGER_BUCKETS = (
    "torch._dynamo.config.optimize_ddp = False keeps the graph whole, and a larger bucket_cap_mb of "
    "DistributedDataParallel cuts it less often"
)

# (what Dynamo's text contains, what it means in short, what helps), the first that fits.
_KINDS: tuple[tuple[str, str, str], ...] = (
    ("DDPOptimizer", "DistributedDataParallel cuts it where a bucket of gradients is full", _LARGER_BUCKETS),
    ("Could not extract specialized integer", "Python needs a number that only the data decides", _PREPARE),
    ("Could not guard on data-dependent", "a branch depends on the data", _PREPARE),
    ("Data-dependent branching", "a branch depends on the data", _PREPARE),
    ("data-dependent expression", "Python needs a number that only the data decides", _PREPARE),
    ("Dynamic shape operator", "the size of a result depends on the data", f"fullgraph=True, or {_SIZES}{_THEN}"),
    ("Tensor.item()", "a number is read out of a tensor", f"fullgraph=True, or {_NUMBERS}{_THEN}"),
    ("_local_scalar_dense", "a number is read out of a tensor", f"fullgraph=True, or {_NUMBERS}{_THEN}"),
    ("numpy", "values go to numpy", _PREPARE),
    ("Observed exception", "the model's own code raises while Dynamo runs through it", _OWN_ERROR),
)


def fragment(reason: str, where: str, function: str = "", *, compiled: bool = True) -> FragmentRecord:
    """The record of one break; `reason` is Dynamo's text, `where` is `file:line`, `compiled` as in FragmentRecord."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    first = lines[0] if lines else "graph break"
    detail = next((line for line in lines if line.startswith("Explanation: ")), "").removeprefix("Explanation: ")
    meaning, remedy = next(((m, r) for text, m, r in _KINDS if text in reason), ("", _SHOWN))
    raised = re.search(r"raised exception (.+)", reason)
    first = f"{first}: {raised[1]}" if raised else first
    said = detail if first in ("Dynamic shape operator", "Data dependent operator") and detail else first
    said = said.removeprefix("Consider annotating your code using torch._check*(). ")
    return FragmentRecord(
        reason=f"{meaning}: {said}" if meaning else said,
        where=_with_code(where),
        remedy=remedy,
        function=function,
        compiled=compiled,
    )


def fragment_of_graph(module: GraphModule) -> FragmentRecord | None:
    """The break that ended a graph; None when its frame was captured whole."""
    found = torch_private.subgraph_break(module)
    return fragment(*found) if found is not None else None


def fragment_of_error(error: BaseException) -> FragmentRecord:
    """The break that `fullgraph=True` raised."""
    return fragment(*torch_private.break_of(error))


def sentence(record: FragmentRecord) -> str:
    """Reason and line, for a sentence."""
    return f"{record.reason} at {record.where}" if record.where else record.reason


class Watch:
    """Reads, each time, the frames that Dynamo has looked at since the last time."""

    def __init__(self) -> None:
        self._read = 0
        self._aside: set[int] = set()

    def unseen(self, seen: Collection[str]) -> dict[str, FragmentRecord]:
        """The breaks since the last call whose frame has no graph in a backend, by compile id.

        seen: the compile ids of the frames that have one. A frame that was skipped runs in eager, whatever is in it.
        """
        found: dict[str, FragmentRecord] = {}
        for frame in torch_private.compiled_frames(self._read):
            self._read = max(self._read, frame.started)
            reason = frame.failure or frame.broken
            if not reason or frame.started in self._aside or (not frame.failure and frame.identity in seen):
                continue
            found[frame.identity] = fragment(reason, frame.where, _named(frame.function), compiled=False)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What Dynamo looks at in this block is a question of ours and no compile of the user's."""
        before = max((frame.started for frame in torch_private.compiled_frames()), default=0)
        try:
            yield
        finally:
            self._aside |= {frame.started for frame in torch_private.compiled_frames(before)}


WATCH = Watch()


def _named(function: str) -> str:
    """The user's name of a frame: Dynamo calls what follows a break torch_dynamo_resume_in_NAME_at_LINE."""
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", function)
    return f"{resumed[1]}, from line {resumed[2]} on" if resumed else function


def _with_code(where: str) -> str:
    path, _, number = where.rpartition(":")
    code = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f"{where}: {code}" if code else where
