"""A captured graph run by several ranks at once, each in a thread of its own: what their collectives bring is real.

For graphs that were captured with a fake process group, whose ranks do not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.collectives import read_all_to_all

_SECONDS = 20


class _Meeting:
    """Where the ranks bring something and take what all have brought."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=_SECONDS)
        self.brought: list[Any] = [None] * ranks

    def meet(self, rank: int, mine: Any) -> list[Any]:
        self.brought[rank] = mine
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class _Rank(Interpreter):
    def __init__(self, module: GraphModule, rank: int, meeting: _Meeting) -> None:
        super().__init__(module)
        self.rank, self.meeting = rank, meeting

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function" or op_name(n) not in ("all_to_all_single", "wait_tensor", "gather_experts"):
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        if op_name(n) == "wait_tensor":
            return args[0]
        if op_name(n) == "gather_experts":
            return torch.cat(self.meeting.meet(self.rank, args[0]))
        assert read_all_to_all(n) is not None
        sent, received, given, _ = args
        parts = [brought[self.rank] for brought in self.meeting.meet(self.rank, sent.split(list(given)))]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)


def run_ranks(module: GraphModule, inputs: Sequence[Sequence[Any]]) -> list[list[Tensor]] | None:
    """The tensors that each rank returns, for the inputs of each rank; None where any of them fails."""
    meeting = _Meeting(len(inputs))
    found: list[list[Tensor] | None] = [None] * len(inputs)

    def work(rank: int) -> None:
        try:
            with torch.no_grad():
                result = _Rank(module, rank, meeting).run(*inputs[rank])
        except Exception:
            meeting.barrier.abort()
            return
        flat = list(result) if isinstance(result, (tuple, list)) else [result]
        found[rank] = [item for item in flat if isinstance(item, Tensor)]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return None if any(result is None for result in found) else found  # type: ignore[return-value]
