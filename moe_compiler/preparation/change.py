"""What `prepare` did to one place of a model, and how to take it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["Change"]


@dataclass
class Change:
    """One thing that `prepare` changed.

    path:   where, as in `model.get_submodule(path)`; "" is the model itself
    what:   the method that was replaced, or the setting that was switched
    before: what was there, with its line, and why it does not become one graph
    after:  what is there now
    error:  the largest error of a result or gradient on the probe inputs, relative to its norm, against float64
    blocks: the modules whose results were compared
    needs:  what torch.compile needs for one graph, "fullgraph=True" or ""
    misses: why no formulation matches what is there now, "" when one does; it is one graph all the same
    """

    path: str
    what: str
    before: str
    after: str
    error: float
    blocks: tuple[str, ...] = ()
    needs: str = ""
    misses: str = ""
    _restore: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def undo(self) -> None:
        """Put back what was there before, and forget what was compiled with it. Does nothing the second time."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
            torch.compiler.reset()

    def __str__(self) -> str:
        where = self.path or "the model"
        needs = f"; compile with {self.needs}" if self.needs else ""
        misses = f"; not matched: {self.misses}" if self.misses else ""
        return f"{where}: {self.what}: {self.before} -> {self.after} (error {self.error:.1e}{needs}{misses})"
