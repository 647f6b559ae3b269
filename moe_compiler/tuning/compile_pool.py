"""Processes that compile tiles beside the one that times them.

They are started as a module of their own, not forked or spawned from this process: a model is compiled in the middle of
a user's script, which need not be written so that another process can import it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from moe_compiler.tuning.compile_worker import Answer, Job, receive, send

__all__ = ["CompilePool"]

# Not run as a module: its classes would be those of __main__ there, which are others here.
# Nor does it look for modules where the user happens to be.
_WORKER = "import sys; sys.path.remove(''); from moe_compiler.tuning.compile_worker import main; main()"


class CompilePool:
    """Compiles jobs in the order in which they come, each once. Use it in a `with` statement.

    workers: processes, by default one a core, at most 16.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._count = max(1, workers if workers is not None else min(os.cpu_count() or 1, 16))
        self._jobs: queue.Queue[tuple[Hashable, Job] | None] = queue.Queue()
        self._answers: dict[Hashable, Answer | None] = {}
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, key: Hashable, job: Job) -> None:
        """Compile a job, unless one of this key was submitted before."""
        with self._changed:
            if key in self._answers:
                return
            self._answers[key] = None
        self._jobs.put((key, job))

    def answer(self, key: Hashable, timeout: float) -> Answer | None:
        """The answer for a key that was submitted, waiting at most `timeout` seconds for it; None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers[key] is not None, max(timeout, 0.0))
            return self._answers[key]

    def drop_waiting(self) -> None:
        """Forget the jobs that no process has begun: nobody will ask for them."""
        with self._changed:
            while True:
                try:
                    item = self._jobs.get_nowait()
                except queue.Empty:
                    return
                if item is not None:
                    del self._answers[item[0]]

    def __enter__(self) -> CompilePool:
        for number in range(self._count):
            thread = threading.Thread(target=self._serve, name=f"moepdl tiles {number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for _ in range(self._count):
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _start(self) -> subprocess.Popen[bytes] | None:
        root = str(Path(__file__).resolve().parents[2])
        paths = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([paths] if paths else [])])}
        environment.pop("PYTHONSAFEPATH", None)
        with self._changed:
            if self._closed:
                return None
            process = subprocess.Popen(
                [sys.executable, "-c", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the search; a worker whose parent is gone reads no more jobs
            )
            self._processes.append(process)
            return process

    def _serve(self) -> None:
        """One process's jobs, one after the other. A process that dies is replaced; the job that killed it is not."""
        process = self._start()  # before there is a job: to import torch takes as long as to compile
        while (item := self._jobs.get()) is not None and not self._closed:
            key, job = item
            if process is None:
                process = self._start()
            if process is None or process.stdin is None or process.stdout is None:
                break
            try:
                send(process.stdin, job)
                answer: Answer = receive(process.stdout)
            except Exception as error:  # an answer that cannot be read is no answer
                answer = Answer(f"the compiling process ended: {type(error).__name__} {error}".rstrip())
                process.kill()
                process.wait()
                process = None
            with self._changed:
                self._answers[key] = answer
                self._changed.notify_all()
        if process is not None:
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
            process.kill()
            process.wait()
