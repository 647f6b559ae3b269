"""Train the character model of train_char_moe.py with its experts spread over several processes.

    python examples/train_ep.py                          # 2 processes on this machine, then eager on one, a verdict
    torchrun --nproc-per-node 4 examples/train_ep.py     # as many as torchrun starts, on one machine or several

Each process holds its share of the experts and a copy of all the rest, and takes its share of each batch. What it takes
to train so is in `train`: `expert_parallel` before the optimizer is made, each rank's loss divided by the number of
ranks, and the gradients of what is copied summed over the ranks. The gradients of the experts are such sums already.

The verdict is that of train_char_moe.py: the loss of the whole batch, as close to eager's on one process as two runs of
eager are to each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.train_char_moe import BATCH, LENGTH, CharMoE, _named, read_text, smooth, verdict
from examples.train_char_moe import train as train_alone
from moe_compiler import expert_parallel, last_reports


def train(text: torch.Tensor, steps: int, overlap: str) -> list[float]:
    """The losses of the whole batches; the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:
        raise SystemExit(f"a batch of {BATCH} cannot be divided by {ranks} processes")
    torch.manual_seed(0)  # every rank makes the same model, and keeps its share of the experts
    model = CharMoE()
    done = expert_parallel(model, dist.group.WORLD)
    if rank == 0:
        print(*done, sep="\n")
    shared = {name for one in done for name in one.parameters}
    copied = [parameter for name, parameter in model.named_parameters() if name not in shared]
    step = torch.compile(
        model,
        backend=_named("moepdl"),
        fullgraph=True,
        dynamic=False,
        options={"overlap": overlap, "require_match": len(done)},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    losses: list[float] = []
    begin = time.monotonic()
    for i in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draw).tolist()
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts[rank::ranks]]).long()
        loss = step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / ranks
        optimizer.zero_grad()
        loss.backward()
        sum_over_ranks(copied)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        if rank == 0 and (i == 0 or (i + 1) % 20 == 0):
            print(f"step {i + 1} of {steps}, loss {losses[-1]:.3f}, {time.monotonic() - begin:.1f} s")
    if rank == 0:
        print(*last_reports()[-1].folded_exchanges(), sep="\n")
    return losses


def sum_over_ranks(parameters: Sequence[nn.Parameter]) -> None:
    """Gradients of what every rank has a copy of, in one exchange."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def compare(text: torch.Tensor, ours: Sequence[float]) -> bool:
    """Does the loss agree with that of eager on one process?"""
    eager = [train_alone(text, len(ours), None, threads, f"eager, {threads} threads").losses for threads in (1, 2)]
    good, lines = verdict(*eager, ours)
    print(f"last losses, means: {smooth(ours)[-1]:.4f}, eager on one process {smooth(eager[0])[-1]:.4f}")
    print("\n".join(lines))
    print(f"expert parallelism {'agrees' if good else 'DOES NOT AGREE'} with eager on one process")
    return good


def start(ranks: int, argv: Sequence[str]) -> int:
    """Run this file on `ranks` processes of this machine."""
    environment = dict(os.environ)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*command, str(Path(__file__).resolve()), *argv], env=environment, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """0: trained, and in agreement with eager where it was compared. 1: it was not."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--ranks", type=int, default=2, help="processes to start (not under torchrun)")
    p.add_argument("--overlap", default="on", choices=["off", "auto", "on"], help="the option of the backend")
    p.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="train with eager too")
    argv = sys.argv[1:] if argv is None else argv
    arguments = p.parse_args(argv)
    if "RANK" not in os.environ:
        return start(arguments.ranks, argv)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    text = read_text()
    text = text[: len(text) * 9 // 10]
    losses = train(text, arguments.steps, arguments.overlap)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return int(rank == 0 and arguments.compare and not compare(text, losses))


if __name__ == "__main__":
    sys.exit(main())
