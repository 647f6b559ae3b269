"""A process that compiles tiles, driven by `compile_pool`.

It reads jobs from stdin and answers on stdout, each a pickle behind its length. What the compiler prints goes nowhere.
Nothing is launched, and no memory of the device is taken but a context: compiled kernels, and the audits of those that
wait, reach the process that asked through triton's cache.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import IO, Any

import torch

__all__ = ["Answer", "Job", "compile_tile", "receive", "send"]


@dataclass(frozen=True)
class Job:
    """One launch to compile.

    program, launch   a chain's text and (variant, index of a launch in it)
    tensors           shape, strides and dtype of each operand of the chain
    tile              the tile's text, None for the kernel's own
    pdl               whether it is launched programmatically, and so has to pass the audit
    shared            bytes of shared memory that a program may have
    arch              compute capability to compile for, None: that of the current device
    """

    program: str
    launch: tuple[str, int]
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    tile: str | None
    pdl: bool
    shared: int
    arch: int | None


@dataclass(frozen=True)
class Answer:
    """`problem`: why the tile cannot be used, "" when it can; shared: bytes of shared memory that it takes."""

    problem: str
    shared: int = 0


def compile_tile(job: Job) -> Answer:
    """Compile the launches of a job, and audit those that are programmatic."""
    from moe_compiler.runtime_kernels import launching
    from moe_compiler.runtime_kernels.audit import audit, audited, compile_offline
    from moe_compiler.runtime_kernels.chain.prepared import prepare
    from moe_compiler.runtime_kernels.tiles import parse_tile

    prepared = prepare(job.program)
    tensors = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in job.tensors]
    values, sizes = prepared.bind(tensors)
    variant = prepared.variant(sizes)
    name, index = job.launch
    if variant.name != name:
        raise ValueError(f"T={prepared.tokens(sizes)} belongs to variant {variant.name}, not to {name}")
    for launch in variant.launches[: index + 1]:
        for _, buffer in launch.outs:
            values[buffer.name] = buffer.allocate(sizes, values, tensors[0].device)
    launch = variant.launches[index]
    outs = {parameter: values[buffer.name] for parameter, buffer in launch.outs}
    ins = {parameter: None if known is None else values[known] for parameter, known in launch.ins}
    most = 0
    with launching.recording() as starts:
        options: dict[str, Any] = {} if job.tile is None else {"tile": parse_tile(job.tile)}
        launch.kernel.launch(outs, ins, launch.attrs, pdl=job.pdl, **options)
    for start in starts:
        if job.arch is None:
            compiled = launching.compile_recorded(start)
            found = audited(compiled) if job.pdl else None
        else:
            compiled = compile_offline(start, job.arch)
            found = audit(compiled) if job.pdl else None
        most = max(most, compiled.metadata.shared)
        if compiled.metadata.shared > job.shared:
            return Answer(f"needs {compiled.metadata.shared} bytes of shared memory, of {job.shared}", most)
        if found is not None and not found.ok:
            return Answer(f"fails the audit: {'; '.join(found.problems)}", most)
    return Answer("", most)


def send(stream: IO[bytes], value: object) -> None:
    """Write one value."""
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one value. Raises EOFError when there is none."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def main() -> None:
    """Answer jobs until there are no more."""
    # Whoever prints (a compiler, a warning) must not write into the answers.
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    while True:
        try:
            job = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = compile_tile(job)
        except Exception as error:
            answer = Answer(f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:400])
        send(answers, answer)
