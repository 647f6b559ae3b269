"""The collector of cyclic garbage rests while passes run, and only then."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from moe_compiler.errors import PassError
from moe_compiler.garbage import collection_paused
from moe_compiler.graph_pass import graph_pass
from moe_compiler.moe_ir import Level
from moe_compiler.testing import run_passes


def twice(x):
    return x + x


@pytest.mark.parametrize("running", [True, False])
def test_no_collection_while_a_pass_runs_and_as_before_afterwards(running):
    seen = []

    @graph_pass(level=Level.CAPTURED, numerics="exact")
    def look(graph, context):
        seen.append(gc.isenabled())
        return 0

    if not running:
        gc.disable()
    try:
        run_passes(twice, [look], torch.ones(2))
        assert seen == [False] and gc.isenabled() == running
    finally:
        gc.enable()


def test_it_goes_on_behind_an_error_of_a_pass():
    @graph_pass(level=Level.CAPTURED, numerics="exact")
    def fail(graph, context):
        raise KeyError("nothing")

    with pytest.raises(PassError, match="KeyError"):
        run_passes(twice, [fail], torch.ones(2))
    assert gc.isenabled()


def test_of_two_threads_whichever_ends_last_leaves_it_on():
    """The other thread comes while the collector is off already, and ends after the first."""
    inside, ended = threading.Event(), threading.Event()

    def other():
        with collection_paused():
            inside.set()
            ended.wait(10)

    with collection_paused():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
    ended.set()
    thread.join()
    assert gc.isenabled()
