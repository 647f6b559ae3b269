"""The transport over torch.distributed: gloo on CPUs, NCCL on GPUs. What others are checked with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_compiler.runtime_kernels.exchange.groups import Group

# The latest collectives on CPUs stay referred to after they are over. A thread of gloo's drops its own reference a
# moment after the wait has ended, under a lock that the start of the next collective takes with the GIL held; were it
# the last reference, the thread would need the GIL to free the tensors, and both would wait for ever. Their memory is
# freed all the same, see `flight.Flight.landed`.
_LATEST: deque[object] = deque(maxlen=256)


class _Work:
    """A collective of torch.distributed. It keeps both buffers until it is over."""

    def __init__(self, work: Any, buffers: tuple[Tensor, Tensor], on_device: bool) -> None:
        self.work, self.buffers, self.on_device = work, buffers, on_device

    def wait(self, seconds: float) -> bool:
        if self.on_device:
            self.work.wait()
            return True
        try:
            self.work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self.work.is_completed():
                return False
            # It has failed, or it ended between the end of the wait and the question: then this returns at once.
            self.work.wait(timedelta(seconds=1))
        return True


class TorchTransport:
    """`all_to_all_single` of torch.distributed, asynchronous."""

    name = "torch.distributed"

    def start(
        self, group: Group, send: Tensor, received: Tensor, send_rows: Sequence[int], received_rows: Sequence[int]
    ) -> _Work:
        # The group's own timeout counts from here, ours at the wait; the shorter one is met first.
        work = dist.all_to_all_single(
            received, send, list(received_rows), list(send_rows), group=group.process_group, async_op=True
        )
        if send.device.type == "cpu":
            _LATEST.append((work, send, received))
        return _Work(work, (send, received), send.device.type != "cpu")


TORCH = TorchTransport()
