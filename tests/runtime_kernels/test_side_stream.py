"""A chain on a second stream: the operators on the CPU, and the order of events and the owners of memory on a device
that is made up."""

from __future__ import annotations

import gc
import importlib
import weakref
from contextlib import contextmanager

import pytest
import torch

import moe_compiler.runtime_kernels.register  # noqa: F401 - defines the operators
from moe_compiler.runtime_kernels.chain import beside, side_stream
from moe_compiler.runtime_kernels.chain.prepared import PreparedBuffer, prepare
from moe_compiler.runtime_kernels.chain.program import ProgramError
from tests.runtime_kernels.test_bound import Handle, fresh
from tests.runtime_kernels.test_chain import backward_inputs, backward_program, forward_inputs, forward_program

pytest.importorskip("triton", reason="the launcher makes its launches through triton, which is not installed")
from moe_compiler.runtime_kernels import launching
from moe_compiler.runtime_kernels.chain import bound, launcher

ops = torch.ops.moepdl
DIRECTIONS = {"forward": (forward_inputs, forward_program), "backward": (backward_inputs, backward_program)}


@pytest.fixture(params=DIRECTIONS)
def chain(request, make_block):
    """The operands and the text of a chain."""
    block = make_block(tokens=37, layout="packed").detached()
    make, write = DIRECTIONS[request.param]
    return make(block), write(block).to_text()


# On the CPU


@pytest.mark.parametrize(("limit", "captured"), [(None, False), (8, False), (64, True)])
def test_start_and_wait_give_what_the_chain_gives(chain, limit, captured):
    tensors, text = chain
    token = ops.chain_start(tensors, text, limit, captured)
    found = ops.chain_wait(token, tensors, [], text)
    for mine, theirs in zip(found, ops.chain(tensors, text), strict=True):
        assert torch.equal(mine, theirs)
    assert {t.data_ptr() for t in found}.isdisjoint(t.data_ptr() for t in tensors)


def test_two_chains_under_way_are_told_apart(make_block):
    blocks = [make_block(tokens=tokens, layout="packed").detached() for tokens in (3, 37)]
    given = [(forward_inputs(block), forward_program(block).to_text()) for block in blocks]
    tokens = [ops.chain_start(tensors, text, None, False) for tensors, text in given]
    for token, (tensors, text) in reversed(list(zip(tokens, given, strict=True))):
        assert torch.equal(ops.chain_wait(token, tensors, [], text)[0], ops.chain(tensors, text)[0])


def test_a_token_is_good_for_one_wait(chain):
    tensors, text = chain
    token = ops.chain_start(tensors, text, None, False)
    ops.chain_wait(token, tensors, [], text)
    with pytest.raises(ProgramError, match="without a chain under way"):
        ops.chain_wait(token, tensors, [], text)
    with pytest.raises(ProgramError, match="the very tensor that chain_start returned"):
        ops.chain_wait(torch.empty(1, dtype=torch.uint8), tensors, [], text)


def test_the_operators_promise_what_they_do(chain):
    tensors, text = chain
    torch.library.opcheck(
        ops.chain_start.default, (tensors, text, 4, True), test_utils=("test_schema", "test_faketensor")
    )
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        token = ops.chain_start(fakes, text, 4, True)
        assert token.shape == (1,) and token.dtype is torch.uint8
        told = ops.chain_wait(token, fakes, [], text)
    real = ops.chain(tensors, text)
    assert [(t.shape, t.stride(), t.dtype) for t in told] == [(t.shape, t.stride(), t.dtype) for t in real]


def test_the_choice_is_the_hosts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert beside.flies(5, None, False) and beside.flies(5, 5, False) and beside.flies(None, None, False)
    assert not beside.flies(6, 5, False) and not beside.flies(0, None, False) and not beside.flies(None, 5, False)
    assert not beside.flies(5, 5, True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert beside.flies(5, 5, True) and not beside.flies(6, 5, True)


# On a device that is made up: everything that happens is written down, in the order of the host


class Device:
    """Streams by number, the log of what is done to them, and which stream each allocation belongs to."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.current = Stream(self, 1)
        self.made = 1
        self.owners: dict[int, int] = {}

    def new_stream(self, device=None):
        self.made += 1
        return Stream(self, self.made)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Event:
    def __init__(self, device, stream):
        self.device, self.stream = device, stream


class Stream:
    def __init__(self, device, number):
        self.owner, self.cuda_stream, self.device_index, self.device = device, number, 0, torch.device("cuda", 0)

    def record_event(self):
        self.owner.log.append(("record", self.cuda_stream))
        return Event(self.owner, self.cuda_stream)

    def wait_event(self, event):
        self.owner.log.append(("wait", self.cuda_stream, event.stream))

    def wait_stream(self, other):
        self.wait_event(other.record_event())


@pytest.fixture
def made_up(monkeypatch) -> Device:
    """No device, but a log: ("record", s), ("wait", s, for), ("launch", s), ("allocate", s), ("used", tensor, s)."""
    prepare.cache_clear()
    made = Device()
    monkeypatch.setattr(side_stream, "_sides", {})
    monkeypatch.setattr(torch.cuda, "Stream", made.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, s: made.log.append(("used", id(tensor), s.cuda_stream))
    )

    class Started(list):
        def append(self, what):
            made.log.append(("launch", made.current.cuda_stream))

    class Handles(dict):
        def get(self, key):
            return Handle(Started())

    class Active:
        @staticmethod
        def get_current_device():
            return 0

        @staticmethod
        def get_current_stream(device):
            return 7

    monkeypatch.setattr(launching, "_handles", Handles())
    for module in (launching, bound):
        monkeypatch.setattr(module, "driver", type("Runtime", (), {"active": Active}))

    def noted(function):
        def allocate(*arguments, **named):
            made.log.append(("allocate", made.current.cuda_stream))
            return function(*arguments, **named)

        return allocate

    monkeypatch.setattr(PreparedBuffer, "allocate", noted(PreparedBuffer.allocate))
    monkeypatch.setattr(bound.torch, "empty", noted(torch.empty))
    for folder in ("order", "grad_act"):
        module = importlib.import_module(f"moe_compiler.runtime_kernels.{folder}.launch")
        monkeypatch.setattr(module, "scratch", noted(launching.scratch))
    return made


MAIN, SIDE = 1, 2


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_fork_chain_join_and_who_owns_the_memory(made_up, chain, runs):
    """The first run goes the long way, the later ones repeat its launches: all keep the same order."""
    tensors, text = chain
    for _ in range(runs):
        made_up.log.clear()
        given = fresh(tensors)
        flight = side_stream.take_off(given, text)
        under_way = list(made_up.log)
        flight.land()
    fork = under_way.index(("record", MAIN))
    assert set(under_way[:fork]) == {("allocate", MAIN)}, "the results are allocated before the fork"
    assert under_way[fork + 1] == ("wait", SIDE, MAIN)
    work = under_way[fork + 2 : -1]
    assert set(work) <= {("allocate", SIDE), ("launch", SIDE)} and ("launch", SIDE) in work
    assert ("allocate", SIDE) in work, "what lies in between belongs to the side stream"
    assert under_way[-1] == ("record", SIDE)
    assert made_up.log[len(under_way) :] == [("wait", MAIN, SIDE)]


def test_operands_and_results_live_until_the_join(made_up, chain):
    tensors, text = chain
    given = fresh(tensors)
    kept = [weakref.ref(t) for t in given]
    flight = side_stream.take_off(given, text)
    del given, tensors
    gc.collect()
    assert all(one() is not None for one in kept)
    results = [weakref.ref(t) for t in flight.land()]
    gc.collect()
    activations = [one for one in kept if one() is not None and one().dim() < 3]
    assert not activations, "behind the join nothing is held"
    assert "used" not in {entry[0] for entry in made_up.log}
    assert results[0]() is not None
    del flight
    gc.collect()
    assert all(one() is None for one in results)


def test_a_chain_that_is_never_waited_for_keeps_its_memory_from_others(made_up, chain):
    tensors, text = chain
    flight = side_stream.take_off(fresh(tensors), text)
    held = {id(t) for t in (*flight._operands, *flight._outputs)}
    made_up.log.clear()
    del flight
    gc.collect()
    assert set(made_up.log) == {("used", one, SIDE) for one in held}


def test_a_launch_that_fails_is_joined(made_up, chain, monkeypatch):
    tensors, text = chain

    def fails(*arguments):
        made_up.log.append(("launch", made_up.current.cuda_stream))
        raise launcher.KernelLaunchError("chain", "variant", "kernel", RuntimeError("out of resources"))

    monkeypatch.setattr(side_stream, "run", fails)
    with pytest.raises(launcher.KernelLaunchError, match="out of resources"):
        side_stream.take_off(tensors, text)
    assert made_up.log[-3:] == [("launch", SIDE), ("record", SIDE), ("wait", MAIN, SIDE)]
    assert made_up.current.cuda_stream == MAIN


def test_each_stream_has_a_side_of_its_own_and_none_is_its_own_side(made_up):
    main = made_up.current
    side = side_stream.side_of(main)
    assert side_stream.side_of(main) is side and side.cuda_stream == SIDE
    user = Stream(made_up, 3)  # torch deals its streams out in turn: the next new one is this one
    assert side_stream.side_of(user).cuda_stream == 4


def test_above_the_limit_the_chain_runs_on_the_current_stream(made_up, chain, monkeypatch):
    tensors, text = chain

    @contextmanager
    def nothing(device):
        yield

    monkeypatch.setattr(torch.cuda, "device", nothing)
    token = beside._start_cuda(tensors, text, 36, False)
    assert ("launch", MAIN) in made_up.log and not any(entry[0] in ("record", "wait") for entry in made_up.log)
    made_up.log.clear()
    beside._wait(token, tensors, [], text)
    assert made_up.log == []
    beside._wait(beside._start_cuda(tensors, text, 37, False), tensors, [], text)
    assert ("launch", SIDE) in made_up.log and ("launch", MAIN) not in made_up.log
