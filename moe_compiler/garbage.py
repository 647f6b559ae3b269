"""No collection of cyclic garbage while the passes run.

The collector's full runs visit every object of the process, and what a pass makes (nodes, fake tensors, sympy sizes)
is alive for as long as its graph, so they find next to nothing. How many of them fall into a pass is chance; on a graph
of thousands of nodes a single one takes as long as the pass itself. Reference counts still free what they can, and what
is left in cycles waits for the first collection after the passes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused"]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector for the code below, and let it go on afterwards, also behind an error; if off it stays so.

    It is one switch for the whole process. Of two threads that compile at a time the first to end turns it on again,
    which costs the other some time; no order of them leaves it off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
