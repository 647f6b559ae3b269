"""One exchange from its start to its wait, and the proof that all ranks are in the same one.

Ranks that come to different exchanges must not pair up: the bytes of one would be taken for those of another, or, where
the sizes differ, the library underneath would end the process. So on CPUs a message of fixed size goes ahead of every
exchange, and says which exchange its rank is in. A rank that cannot take part (too many tokens) says so there as well.
On a device the host asks nothing of the peers, and the limits are those of NCCL.

Every wait ends after `timeout_s`. A rank that waits for long tells the group's store what for, so that whoever gives up
first can tell who is missing from who waits too. After a failure the group is broken: nothing that was under way can be
told from what comes next.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.exchange import faults
from moe_compiler.runtime_kernels.exchange.groups import Group, group
from moe_compiler.runtime_kernels.exchange.transport import Handle, transport_of

_NOTICE = 512  # bytes of the message that goes ahead
# After so many seconds, or a quarter of the timeout, a rank tells the store what it waits for.
_PATIENCE = 1.0
# The share of the timeout that is left for finding out whom to blame, and the most seconds of it.
_BLAME, _MOST_BLAME = 0.1, 3.0
_TRY = (
    "look at that rank's own log first; all ranks must run the same blocks in the same order, with the same options; "
    'options={"timeout_s": ...} gives slower ranks more time'
)


@dataclass
class Flight:
    """An exchange that was started: who, what, and where the bytes arrive ([m, M] uint8)."""

    group: Group
    layer: str
    phase: str
    epoch: int
    timeout_s: float
    handle: Handle | None
    received: Tensor

    def land(self) -> Tensor:
        """What the others sent, when all of it is there. Raises the error about peers."""
        if self.handle is not None:
            wait(self.handle, self.group, self.layer, self.phase, self.epoch, self.timeout_s)
            self.handle = None
        return self.received


def take_off(
    name: str,
    send: Tensor,
    layer: str,
    phase: str,
    timeout_s: float,
    *,
    send_rows: Sequence[int] | None = None,
    received_rows: Sequence[int] | None = None,
) -> Flight:
    """Start an exchange of rows [n, M] uint8 in the group of that name; without numbers, one row for each rank.

    Raises the error about peers when they are found to be elsewhere.
    """
    group_ = _usable(name, layer, phase)
    sends = [1] * group_.ranks if send_rows is None else list(send_rows)
    receives = [1] * group_.ranks if received_rows is None else list(received_rows)
    group_.epoch += 1
    received = send.new_empty((sum(receives), send.shape[1]))
    if group_.fake:  # nobody sends anything: zeros
        return Flight(group_, layer, phase, group_.epoch, timeout_s, None, received.zero_())
    if send.device.type == "cpu":
        agree(group_, layer, phase, timeout_s, {"bytes": send.shape[1]})
    # An exchange of nothing (rows of no bytes) is one nevertheless, but not one that a library would have to know.
    handle = transport_of(group_).start(group_, send, received, sends, receives) if send.shape[1] else None
    return Flight(group_, layer, phase, group_.epoch, timeout_s, handle, received)


def refuse(name: str, error: BaseException, layer: str, phase: str, timeout_s: float, device: torch.device) -> None:
    """Tell the others that this rank cannot take part in the exchange that they are in, and raise `error`."""
    group_ = _usable(name, layer, phase)
    group_.epoch += 1
    if not group_.fake and device.type == "cpu":
        with suppress(RuntimeError):  # the others' trouble: this rank has its own to tell
            agree(group_, layer, phase, timeout_s, {"refused": str(error).splitlines()[0][:200]})
    group_.broken = group_.broken or str(error)
    raise error


def _usable(name: str, layer: str, phase: str) -> Group:
    found = group(name)
    if found.broken:
        raise faults.peer_fault(
            f"{phase} of {layer or 'a block'}: the group {name!r} is not used any more, an earlier exchange in it has "
            "failed",
            why=found.broken.splitlines()[0],
            try_="end this process: start the run anew, or make a new process group",
            ranks=(),
            layer=layer,
            phase=phase,
            epoch=found.epoch,
        )
    return found


def agree(group_: Group, layer: str, phase: str, timeout_s: float, facts: dict[str, Any]) -> None:
    """Raise the error about peers unless every rank is in this very exchange. Returns when all have come."""
    own = {"epoch": group_.epoch, "layer": layer[-120:], "phase": phase, **facts}
    text = json.dumps(own).encode()[:_NOTICE].ljust(_NOTICE)
    send = torch.frombuffer(bytearray(text), dtype=torch.uint8).expand(group_.ranks, _NOTICE).contiguous()
    received = torch.empty_like(send)
    ones = [1] * group_.ranks
    handle = transport_of(group_).start(group_, send, received, ones, ones)
    wait(handle, group_, layer, phase, group_.epoch, timeout_s)
    others = [bytes(row.tolist()) for row in received]
    wrong = [rank for rank, said in enumerate(others) if said != text]
    if wrong:
        raise _broken(
            group_,
            tuple(wrong),
            f"{phase} of {layer or 'a block'} (exchange {group_.epoch} of group {group_.name!r}): "
            + "; ".join(f"rank {rank} {_elsewhere(others[rank])}" for rank in wrong[:4]),
            f"rank {group_.rank} is in {_place(own)}",
            layer,
            phase,
        )


def _elsewhere(said: bytes) -> str:
    try:
        told = json.loads(said.decode().strip())
    except ValueError:
        return "is in an exchange that is none of ours"
    if told.get("refused"):
        return f"cannot take part: {told['refused']}"
    return f"is in {_place(told)}"


def _place(told: dict[str, Any]) -> str:
    size = f", {told['bytes']} bytes a rank" if "bytes" in told else ""
    return f"{told.get('phase')} of {told.get('layer') or 'a block'}, exchange {told.get('epoch')}{size}"


def wait(handle: Handle, group_: Group, layer: str, phase: str, epoch: int, timeout_s: float) -> None:
    """Wait for an exchange; raise the error about peers, within `timeout_s`, when it does not end well."""
    begun = time.monotonic()
    blame_s = min(_BLAME * timeout_s, _MOST_BLAME)
    patience = min(_PATIENCE, timeout_s / 4)
    here = f"{phase} of {layer or 'a block'} (exchange {epoch} of group {group_.name!r})"
    told = False
    try:
        if handle.wait(patience):
            return
        told = _tell(group_, epoch, layer, phase)
        if handle.wait(max(timeout_s - blame_s - patience, 0.001)):
            return
        why = f"it did not come within {timeout_s:g} s"
    except RuntimeError as error:
        why = f"the connection failed: {_reason(error)}"
    if not told:
        _tell(group_, epoch, layer, phase)
    missing = _missing(group_, epoch, begun + timeout_s, blame_s)
    who = ", ".join(f"rank {rank}" for rank in missing[:8]) or "a peer"
    raise _broken(group_, missing, f"{here}: no answer from {who}", why, layer, phase)


def _reason(error: RuntimeError) -> str:
    """The sentence of a library's error, without the place in its source and its advice."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).partition(" This is typically")[0]


def _broken(group_: Group, ranks: tuple[int, ...], what: str, why: str, layer: str, phase: str) -> BaseException:
    error = faults.peer_fault(what, why=why, try_=_TRY, ranks=ranks, layer=layer, phase=phase, epoch=group_.epoch)
    group_.broken = str(error)
    return error


def _key(rank: int) -> str:
    return f"moepdl/waits/{rank}"


def _tell(group_: Group, epoch: int, layer: str, phase: str) -> bool:
    """Leave in the store what this rank waits for; a store that is gone is no further error."""
    try:
        group_.store.set(_key(group_.rank), json.dumps({"epoch": epoch, "layer": layer, "phase": phase}))
    except RuntimeError:
        return False
    return True


def _missing(group_: Group, epoch: int, deadline: float, blame_s: float) -> tuple[int, ...]:
    """The ranks that have not told that they wait in this exchange too; all others when the store is gone."""
    others = [rank for rank in range(group_.ranks) if rank != group_.rank]
    until = min(time.monotonic() + blame_s, deadline)
    missing = others
    while missing:
        try:
            missing = [rank for rank in missing if not _waits(group_, rank, epoch)]
        except RuntimeError:
            break
        if not missing or time.monotonic() >= until:
            break
        time.sleep(0.05)
    return tuple(missing)


def _waits(group_: Group, rank: int, epoch: int) -> bool:
    store = group_.store
    if not store.check([_key(rank)]):
        return False
    return int(json.loads(store.get(_key(rank)))["epoch"]) >= epoch
