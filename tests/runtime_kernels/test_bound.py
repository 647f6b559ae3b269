"""The second run of a chain repeats the launches of the first, on its own operands and in memory of its own."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import weakref

import pytest
import torch

from tests.runtime_kernels.fake_driver import Driver, Kernel
from tests.runtime_kernels.test_chain import backward_inputs, backward_program, forward_inputs, forward_program

pytest.importorskip("triton")

from moe_compiler import memory
from moe_compiler.block_program import BlockSizes, inputs_of, weights_of
from moe_compiler.block_program import forward_program as forward_program_of
from moe_compiler.runtime_kernels import cuda_driver, launching
from moe_compiler.runtime_kernels.chain import bound, launcher
from moe_compiler.runtime_kernels.chain.chunks import rounds
from moe_compiler.runtime_kernels.chain.memory import peak_bytes
from moe_compiler.runtime_kernels.chain.prepared import PreparedBuffer, prepare
from moe_compiler.runtime_kernels.chain.program import Chunks


class Handle:
    """A compiled kernel that notes what it is started with."""

    function, packed_metadata, metadata = "function", "metadata", None

    def __init__(self, started: list[tuple[str, tuple]]) -> None:
        self.started = started

    def __getitem__(self, grid):
        return lambda *arguments: self.started.append(("long", (grid[0], *arguments)))

    def run(self, programs, y, z, stream, function, metadata, a, b, c, *arguments):
        assert (y, z, stream, function, metadata, a, b, c) == (1, 1, 7, "function", "metadata", None, None, None)
        self.started.append(("short", (programs, *arguments)))


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Programs are shared by their text: what other tests have bound is not to be seen."""
    prepare.cache_clear()


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, tuple]]:
    """All starts of kernels, on a machine without a device."""
    found: list[tuple[str, tuple]] = []

    class Handles(dict):
        def get(self, key):
            return Handle(found)

    monkeypatch.setattr(launching, "_handles", Handles())
    active = type("Driver", (), {"get_current_device": lambda: 0, "get_current_stream": lambda device: 7})
    for module in (launching, bound):
        monkeypatch.setattr(module, "driver", type("Runtime", (), {"active": active}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


@pytest.fixture
def apart(monkeypatch) -> None:
    """No two buffers of a run have the same address, so an address says which buffer it is."""
    kept: list[object] = []
    allocate, scratch = PreparedBuffer.allocate, launching.scratch

    def keep(function):
        def kept_alive(*arguments):
            kept.append(function(*arguments))
            return kept[-1]

        return kept_alive

    def pack(blocks):
        sizes = [-(-block.size // 512) * 512 + 512 for block in blocks]
        return [sum(sizes[:index]) for index in range(len(sizes))], sum(sizes)

    monkeypatch.setattr(PreparedBuffer, "allocate", keep(allocate))
    for folder in ("order", "grad_act"):
        module = importlib.import_module(f"moe_compiler.runtime_kernels.{folder}.launch")
        monkeypatch.setattr(module, "scratch", keep(scratch))
    monkeypatch.setattr(bound, "_pack", pack)


@pytest.mark.parametrize("limit", [None, 2**20], ids=["whole", "in chunks"])
@pytest.mark.parametrize("tokens", [900, 5000])
def test_a_repeated_run_takes_no_more_memory_than_the_program_says(started, monkeypatch, tokens, limit):
    """One piece of memory holds all buffers of a run: no larger than those that are alive together."""
    sizes = BlockSizes(16, 4, 256, 192)
    if limit is not None:
        monkeypatch.setattr(memory, "CHUNK_BYTES", limit)
    program = forward_program_of(sizes, low=limit is not None)
    inputs = inputs_of(sizes, tokens, weights_of(sizes, "cpu"), "cpu")
    launcher.run(inputs, program.to_text())
    (known,) = prepare(program.to_text()).bound.values()
    told = peak_bytes(program, {"T": tokens})
    assert told - 512 < known._size <= told
    assert limit is None or told <= limit


def fresh(tensors):
    """The same operands at other addresses, but for the weights."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if t.dim() < 3 else t for t in tensors]


def roles(starts, inputs, outputs):
    """Every argument of every start, an address as what it is the address of: an input or an output, and how many bytes
    into it, or which buffer.
    """
    known = [(f"in {i}", t) for i, t in enumerate(inputs)] + [(f"out {i}", t) for i, t in enumerate(outputs)]
    inner: dict[int, str] = {}

    def role(argument):
        if isinstance(argument, int) and argument > 1 << 30:
            for name, tensor in known:
                if 0 <= argument - tensor.data_ptr() < max(tensor.nbytes, 1):
                    return f"{name} + {argument - tensor.data_ptr()}"
            return inner.setdefault(argument, f"buffer {len(inner)}")
        return repr(argument) if not hasattr(argument, "base") else ("box", argument.base.data_ptr(), argument.shape)

    return [tuple(map(role, arguments)) for _, arguments in starts]


@pytest.mark.parametrize("tokens", [3, 37, 3000])
@pytest.mark.parametrize("direction", ["forward", "backward", "forward in chunks"])
def test_a_second_run_makes_the_same_launches_on_its_own_operands(make_block, started, apart, tokens, direction):
    block = make_block(tokens=tokens, layout="packed").detached()
    program = backward_program(block) if direction == "backward" else forward_program(block)
    first = backward_inputs(block) if direction == "backward" else forward_inputs(block)
    if direction == "forward in chunks":
        few, many = program.variants
        chunks = Chunks(16, ("x", "ids", "w"))
        program = dataclasses.replace(program, variants=(few, dataclasses.replace(many, chunks=chunks)))
    text = program.to_text()
    one = launcher.run(first, text)
    assert {kind for kind, _ in started} == {"long"}
    want = roles(started, first, one)
    started.clear()
    second = fresh(first)
    two = launcher.run(second, text)
    assert {kind for kind, _ in started} == {"short"}
    assert roles(started, second, two) == want
    assert [(t.shape, t.stride(), t.dtype) for t in two] == [(t.shape, t.stride(), t.dtype) for t in one]
    assert not {t.data_ptr() for t in two} & {t.data_ptr() for t in one}
    if direction == "forward in chunks" and tokens > 16:
        told = {role for start in want for role in start if isinstance(role, str)}
        rows = {role for role in told if role.startswith(("in 0 ", "out 0 "))}
        width = first[0].stride(0) * first[0].element_size()
        firsts = [at for at, _ in rounds(tokens, 16)]
        assert rows == {f"{name} + {at * width}" for name in ("in 0", "out 0") for at in firsts}


def kinds(started, inputs, text):
    started.clear()
    launcher.run(inputs, text)
    return {kind for kind, _ in started}


def test_other_sizes_strides_and_weights_go_the_long_way_once(make_block, started):
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = forward_program(block).to_text(), forward_inputs(block)
    assert kinds(started, inputs, text) == {"long"}
    assert kinds(started, inputs, text) == {"short"}
    moved = [*inputs[:3], *(t.clone() for t in inputs[3:])]
    assert kinds(started, moved, text) == {"long"}, "weights at other addresses"
    assert kinds(started, moved, text) == {"short"}
    other = make_block(tokens=7, layout="packed").detached()
    fewer = [*forward_inputs(other)[:3], *inputs[3:]]
    assert kinds(started, fewer, text) == {"long"}, "another number of tokens"
    assert kinds(started, inputs, text) == {"short"}, "the first one is still known"


def test_an_operand_that_is_copied_is_never_bound(make_block, started):
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = forward_program(block).to_text(), forward_inputs(block)
    columns = [inputs[0].t().contiguous().t(), *inputs[1:]]
    assert columns[0].stride(1) != 1
    for _ in range(3):
        assert kinds(started, columns, text) == {"long"}
    assert list(prepare(text).bound.values()).count(None) >= 1


def test_lists_of_weights_are_bound_and_their_written_gradients_are_not(make_block, started, monkeypatch):
    monkeypatch.setattr(launching, "_ready_writer", lambda device: None)
    monkeypatch.setattr(launching, "write_table_kernel", {(1,): lambda *a, **k: None})
    block = make_block(tokens=6, layout="list").detached()
    text, inputs = forward_program(block).to_text(), forward_inputs(block)
    assert kinds(started, inputs, text) == {"long"}
    assert kinds(started, inputs, text) == {"short"}
    text, inputs = backward_program(block).to_text(), backward_inputs(block)
    for _ in range(2):
        assert kinds(started, inputs, text) == {"long"}


def test_one_tensor_in_two_roles_is_not_bound(make_block, started):
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = backward_program(block).to_text(), backward_inputs(block)
    same = [inputs[1], *inputs[1:]]
    assert kinds(started, same, text) == {"long"}
    assert kinds(started, same, text) == {"long"}


def test_a_bound_chain_keeps_no_weights_alive(make_block, started):
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = forward_program(block).to_text(), [t.clone() for t in forward_inputs(block)]
    kinds(started, inputs, text)
    kinds(started, inputs, text)
    gone = [weakref.ref(t) for t in inputs]
    del inputs
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_a_profiler_that_listens_gets_every_launch(make_block, started, monkeypatch):
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = forward_program(block).to_text(), forward_inputs(block)
    kinds(started, inputs, text)
    monkeypatch.setattr(bound, "watched", lambda: True)
    assert kinds(started, inputs, text) == {"long"}


def test_a_chain_runs_on_the_device_of_its_tensors(make_block, started, monkeypatch):
    current, entered = [1], []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)
            current[0], self.before = 0, current[0]

        def __exit__(self, *error):
            current[0] = self.before

    class OnFirst(torch.Tensor):
        is_cuda = True

        def get_device(self):
            return 0

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = forward_program(block).to_text(), forward_inputs(block)
    inputs[0] = inputs[0].as_subclass(OnFirst)
    launcher.run(inputs, text)
    assert entered == [inputs[0].device] and current == [1]


def test_a_failing_repetition_names_the_kernel(make_block, started):
    block = make_block(tokens=6, layout="packed").detached()
    text, inputs = forward_program(block).to_text(), forward_inputs(block)
    kinds(started, inputs, text)

    def fail(*arguments):
        raise RuntimeError("no device")

    for known in prepare(text).bound.values():
        if known is not None:
            known._starts = tuple(dataclasses.replace(start, run=fail) for start in known._starts)
    with pytest.raises(launcher.KernelLaunchError, match="kernel order_kernel failed: RuntimeError: no device"):
        launcher.run(inputs, text)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_live_together_never_overlap(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(0, limit, (), generator=generator))

    blocks = []
    for _ in range(12):
        first = draw(8)
        blocks.append(bound._Block(draw(5000), first, first + draw(4)))
    offsets, size = bound._pack(blocks)
    for i, one in enumerate(blocks):
        assert offsets[i] % 512 == 0 and offsets[i] + one.size <= size
        for j in range(i):
            other = blocks[j]
            together = one.first <= other.last and other.first <= one.last
            apart = offsets[i] + one.size <= offsets[j] or offsets[j] + other.size <= offsets[i]
            assert apart or not together or not one.size or not other.size
    assert size <= sum(-(-b.size // 512) * 512 for b in blocks)


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_the_rows_of_each_chunk_reach_the_driver_in_order(started, monkeypatch, chunks):
    """One graph of all launches: its nodes get addresses inside of the tensors of a run, again for each run."""
    driver, kernel = Driver(), Kernel(11, [8, 8, 8])
    driver.kernels = {11: kernel}
    monkeypatch.setattr(cuda_driver, "function", driver.function)

    def run(programs, y, z, stream, function, metadata, a, b, c, *arguments):
        kernel.launched_by_triton(driver, *arguments)

    # Slots: the tokens, the output, a buffer; then the rows of the tokens and of the output, chunk by chunk.
    rows = [(slot, 64 * chunk) for chunk in range(chunks) for slot in (0, 1)]
    starts = [
        bound._Start("step", run, 11, None, 5, [0, 0, 0], [(0, 3 + 2 * i), (1, 2), (2, 4 + 2 * i)], False, False)
        for i in range(chunks)
    ]
    known = bound.Bound(starts, [0], [((16 * chunks,), (1,), torch.float32)], [0], 512, rows, [])
    for _ in range(2):
        x = torch.zeros(16 * chunks)
        (y,) = known([x])
        stream, nodes = driver.graphs[-1] if chunks > 1 else (7, [driver.launches[-1][-1]])
        assert stream == 7 and len(nodes) == chunks
        told = [[int.from_bytes(value, "little") for value in values] for values in nodes]
        assert [node[0] - x.data_ptr() for node in told] == [64 * chunk for chunk in range(chunks)]
        assert [node[2] - y.data_ptr() for node in told] == [64 * chunk for chunk in range(chunks)]
        assert len({node[1] for node in told}) == 1, "every chunk works in the same memory"
