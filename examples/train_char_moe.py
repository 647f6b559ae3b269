"""Train a small MoE language model on the source of Python's standard library, with eager and with moepdl.

    python examples/train_char_moe.py                  # 200 steps each, both curves, a verdict
    python examples/train_char_moe.py --no-compare     # moepdl alone

The model is plain PyTorch: byte embeddings, causal attention, and in each block eight experts, of which a token takes
two. The experts are written as a loop over all of them with a one-hot mask. `fullgraph=True` tells torch.compile to
take such a loop as one graph.

The verdict, in fp32. Summation order differs between any two correct programs, and a router's near tie then sends a
token elsewhere: after some steps two runs of eager itself part. So eager runs twice, with one thread and with two, and
  1. in the first 20 steps moepdl's loss is within 1e-3 of eager's;
  2. after that, with losses averaged over 20 steps, moepdl is never farther from the nearer eager run than the two
     eager runs are from each other at their farthest (1e-3 at least).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 2_000_000  # of text; 90 % are for training
BATCH, LENGTH = 8, 96
HIDDEN, INTERMEDIATE, HEADS, BLOCKS = 128, 128, 4, 3
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
CLOSE_STEPS, CLOSE, WINDOW = 20, 1e-3, 20


def read_text(limit: int = BYTES) -> torch.Tensor:
    """Bytes [limit] of the standard library's modules in the order of their names, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    chunks, size = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if skipped.isdisjoint(path.relative_to(root).parts):
            chunks.append(path.read_bytes())
            size += len(chunks[-1])
            if size >= limit:
                break
    if not chunks:
        raise SystemExit(f"no Python source under {root}: this Python has no readable standard library")
    return torch.frombuffer(bytearray(b"".join(chunks)[:limit]), dtype=torch.uint8)


class Expert(nn.Module):
    """down(silu(gate(x)) * up(x)), on rows [N, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_NH)) * self.up(x_NH))


class MoE(nn.Module):
    """Two of eight experts for each token, weighted by the softmax over all eight, renormalised."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_TH = x_BSH.reshape(-1, HIDDEN)
        scores_TE = F.softmax(self.router(x_TH), dim=-1, dtype=torch.float)
        weights_TK, ids_TK = torch.topk(scores_TE, EXPERTS_PER_TOKEN, dim=-1)
        weights_TK = (weights_TK / weights_TK.sum(dim=-1, keepdim=True)).to(x_TH.dtype)
        y_TH = torch.zeros_like(x_TH)
        mask_EKT = F.one_hot(ids_TK, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            choice, token = torch.where(mask_EKT[e])
            rows = self.experts[e](x_TH[token]) * weights_TK[token, choice, None]
            y_TH.index_add_(0, token, rows.to(x_TH.dtype))
        return y_TH.reshape(x_BSH.shape)


class Block(nn.Module):
    """Causal attention, then the experts; both on normalised input and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_moe = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = MoE()

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        b, s, h = x_BSH.shape
        qkv = self.qkv(self.norm_attention(x_BSH)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BSH = x_BSH + self.out(attended.transpose(1, 2).reshape(b, s, h))
        return x_BSH + self.moe(self.norm_moe(x_BSH))


class CharMoE(nn.Module):
    """Bytes [B, S] to the mean loss of predicting each next byte [B, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 256, bias=False)

    def forward(self, ids_BS: torch.Tensor, next_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embedding(ids_BS) + self.position[: ids_BS.shape[1]]
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return F.cross_entropy(self.head(self.norm(x_BSH)).flatten(0, 1), next_BS.flatten())


class Run(NamedTuple):
    """The loss of each step, and its seconds; the first step of a compiled run holds the compilation."""

    losses: list[float]
    seconds: list[float]

    @property
    def step_ms(self) -> float:
        """Median milliseconds of a step after the first."""
        return 1e3 * statistics.median(self.seconds[1:] or self.seconds)


def train(text: torch.Tensor, steps: int, backend: str | None, threads: int, label: str) -> Run:
    """The losses and times of a run. Same seed, same batches for every call; backend None is eager."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = CharMoE()
    step: Any = model
    if backend is not None:
        torch._dynamo.reset()
        step = torch.compile(model, backend=_named(backend), fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    run = Run([], [])
    begin = said = time.monotonic()
    for i in range(steps):
        started = time.monotonic()
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draw).tolist()
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts]).long()
        loss = step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.seconds.append(time.monotonic() - started)
        if i == 0 and backend is not None:
            print(f"{label}: compiled, with the first step, in {time.monotonic() - begin:.1f} s")
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{label}: step {i + 1} of {steps}, loss {run.losses[-1]:.3f}")
    print(
        f"{label}: {steps} steps in {time.monotonic() - begin:.1f} s, {run.step_ms:.1f} ms a step, "
        f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}"
    )
    return run


def _named(backend: str) -> Any:
    """The name, or moepdl's function when the package is on the path but not installed."""
    if backend == "moepdl" and backend not in torch._dynamo.list_backends(exclude_tags=()):
        from moe_compiler.backend import moepdl

        return moepdl
    return backend


def smooth(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Means of each `window` neighbouring losses; as many as fit."""
    window = min(window, len(losses))
    return [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def verdict(one: Sequence[float], two: Sequence[float], ours: Sequence[float]) -> tuple[bool, list[str]]:
    """Whether `ours` agrees with eager on one and on two threads, and the sentences that say so."""
    if not all(map(math.isfinite, ours)):  # max() would pass over a NaN
        return False, [
            f"step {next(i for i, v in enumerate(ours) if not math.isfinite(v)) + 1}: the loss is not finite"
        ]
    early = max(abs(a - b) for a, b in zip(two[:CLOSE_STEPS], ours[:CLOSE_STEPS], strict=True))
    lines = [f"first {min(CLOSE_STEPS, len(ours))} steps: largest difference {early:.1e}, allowed {CLOSE:.0e}"]
    good = early <= CLOSE
    if len(ours) > CLOSE_STEPS:
        a, b, c = (smooth(losses[CLOSE_STEPS:]) for losses in (one, two, ours))
        spread = max(abs(x - y) for x, y in zip(a, b, strict=True))
        late = max(min(abs(z - x), abs(z - y)) for x, y, z in zip(a, b, c, strict=True))
        allowed = max(spread, CLOSE)
        good = good and late <= allowed
        lines.append(
            f"steps {CLOSE_STEPS + 1} to {len(ours)}, means over {WINDOW}: largest distance {late:.1e}, "
            f"allowed {allowed:.1e} (eager on 1 against 2 threads: {spread:.1e})"
        )
    return good, lines


def sparkline(losses: Sequence[float], low: float, high: float, width: int = 72) -> str:
    """The curve in one line of text, on the scale from low to high."""
    marks = "▁▂▃▄▅▆▇█"
    count = min(width, len(losses))
    picks = [losses[i * (len(losses) - 1) // max(count - 1, 1)] for i in range(count)]
    return "".join(marks[min(7, int(8 * (v - low) / (high - low + 1e-9)))] for v in picks)


def draw_svg(curves: Mapping[str, Sequence[float]], caption: str) -> str:
    """All curves in one picture. Colour is not the only sign: each has its own dash and its name at the side."""
    styles = [("#888888", "none", 4), ("#d08000", "6 4", 2), ("#0050b0", "2 3", 2)]
    left, top, width, height = 60, 40, 620, 300
    high = max(max(c) for c in curves.values())
    low = min(min(c) for c in curves.values())
    steps = max(len(c) for c in curves.values())
    x = [left + width * i / max(steps - 1, 1) for i in range(steps)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 400" font-family="sans-serif" font-size="13">',
        '<rect width="880" height="400" fill="white"/>',
        f'<text x="{left}" y="24">{caption}</text>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        y = top + height - height * i / 4
        parts.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for i in (0, steps // 2, steps - 1):
        parts.append(f'<text x="{x[i]:.1f}" y="{top + height + 20}" text-anchor="middle">{i + 1}</text>')
    for row, (name, losses) in enumerate(curves.items()):
        colour, dash, thick = styles[row % len(styles)]
        look = f'fill="none" stroke="{colour}" stroke-width="{thick}" stroke-dasharray="{dash}"'
        ys = [top + height * (high - v) / (high - low + 1e-9) for v in losses]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, ys, strict=False))
        parts.append(f'<path d="{path}" {look}/>')
        y = top + 16 + 22 * row
        parts.append(f'<path d="M{left + width + 12} {y - 4}h28" {look}/>')
        parts.append(f'<text x="{left + width + 46}" y="{y}">{name}</text>')
    parts.append(f'<text x="{left + width / 2:.0f}" y="{top + height + 44}" text-anchor="middle">step</text></svg>')
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """0: trained, and in agreement with eager where it was compared. 1: it was not."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--backend", default="moepdl", help="any torch.compile backend (default moepdl)")
    p.add_argument("--out", default="out/train_char_moe", help="folder for losses.svg")
    p.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="train with eager too")
    arguments = p.parse_args(argv)
    text = read_text()
    text = text[: len(text) * 9 // 10]
    print(f"{len(text) / 1e6:.1f} MB of Python source, {BATCH} x {LENGTH} bytes a step, {EXPERTS} experts, fp32")
    ways: list[tuple[str, str | None, int]] = [(arguments.backend, arguments.backend, 2)]
    if arguments.compare:
        print("eager runs twice: how far 1 and 2 threads part is the noise floor that the comparison allows")
        ways = [("eager, 1 thread", None, 1), ("eager, 2 threads", None, 2), *ways]
    runs = {name: train(text, arguments.steps, backend, threads, name) for name, backend, threads in ways}
    curves = {name: run.losses for name, run in runs.items()}
    ours = curves[arguments.backend]

    low, high = min(min(c) for c in curves.values()), max(max(c) for c in curves.values())
    print()
    for name, losses in curves.items():
        last = min(WINDOW, len(losses))
        print(f"{name:>17} {sparkline(losses, low, high)} mean of last {last} losses {smooth(losses)[-1]:.3f}")
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "losses.svg").write_text(draw_svg(curves, "loss of the next byte, Python's standard library"))
    print(f"\ncurves: {(out / 'losses.svg').resolve()}")
    if not arguments.compare:
        return 0
    eager_ms, our_ms = runs["eager, 2 threads"].step_ms, runs[arguments.backend].step_ms
    print(
        f"{our_ms:.1f} ms a step against {eager_ms:.1f} ms of eager, both on 2 threads: "
        f"ratio {our_ms / eager_ms:.2f} (medians, without the first step)"
    )
    good, lines = verdict(curves["eager, 1 thread"], curves["eager, 2 threads"], ours)
    print("\n".join(lines))
    print(f"{arguments.backend} {'agrees' if good else 'DOES NOT AGREE'} with eager")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
