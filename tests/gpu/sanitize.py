"""Every device kernel under NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.

    python -m tests.gpu.sanitize [--tools memcheck racecheck] [--limit SECONDS] [--out FOLDER]

The kernels are compiled first, in worker processes. Each tool then watches a process of its own, which launches all of
`every_launch`, each tensor in an allocation of its own, and at last a kernel with a planted fault, which memcheck has
to find. A table says how many launches a tool has seen and what it found; what it printed is in FOLDER. The exit status
is 1 when there is an error, when the planted one was not found, or when a tool did not get through all launches
within SECONDS, and 2 where there is no GPU or no compute-sanitizer.

Racecheck takes the hand-over of roles to specialised warps for a race. It is triton's own code in front of the roles: a
byte that says which role a warp has, written before a barrier of all warps and read behind it, which the tool does not
follow. Such a finding counts as explained where the machine code of that launch shows the barrier
(`tests.gpu.barriers`), else as an error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from moe_compiler.runtime_kernels.sass import Code
from tests.gpu.barriers import handed_over

TOOLS = ("memcheck", "racecheck")
_PLANTED = "planted"
# What the watched process prints before a launch and when it has made the last one.
_MARK, _DONE = "launch: ", "all launches made"
# How a finding begins; what follows it in the output says more. Its other lines begin with ten such characters too.
_FINDINGS = ("Invalid ", "Error: ", "Warning: ", "Misaligned ", "Race reported", "Program hit", "Internal ")
_BAR = "========="


@dataclass
class Found:
    """What a tool saw: launches begun, findings by launch (the text of each), whether it came to the end.

    explained: findings that were looked into and are none.
    """

    launches: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)
    explained: dict[str, list[str]] = field(default_factory=dict)
    finished: bool = False

    @property
    def errors(self) -> int:
        return sum(len(lines) for launch, lines in self.findings.items() if launch != _PLANTED)

    def verdict(self, tool: str) -> str:
        """ "" when all is well, else what is not."""
        if self.errors:
            return f"{self.errors} errors"
        if tool == "memcheck" and self.finished and not self.findings.get(_PLANTED):
            return "the planted fault was not found, so this run shows nothing"
        if not self.finished:
            return f"ended at {self.launches[-1] if self.launches else 'its start'}"
        return ""


def read(output: str) -> Found:
    """The findings of a tool in what it and the process that it watched have printed."""
    found, launch = Found(), "before the first launch"
    for line in output.splitlines():
        if line.startswith(_MARK):
            launch = line.removeprefix(_MARK).strip()
            if launch != _PLANTED:
                found.launches.append(launch)
        elif line.startswith(_DONE):
            found.finished = True
        elif line.startswith(_BAR):
            said = line.removeprefix(_BAR).strip()
            if said.startswith(_FINDINGS):
                found.findings.setdefault(launch, []).append(said)
            elif said.startswith("and ") and launch in found.findings:
                found.findings[launch][-1] += f" {said}"
    return found


def explain(found: Found, codes: Callable[[str], Sequence[Code]]) -> None:
    """Move the races whose accesses are ordered by one barrier to `explained`. codes: the kernels of a launch."""
    for launch in list(found.findings):
        races = [text for text in found.findings[launch] if "Race reported" in text]
        kernels = codes(launch) if races else ()
        ordered = [text for text in races if any(handed_over(code, text) for code in kernels)]
        if ordered:
            found.explained[launch] = ordered
            found.findings[launch] = [text for text in found.findings[launch] if text not in ordered]
        if not found.findings[launch]:
            del found.findings[launch]


def codes_of(launch: str) -> list[Code]:
    """The machine code of the kernels of a launch, by what it is called in the output."""
    from moe_compiler.runtime_kernels import launching
    from moe_compiler.runtime_kernels.sass import disassemble
    from tests.gpu.every_launch import BLOCKS, launches

    name, _, wanted = launch.partition(": ")
    with launching.recording() as starts:
        for what, run in launches(BLOCKS[name], "cuda"):
            if what == wanted:
                run()
    return [disassemble(launching.compile_recorded(start).asm["cubin"]) for start in starts]


def watched() -> None:
    """Make all launches, one after the other, saying which; then the planted fault. For the watched process."""
    import torch

    from tests.gpu.every_launch import BLOCKS, launches
    from tests.gpu.planted import one_too_far

    for name, block in BLOCKS.items():
        for what, run in launches(block, "cuda"):
            print(f"{_MARK}{name}: {what}", flush=True)
            run()
            torch.cuda.synchronize()
    print(_DONE, flush=True)
    print(f"{_MARK}{_PLANTED}", flush=True)
    try:
        one_too_far[(1,)](torch.empty(127, device="cuda"), SIZE=128)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"the planted fault: {error}", flush=True)


def compile_share(worker: int, workers: int) -> int:
    """Compile every workers-th start of all launches; how many. For a worker process."""
    from moe_compiler.runtime_kernels import launching
    from tests.gpu.every_launch import BLOCKS, launches

    with launching.recording() as starts:
        for block in BLOCKS.values():
            for _, run in launches(block, "cuda"):
                run()
    mine = starts[worker::workers]
    for start in mine:
        launching.compile_recorded(start)
    return len(mine)


def compile_all() -> tuple[int, float]:
    """(starts, seconds): compile the kernels of all launches, so that the watched processes find them."""
    began, workers = time.perf_counter(), min(os.cpu_count() or 1, 16)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        counts = list(pool.map(compile_share, range(workers), [workers] * workers))
    return sum(counts), time.perf_counter() - began


def sanitizer() -> str | None:
    """The path of compute-sanitizer: on the PATH, or where CUDA is installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def watch(program: str, tool: str, limit: float, out: Path) -> tuple[Found, float]:
    """Run all launches under a tool for at most `limit` seconds: what it found, and the seconds it took."""
    command = [program, "--tool", tool, "--target-processes", "application-only", "--print-limit", "1000"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "tests.gpu.sanitize", "--watched"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    log = out / f"{tool}.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        # The tool and the process that it watches.
        timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        process.wait()
        timer.cancel()
    return read(log.read_text(errors="replace")), time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    p.add_argument("--limit", type=float, default=75, help="seconds a tool; default 75")
    p.add_argument("--out", type=Path, default=Path("out") / "sanitize")
    p.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    arguments = p.parse_args(argv)
    if arguments.watched:
        watched()
        return 0
    import torch

    program = sanitizer()
    missing = "compute-sanitizer, which comes with CUDA's toolkit" if program is None else "a CUDA device"
    if program is None or not torch.cuda.is_available():
        print(f"sanitize: needs {missing}, and there is none", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    count, seconds = compile_all()
    print(f"{count} kernels compiled in {seconds:.0f} s", flush=True)
    print(f"{'tool':<11}{'launches':>9}{'errors':>8}{'seconds':>9}  verdict", flush=True)
    bad = False
    for tool in arguments.tools:
        found, seconds = watch(program, tool, arguments.limit, arguments.out)
        explain(found, codes_of)
        verdict = found.verdict(tool)
        bad = bad or bool(verdict)
        numbers = f"{len(found.launches):>9}{found.errors:>8}{seconds:>9.0f}"
        print(f"{tool:<11}{numbers}  {verdict or 'clean'}", flush=True)
        for launch, lines in found.findings.items():
            if launch != _PLANTED:
                print(f"  {launch}: {len(lines)}, the first: {lines[0]}")
        if found.explained:
            count = sum(map(len, found.explained.values()))
            print(
                f"  explained: {count} times the hand-over of roles to specialised warps, behind a barrier of all warps"
            )
        if verdict:
            print(f"  all that it printed: {arguments.out / f'{tool}.txt'}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
