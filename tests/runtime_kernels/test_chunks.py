"""Chains over chunks of the tokens: who is cut, what a chunk may not do, its launches, and the memory of a program."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_compiler.runtime_kernels.register  # noqa: F401
from moe_compiler.runtime_kernels.chain import launcher
from moe_compiler.runtime_kernels.chain.chunks import CHUNK_UNIT, cut_inputs, rounds, why_whole
from moe_compiler.runtime_kernels.chain.memory import lifetimes, peak_bytes
from moe_compiler.runtime_kernels.chain.prepared import PreparedBuffer, prepare
from moe_compiler.runtime_kernels.chain.program import Buffer, Chunks, Program, ProgramError
from moe_compiler.runtime_kernels.registry import kernel, names
from tests.runtime_kernels.test_chain import (
    Recorder,
    backward_program,
    forward_inputs,
    forward_program,
)

ops = torch.ops.moepdl
INPUTS = ("x", "ids", "w")


def in_chunks(program: Program, tokens: int = 16, inputs: tuple[str, ...] = INPUTS) -> Program:
    """The program with its last variant in chunks, as the only one."""
    last = dataclasses.replace(program.variants[-1], max_tokens=None, chunks=Chunks(tokens, inputs))
    return dataclasses.replace(program, variants=(last,))


def whole(program: Program) -> Program:
    return dataclasses.replace(program, variants=program.variants[-1:])


@given(st.integers(0, 5000), st.integers(1, 40))
def test_rounds_cover_the_tokens_once_in_as_few_parts_as_the_limit_allows(tokens, units):
    limit = units * CHUNK_UNIT
    parts = rounds(tokens, limit)
    assert [token for first, count in parts for token in range(first, first + count)] == list(range(tokens))
    assert all(0 < count <= limit for _, count in parts) or tokens == 0
    assert all(first % CHUNK_UNIT == 0 for first, _ in parts)
    assert len(parts) <= max(1, -(-tokens // limit))
    # Of about one size: no part but the last is smaller than another.
    assert len({count for _, count in parts[:-1]}) <= 1


def test_every_row_that_is_a_tokens_is_declared():
    """What is cut rests on the declarations: of each kernel's parameters that have T rows, all and only those."""
    rows = {"x", "grad_y", "logits", "ids", "weights", "y", "grad_logits", "grad_x", "grad_weights"}
    for name in names():
        traits = kernel(name).traits
        lists = set(traits.lists)
        assert set(traits.by_token) == (rows & {*traits.reads, *traits.writes}) - lists, name
        assert not set(traits.shared) & {*traits.by_token, *traits.weights}, name


def test_what_is_cut_and_why_some_chains_stay_whole(make_block):
    forward, backward = forward_program(make_block()), backward_program(make_block())
    assert sorted(cut_inputs(forward.variants[-1])) == sorted(INPUTS)
    assert why_whole(forward.variants[-1], forward.outputs) == ""
    assert "it returns perm" in why_whole(forward.variants[-1], ("y", "perm"))
    assert "preact" in why_whole(backward.variants[-1], backward.outputs)


def test_text_and_back(make_block):
    one = in_chunks(forward_program(make_block()))
    again = Program.from_text(one.to_text())
    assert again == one and again.to_text() == one.to_text()
    assert "chunks" not in forward_program(make_block()).to_text()


FAULTS = [
    (lambda p: in_chunks(p, 24), "chunks of 24 tokens; it must be a positive multiple of 16"),
    (lambda p: in_chunks(p, 0), "chunks of 0 tokens"),
    (lambda p: in_chunks(p, inputs=("x", "w")), "cut the inputs x, w; those that its launches read by token are"),
    (
        lambda p: in_chunks(dataclasses.replace(p, outputs=("y", "perm"))),
        "in chunks of the tokens, but it returns perm",
    ),
    (lambda p: in_chunks(dataclasses.replace(p, symbols={"T": ("x", 1)})), "symbol 'T' is not the rows of an input"),
]


@pytest.mark.parametrize(("build", "message"), FAULTS)
def test_faults(make_block, build, message):
    with pytest.raises(ProgramError, match=message):
        build(forward_program(make_block())).to_text()


def test_a_backward_chain_in_chunks_is_a_fault(make_block):
    names = ("grad_y", "x", "w")
    with pytest.raises(ProgramError, match="grad_act reads preact, which is in the order of all tokens' pairs"):
        in_chunks(backward_program(make_block()), inputs=names).to_text()


def test_an_order_from_outside_is_a_fault(make_block):
    """Rows that were ordered over all tokens mean nothing to a chunk."""
    program = forward_program(make_block())
    last = program.variants[-1]
    buffers = {name: buffer for name, buffer in last.buffers.items() if name not in ("perm", "starts")}
    last = dataclasses.replace(last, launches=last.launches[1:], buffers=buffers)
    program = dataclasses.replace(program, inputs=(*program.inputs, ("perm", None), ("starts", None)), variants=(last,))
    program.to_text()
    with pytest.raises(ProgramError, match="gate_up reads perm, which is in the order of all tokens' pairs"):
        in_chunks(program, inputs=("x", "w")).to_text()


@pytest.mark.parametrize("layout", ["packed", "list", "separate"])
@pytest.mark.parametrize("routing", ["random", "skewed", "outside"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_gives_its_tokens_what_all_give_them(make_block, assert_close, layout, routing, dtype):
    for tokens in (0, 1, 2, 16, 17, 37, 512):
        block = make_block(tokens=tokens, layout=layout, routing=routing, dtype=dtype).detached()
        inputs = forward_inputs(block)
        (want,) = ops.chain(inputs, whole(forward_program(block)).to_text())
        (got,) = ops.chain(inputs, in_chunks(forward_program(block), 32).to_text())
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        assert_close(got, want, block.dtype, f"T={tokens}")


def test_compiled_with_dynamic_tokens(make_block):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    text = in_chunks(forward_program(make_block().detached())).to_text()
    compiled = torch.compile(lambda *t: ops.chain(list(t), text)[0] + 1, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (37, 3, 64, 2):
        block = make_block(tokens=tokens).detached()
        torch.testing.assert_close(compiled(*forward_inputs(block)), ops.experts(*block.arguments) + 1)
    assert len(graphs) == 1


def test_opcheck(make_block):
    block = make_block(tokens=37).detached()
    torch.library.opcheck(ops.chain.default, (forward_inputs(block), in_chunks(forward_program(block)).to_text()))


def test_the_launcher_repeats_the_launches_and_the_first_of_each_chunk_is_plain(make_block, assert_close, monkeypatch):
    recorder = Recorder(monkeypatch)
    block = make_block(tokens=37).detached()
    inputs = forward_inputs(block)
    (y,) = launcher.run(inputs, in_chunks(forward_program(block)).to_text())
    one = [("order", False), ("gate_up", True), ("down", True), ("combine", True)]
    assert recorder.launches == one * 3
    assert_close(y, ops.experts(*block.arguments), block.dtype)
    recorder.launches.clear()
    few = make_block(tokens=16).detached()
    launcher.run(forward_inputs(few), in_chunks(forward_program(few)).to_text())
    assert recorder.launches == one


def test_lifetimes_are_those_of_the_launcher(make_block):
    program = forward_program(make_block())
    variant, prepared = program.variants[-1], prepare(program.to_text()).any_variant()
    last = {name: end for name, (_, end) in lifetimes(variant, program.outputs).items()}
    assert {name: i for i, launch in enumerate(prepared.launches) for name in launch.dead} == last
    first = {name: start for name, (start, _) in lifetimes(variant, program.outputs).items()}
    assert all(name in variant.launches[start].outs.values() for name, start in first.items())


@pytest.mark.parametrize(("tokens", "chunk"), [(3, None), (37, None), (700, None), (700, 128), (700, 720), (37, 16)])
def test_the_peak_is_what_a_run_allocates(make_block, monkeypatch, tokens, chunk):
    """Counted in the launcher itself, allocation by allocation, less the outputs."""
    Recorder(monkeypatch)
    block = make_block(tokens=tokens, hidden=40, inner=24).detached()
    program = forward_program(block)
    program = resized(program, 40, 24)
    program = whole(program) if chunk is None else in_chunks(program, chunk)
    now = peak = 0
    allocate = PreparedBuffer.allocate

    def freed(size):
        nonlocal now
        now -= size

    def counted(buffer, sizes, values, device):
        nonlocal now, peak
        made = allocate(buffer, sizes, values, device)
        if buffer.name not in program.outputs:
            size = -(-made.nbytes // 512) * 512
            now, peak = now + size, max(peak, now + size)
            weakref.finalize(made, freed, size)
        return made

    monkeypatch.setattr(PreparedBuffer, "allocate", counted)
    launcher.run(forward_inputs(block), program.to_text())
    assert now == 0 and peak == peak_bytes(program, {"T": tokens})


def resized(program: Program, hidden: int, inner: int) -> Program:
    sizes = {"12": str(hidden), "7": str(inner)}

    def change(buffer: Buffer) -> Buffer:
        return dataclasses.replace(buffer, shape=tuple(sizes.get(size, size) for size in buffer.shape or ()))

    variants = tuple(
        dataclasses.replace(v, buffers={name: change(b) for name, b in v.buffers.items()}) for v in program.variants
    )
    return dataclasses.replace(program, variants=variants)


def test_the_peak_of_a_buffer_like_an_input_is_not_guessed(make_block):
    program = backward_program(make_block())
    with pytest.raises(ProgramError, match="buffer 'grad_preact', like an input, is not known"):
        peak_bytes(program, {"T": 8})
