"""Compile the kernels that a measurement will launch before it starts, on all cores at once.

A call is made with its launches recorded instead of made; what each of them would compile goes to worker processes, by
way of triton's cache. It saves time only: what is missing afterwards is compiled when it is launched.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_compiler.runtime_kernels.launching import DESCRIPTORS, Start, compile_recorded, recording

__all__ = ["Ahead", "Job", "job_of", "start_of"]

logger = logging.getLogger(__name__)

WORKERS = 14


@dataclass(frozen=True)
class Operand:
    """What of an operand a kernel is compiled for. descriptor: of its class with the fields but the tensor, or None."""

    dtype: torch.dtype
    aligned: bool
    descriptor: tuple[type, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Job:
    """A `Start` without its memory, for another process. kernel: (module, name)."""

    kernel: tuple[str, str]
    operands: tuple[Operand | None, ...]
    start: Start


def job_of(start: Start) -> Job:
    """The job of a recorded start."""
    function = start.kernel.fn
    # Numbers are values of a launch, not of the compiled kernel; only how many there are counts.
    stripped = replace(start, kernel=None, operands=(), programs=1, numbers=(2,) * len(start.numbers))
    return Job((function.__module__, function.__name__), tuple(map(_operand, start.operands)), stripped)


def start_of(job: Job) -> Start:
    """A start that compiles to what the job's start does; its operands are small tensors on the CPU."""
    module, name = job.kernel
    kernel = getattr(importlib.import_module(module), name)
    return replace(job.start, kernel=kernel, operands=tuple(map(_stand_in, job.operands)))


def _operand(operand: Any) -> Operand | None:
    if operand is None:
        return None
    if isinstance(operand, DESCRIPTORS):
        fields = {name: value for name, value in vars(operand).items() if name != "base"}
        fields["shape"] = list(operand.block_shape)  # a value of a launch, like numbers
        return Operand(operand.base.dtype, True, (type(operand), fields))
    return Operand(operand.dtype, operand.data_ptr() % 16 == 0)


def _stand_in(operand: Operand | None) -> Any:
    if operand is None:
        return None
    memory = torch.empty(64, dtype=operand.dtype)  # aligned to 64 bytes
    if operand.descriptor is not None:
        kind, fields = operand.descriptor
        return kind(memory, **fields)
    return memory if operand.aligned else memory[1:]


def _ready() -> None:
    """In a worker: nothing but what it takes to get here, which is to import torch and triton."""


def _compile(job: Job) -> None:
    """In a worker: compile for the current device, and audit what is to be launched programmatically."""
    compile_recorded(start_of(job))


class Ahead:
    """A pool of processes that compile, started when it is first needed."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = min(WORKERS, (os.cpu_count() or 1) - 1) if workers is None else workers
        self._pool: ProcessPoolExecutor | None = None
        self._known: set[str] = set()

    @contextlib.contextmanager
    def open(self) -> Iterator[Ahead]:
        """With the pool closed at the end."""
        try:
            yield self
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)

    def warm(self) -> None:
        """Start the processes, which import torch and triton meanwhile."""
        if self._pool is None and self.workers > 1:
            self._pool = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))
            for _ in range(self.workers):
                self._pool.submit(_ready)

    def compile(self, calls: Iterable[Callable[[], object]]) -> int:
        """Compile what these calls would launch; how many kernels that were. The calls' results mean nothing."""
        if self.workers < 2:
            return 0
        self.warm()
        assert self._pool is not None
        futures: list[Future[None]] = []
        for call in calls:
            try:
                with recording() as starts:
                    call()
            except Exception as error:
                # Whatever it is (no memory for this one, a block that does not compile) is met again, and told, when
                # the call is measured.
                logger.debug("nothing was compiled ahead: %s: %s", type(error).__name__, error)
                continue
            for start in starts:
                job = job_of(start)
                if repr(job) in self._known:
                    continue
                self._known.add(repr(job))
                try:
                    futures.append(self._pool.submit(_compile, job))
                except BrokenExecutor as error:  # a worker died; the rest is compiled where it is launched
                    logger.warning("kernels are not compiled ahead any more: %s", error)
                    self.workers = 1
                    return len(futures)
        for future in futures:
            # A kernel that cannot be compiled fails again, with its name, where it is launched.
            future.exception()
        return len(futures)
