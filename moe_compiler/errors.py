"""What a user reads when something is refused or goes wrong.

Every error of the compiler is a `MoepdlError`: one line says what happened and at which line of the user's model,
then `why:` and `try:`. One class per kind of failure, so that a test or a caller can tell them apart without reading
text. Our own stack is of use to us only: the command line shows it with `MOEPDL_VERBOSE=1`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

# Below this similarity (0 to 1, as difflib measures it) a name is no slip of the pen, and naming another only misleads.
_NEAR = 0.6


def near_name(name: str, known: Collection[str]) -> str:
    """The one of `known` that `name` is nearly spelled like; "" when it is like none of them."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)), "")


class MoepdlError(RuntimeError):
    """Base of every error raised by moepdl.

    what:  one line, what happened
    why:   the rule or limit behind it
    try_:  what the user can do about it
    where: the user's line, `file:line: code`, when a line of the model is to blame
    """

    def __init__(self, what: str, *, why: str = "", try_: str = "", where: str = "") -> None:
        self.what = what
        self.why = why
        self.try_ = try_
        self.where = where
        super().__init__(self.text())

    def text(self) -> str:
        """The message: `what` with the user's line, then the lines `why:` and `try:` that are known."""
        lines = [f"{self.what} (at {self.where})" if self.where else self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.try_:
            lines.append(f"  try: {self.try_}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, with the class name under `error`; what `--json` prints."""
        fields = {name.rstrip("_"): value for name, value in vars(self).items() if not name.startswith("_")}
        return {"error": type(self).__name__, **fields}

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive the default protocol, and errors cross process borders in distributed
        # runs.
        return (_rebuild, (type(self), dict(vars(self))))


def _rebuild(cls: type[MoepdlError], fields: dict[str, Any]) -> MoepdlError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    error.args = (error.text(),)
    return error


class UsageError(MoepdlError):
    """The command line names something that is not there, or asks for what cannot be; exit code 2."""


class OptionError(MoepdlError):
    """An option has an unknown key, an unknown name or a value that is not allowed, as argument or as
    `MOEPDL_<KEY>`.
    """


class CaptureError(MoepdlError):
    """Dynamo's graph could not be traced into the one dialect that the passes read. The graph then belongs to
    Inductor unchanged.
    """


class PassError(MoepdlError):
    """A pass failed, or left a graph that breaks an invariant.

    pass_name: the pass, as `options["disable"]` spells it
    invariant: the rule that no longer holds; empty when the pass itself raised
    node:      the first node that breaks it
    repro:     path of the file that reruns the pass on the graph it got, when one was written
    """

    def __init__(
        self,
        pass_name: str,
        problem: str,
        *,
        invariant: str = "",
        node: str = "",
        repro: str = "",
        why: str = "",
        try_: str = "",
        where: str = "",
    ) -> None:
        self.pass_name = pass_name
        self.problem = problem
        self.invariant = invariant
        self.node = node
        self.repro = repro
        what = f"pass {pass_name}: {problem}"
        if invariant:
            what += f" [invariant: {invariant}]"
        if node:
            what += f" [node: {node}]"
        if not try_:
            try_ = f'options={{"disable": ["{pass_name}"]}}' + (
                f", and attach {repro} to a bug report" if repro else ""
            )
        super().__init__(what, why=why, try_=try_, where=where)


class VerifyError(MoepdlError):
    """A proof obligation failed: a chain's waits and triggers, a collective order, or a numeric comparison of
    `verify="numeric"`.

    check: name of the check that failed
    node:  the launch or node it failed on
    """

    def __init__(
        self, what: str, *, check: str = "", node: str = "", why: str = "", try_: str = "", where: str = ""
    ) -> None:
        self.check = check
        self.node = node
        super().__init__(what, why=why, try_=try_, where=where)


class KernelError(MoepdlError):
    """A kernel cannot be compiled or launched for these shapes, dtypes or this device.

    kernel: the kernel's registered name
    """

    def __init__(self, kernel: str, problem: str, *, why: str = "", try_: str = "", where: str = "") -> None:
        self.kernel = kernel
        self.problem = problem
        super().__init__(f"kernel {kernel}: {problem}", why=why, try_=try_, where=where)


class PdlUnavailable(MoepdlError):
    """`pdl="on"` was asked for, and the device or a kernel of the chain cannot launch programmatically."""


class MatchRequired(MoepdlError):
    """`require_match` was set and fewer blocks matched. `why` holds the near misses, one after the other."""


class PrepareError(MoepdlError):
    """`moe_compiler.prepare` or `expert_parallel` cannot change this model as asked."""


class CapacityError(MoepdlError):
    """A rank of an expert-parallel group has more tokens than the group's exchange has room for.

    tokens, capacity: how many there are, and how many were agreed on; layer: the block
    """

    def __init__(
        self,
        what: str,
        *,
        tokens: int = 0,
        capacity: int = 0,
        layer: str = "",
        why: str = "",
        try_: str = "",
        where: str = "",
    ) -> None:
        self.tokens = tokens
        self.capacity = capacity
        self.layer = layer
        super().__init__(what, why=why, try_=try_, where=where)


class PeerError(MoepdlError):
    """Ranks of an expert-parallel group are dead, late, or doing something else than this one.

    ranks: those to blame, as far as is known; rank: the first of them; layer, phase: what this rank waited for, where
    phase "compile" is the agreement ahead of the first call; epoch: which exchange of the group it was, from 1
    """

    def __init__(
        self,
        what: str,
        *,
        ranks: tuple[int, ...] = (),
        rank: int | None = None,
        layer: str = "",
        phase: str = "",
        epoch: int = 0,
        why: str = "",
        try_: str = "",
        where: str = "",
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank if rank is not None else next(iter(self.ranks), None)
        self.layer = layer
        self.phase = phase
        self.epoch = epoch
        super().__init__(what, why=why, try_=try_, where=where)


class PlanMismatchError(MoepdlError):
    """The ranks of an expert-parallel group compiled blocks that do not fit together; every rank raises it.

    field: what differs; values: by rank, as text; rank: the first rank that differs from rank 0; layer: the block
    """

    def __init__(
        self,
        what: str,
        *,
        field: str = "",
        values: tuple[str, ...] = (),
        rank: int | None = None,
        layer: str = "",
        why: str = "",
        try_: str = "",
        where: str = "",
    ) -> None:
        self.field = field
        self.values = tuple(values)
        self.rank = rank
        self.layer = layer
        super().__init__(what, why=why, try_=try_, where=where)
