"""What carries messages between the ranks of a group, behind one interface.

A transport starts an all-to-all of bytes and returns something to wait for. Nothing above it knows how the bytes
travel; nothing in it knows what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moe_compiler.runtime_kernels.exchange.groups import Group

TRANSPORTS = ("torch",)


class Handle(Protocol):
    """An exchange under way."""

    def wait(self, seconds: float) -> bool:
        """Whether it is complete after at most `seconds`; raises RuntimeError when it has failed.

        On a device it is the current stream that waits, and the answer is True.
        """


class Transport(Protocol):
    """Carries bytes; `name` is what a report shows."""

    name: str

    def start(
        self, group: Group, send: Tensor, received: Tensor, send_rows: Sequence[int], received_rows: Sequence[int]
    ) -> Handle:
        """Start sending the rows of `send` [n, M] uint8, `send_rows[r]` of them to rank r, in the order of the ranks,
        into `received` [m, M] of the others. Both are read or written until the wait is over.
        """


def transport_of(group: Group) -> Transport:
    """The transport that carries a group's messages."""
    from moe_compiler.runtime_kernels.exchange.torch_transport import TORCH

    return TORCH
