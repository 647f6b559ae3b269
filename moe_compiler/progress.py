"""Says that work is going on, once it takes longer than two seconds: a line on a terminal, a heartbeat elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

QUIET_S = 2.0
HEARTBEAT_S = 10.0


class Progress:
    """`with Progress("demo") as progress: progress.step("compiling")` prints to stderr what is being done.

    On a terminal one line is rewritten each second and erased at the end; elsewhere a line comes after two seconds of
    silence and then every ten. Work that is over sooner prints nothing.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self.name = name
        self.stream = sys.stderr if stream is None else stream
        self.text = ""
        self._terminal = self.stream.isatty()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = time.monotonic()

    def step(self, text: str) -> None:
        """What is being done from now on, e.g. `compiling prefill with inductor`."""
        self.text = text

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._terminal:
            print("\r\033[K", end="", file=self.stream, flush=True)

    def _watch(self) -> None:
        pause = QUIET_S
        while not self._done.wait(pause):
            pause = 1.0 if self._terminal else HEARTBEAT_S
            line = f"moepdl [{time.monotonic() - self._start:.0f}s] {self.name}: {self.text}"
            start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
            print(start + line, end=end, file=self.stream, flush=True)
