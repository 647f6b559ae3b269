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
    silence, then at each step and every ten seconds of a step. Work that is over sooner prints nothing.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self.name = name
        self.stream = sys.stderr if stream is None else stream
        self.text = ""
        self._terminal = self.stream.isatty()
        self._done = threading.Event()
        self._lock = threading.Lock()  # between the step that prints and the watching thread
        self._said = 0.0  # when a line was last printed; 0.0 while it is quiet
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = time.monotonic()

    def step(self, text: str) -> None:
        """What is being done from now on, e.g. `compiling prefill with inductor`."""
        with self._lock:
            changed, self.text = text != self.text, text
            if changed and self._said:
                self._say()

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
            interval = 1.0 if self._terminal else HEARTBEAT_S
            with self._lock:
                silent = time.monotonic() - self._said
                if not self._said or silent >= interval:
                    self._say()
                    silent = 0.0
            pause = interval - silent

    def _say(self) -> None:
        self._said = time.monotonic()
        line = f"moepdl [{self._said - self._start:.0f}s] {self.name}: {self.text}"
        start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
        print(start + line, end=end, file=self.stream, flush=True)
