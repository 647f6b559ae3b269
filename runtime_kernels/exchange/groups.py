"""The ranks of an exchange: a process group by its name, how far it has come, and whether it is broken.

The only place of this package that touches private names of torch.distributed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


class GroupError(RuntimeError):
    """There is no process group of the name that an operator carries."""


@dataclass
class Group:
    """A process group as this rank sees it.

    epoch: how many exchanges it has begun; broken: why it can no longer be used, "" while it can.
    """

    name: str
    rank: int
    ranks: int
    backend: str
    epoch: int = 0
    broken: str = ""
    _process_group: Any = field(default=None, repr=False)

    @property
    def process_group(self) -> Any:
        return self._process_group()

    @property
    def fake(self) -> bool:
        """A group whose other ranks do not exist, for compiling alone."""
        return self.backend == "fake"

    @property
    def store(self) -> Any:
        """The group's own c10d store."""
        from torch.distributed import distributed_c10d

        return distributed_c10d._get_process_group_store(self.process_group)

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)


_known: dict[str, Group] = {}


def group(name: str) -> Group:
    """The group of a name. Raises GroupError when there is none."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    try:
        found = resolve(name)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise GroupError(
            f"there is no process group {name!r} in this process; an expert-parallel block runs where "
            "torch.distributed was initialised as it was when the block was compiled"
        ) from error
    known = _known.get(name)
    if known is None or known.process_group is not found:
        backend = str(dist.get_backend(found))
        known = Group(name, found.rank(), found.size(), backend, _process_group=weakref.ref(found))
        _known[name] = known
    return known
