"""Check and time the device kernels on one GPU: every stage, whole chains with PDL on and off, tiles to choose from.

    python benchmarks/kernels_h200.py [--shape qwen3] [--tokens 1 8 128] [--sweep] [--workers 14]

Times are microseconds in a CUDA graph of calls over rotating inputs, replay time over the number of calls, median of
the replays: the calls of a graph follow each other, so the head of one may overlap the tail of the one before. Every
chain is checked against a float32 run first. `floor` is the time that the bytes of the experts hit by these inputs,
or the arithmetic, need at least. `--sweep` tries the tiles of TILES for every stage; compile them first in
`--workers` processes. The numbers go to $OUT/kernels_h200.json when OUT is set. A short table comes last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from moe_compiler.measure import graph_us
from moe_compiler.runtime_kernels.order.reference import ORDER_FEW, order_blocks
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import Tile

GIGABYTES = 4300.0  # what the card reads and writes a second (copy); TERAFLOPS: bf16 matmul. H200, measured.
TERAFLOPS = 790.0


@dataclass(frozen=True)
class Shape:
    """Sizes of one MoE block."""

    experts: int
    k: int
    hidden: int
    inner: int


SHAPES = {"qwen3": Shape(128, 8, 2048, 768), "mixtral": Shape(8, 2, 4096, 14336)}
SCORE = {"score": "softmax", "order": "before", "renormalize": True, "clamp": False, "eps": 0.0, "scale": 1.0}
SCORE |= {"score_dtype": torch.float32}
ROUTE = {**SCORE, "groups": 1, "kept_groups": 1, "group_top": 1, "fill": "-inf"}
FORWARD_FEW = ("route", "gate_up_few", "down_few")


def few(shape: Shape, tokens: int) -> bool:
    """Whether the unsorted kernels are the better choice."""
    return tokens == 1 or tokens * shape.k * 4 <= shape.experts


def forward_names(shape: Shape, tokens: int) -> tuple[str, ...]:
    """The launches of the forward chain for this many tokens."""
    if few(shape, tokens):
        return FORWARD_FEW
    order = ("order",) if tokens * shape.k <= ORDER_FEW else ("order_count", "order_scatter")
    return ("route", *order, "gate_up", "down", "combine")


BACKWARD = ("grad_act", "grad_down", "grad_pairs", "grad_x", "grad_gate_up", "route_backward")


class Problem:
    """The tensors of a block of one shape for T tokens, `inputs` times, with weights shared between them."""

    def __init__(self, shape: Shape, tokens: int, inputs: int, weights: dict[str, torch.Tensor], train: bool) -> None:
        self.shape, self.tokens, self.inputs = shape, tokens, inputs
        self.weights, self.train = weights, train
        self.sets = [self._make(seed, train) for seed in range(inputs)]

    def _make(self, seed: int, train: bool) -> dict[str, Any]:
        s, t = self.shape, self.tokens
        pairs = t * s.k
        g = torch.Generator(device="cuda").manual_seed(seed)
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        int32 = {"dtype": torch.int32, "device": "cuda"}
        d: dict[str, Any] = {
            "x": torch.randn(t, s.hidden, generator=g, **bf16),
            "logits": torch.randn(t, s.experts, generator=g, device="cuda"),
            "weights": torch.empty(t, s.k, **bf16),
            "ids": torch.zeros(t, s.k, dtype=torch.int64, device="cuda"),
            "counts": torch.zeros(order_blocks(pairs), s.experts, **int32),
            "perm": torch.zeros(pairs, **int32),
            "starts": torch.zeros(s.experts + 1, **int32),
            "act": torch.empty(pairs, s.inner, **bf16),
            "pairs": torch.empty(pairs, s.hidden, **bf16),
            "y": torch.empty(t, s.hidden, **bf16),
        }
        if train:
            d["preact"] = torch.empty(pairs, 2 * s.inner, **bf16)
            d["grad_y"] = torch.randn(t, s.hidden, generator=g, **bf16)
            d["grad_preact"] = torch.empty(pairs, 2 * s.inner, **bf16)
            d["grad_weights"] = torch.empty(t, s.k, device="cuda")
            d["grad_x"] = torch.empty(t, s.hidden, **bf16)
            d["grad_logits"] = torch.empty(t, s.experts, device="cuda")
            d["grad_gate"] = torch.empty_like(self.weights["gate"])
            d["grad_down"] = torch.empty_like(self.weights["down"])
        return d

    def launch(self, name: str, i: int, pdl: bool, **options: Any) -> None:
        """Launch one stage on the tensors of input i."""
        d, s = self.sets[i % self.inputs], self.shape
        gate, down = [self.weights["gate"]], [self.weights["down"]]
        act: dict[str, Any] = {"activation": "silu", "gated": True}
        expert = {"perm": d["perm"], "starts": d["starts"]}
        ids = {"ids": d["ids"]}
        preact = {"preact": d["preact"]} if self.train else {}
        outs, ins, attrs = {
            "route": lambda: (
                {"weights": d["weights"], "ids": d["ids"]},
                {"logits": d["logits"], "bias": None, "expert_scale": None},
                {"k": s.k, "dtype": torch.bfloat16, **ROUTE},
            ),
            "order": lambda: (expert, ids, {"num_experts": s.experts}),
            "order_count": lambda: ({"counts": d["counts"]}, ids, {"num_experts": s.experts}),
            "order_scatter": lambda: (expert, {**ids, "counts": d["counts"]}, {"num_experts": s.experts}),
            "gate_up": lambda: (
                {"act": d["act"], **preact},
                {"x": d["x"], "weights": None, **expert, "gate": gate, "up": []},
                {"k": s.k, **act},
            ),
            "gate_up_few": lambda: (
                {"act": d["act"]},
                {"x": d["x"], "weights": None, **ids, "gate": gate, "up": []},
                act,
            ),
            "down": lambda: ({"pairs": d["pairs"]}, {"act": d["act"], **expert, "down": down}, {}),
            "down_few": lambda: (
                {"y": d["y"]},
                {"act": d["act"], **ids, "weights": d["weights"], "down": down},
                {"dtype": torch.bfloat16},
            ),
            "combine": lambda: (
                {"y": d["y"]},
                {"pairs": d["pairs"], "weights": d["weights"]},
                {"k": s.k, "dtype": torch.bfloat16},
            ),
            "grad_act": lambda: (
                {"grad_preact": d["grad_preact"], "act": d["act"], "grad_weights": d["grad_weights"]},
                {"grad_y": d["grad_y"], "weights": d["weights"], "preact": d["preact"], **expert, "down": down},
                {"k": s.k, **act},
            ),
            "grad_down": lambda: (
                {"grad_down": [d["grad_down"]]},
                {"grad_y": d["grad_y"], "act": d["act"], **expert, "down": down},
                {"k": s.k},
            ),
            "grad_pairs": lambda: (
                {"pairs": d["pairs"]},
                {"grad_preact": d["grad_preact"], **expert, "gate": gate, "up": []},
                {"gated": True},
            ),
            "grad_x": lambda: (
                {"y": d["grad_x"]},
                {"pairs": d["pairs"], "weights": None},
                {"k": s.k, "dtype": torch.bfloat16},
            ),
            "grad_gate_up": lambda: (
                {"grad_gate": [d["grad_gate"]], "grad_up": []},
                {"x": d["x"], "weights": None, "grad_preact": d["grad_preact"], **expert, "gate": gate, "up": []},
                {"k": s.k, "gated": True},
            ),
            "route_backward": lambda: (
                {"grad_logits": d["grad_logits"]},
                {"grad_weights": d["grad_weights"], "logits": d["logits"], **ids, "expert_scale": None},
                SCORE,
            ),
        }[name]()
        kernel("combine" if name == "grad_x" else name).launch(outs, ins, attrs, pdl=pdl, **options)

    def chain(self, names: tuple[str, ...], i: int, pdl: bool) -> None:
        """Launch stages in order on input i."""
        for name in names:
            self.launch(name, i, pdl)

    def floor(self) -> float:
        """Microseconds that the forward of these inputs needs at least."""
        s = self.shape
        hit = sum(len(d["ids"].unique()) for d in self.sets) / self.inputs
        traffic = (hit * 3 * s.hidden * s.inner + 2 * self.tokens * s.hidden) * 2 / GIGABYTES / 1e3
        return max(traffic, 6 * self.tokens * s.k * s.hidden * s.inner / TERAFLOPS / 1e6)


def make_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """Packed expert weights: gate over up [E,2I,H], down [E,H,I], and the router's [E,H]."""
    g = torch.Generator(device="cuda").manual_seed(1)
    options = {"dtype": torch.bfloat16, "device": "cuda", "generator": g}
    return {
        "gate": torch.randn(shape.experts, 2 * shape.inner, shape.hidden, **options).mul_(0.02),
        "down": torch.randn(shape.experts, shape.hidden, shape.inner, **options).mul_(0.02),
        "router": torch.randn(shape.experts, shape.hidden, **options).mul_(0.02),
    }


def reference(p: Problem, i: int, grads: bool) -> dict[str, torch.Tensor]:
    """The block in float32 on input i with the ids that the kernels chose; with gradients when asked."""
    d, s = p.sets[i], p.shape
    x = d["x"].float().requires_grad_(grads)
    logits = d["logits"].clone().requires_grad_(grads)
    chosen = torch.softmax(logits, -1).gather(1, d["ids"])
    weights = chosen / chosen.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    result: dict[str, torch.Tensor] = {}
    gate_grad, down_grad = [], []
    for e in range(s.experts):
        t, j = (d["ids"] == e).nonzero(as_tuple=True)
        gate = p.weights["gate"][e].float().requires_grad_(grads)
        down = p.weights["down"][e].float().requires_grad_(grads)
        h = x[t] @ gate.T
        out = (F.silu(h[:, : s.inner]) * h[:, s.inner :]) @ down.T
        y = y.index_add(0, t, out * weights[t, j, None])
        gate_grad.append(gate)
        down_grad.append(down)
    result["y"] = y.detach()
    if grads:
        y.backward(d["grad_y"].float())
        result |= {"grad_x": x.grad, "grad_logits": logits.grad}
        result["grad_gate"] = torch.stack([w.grad for w in gate_grad])
        result["grad_down"] = torch.stack([w.grad for w in down_grad])
    return result


def check(p: Problem) -> dict[str, float]:
    """Relative errors of the chain on every result; the results are poisoned first. Raises on a wrong one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    names = ("y", "grad_x", "grad_logits", "grad_gate", "grad_down") if p.train else ("y",)
    for name in ("act", "pairs", "preact", "grad_preact", *names):
        if name in p.sets[0]:
            p.sets[0][name].fill_(float("nan"))
    p.chain(forward_names(p.shape, p.tokens), 0, True)
    if p.train:
        p.chain(BACKWARD, 0, True)
    want = reference(p, 0, p.train)
    errors = {n: ((p.sets[0][n].float() - want[n]).norm() / want[n].norm()).item() for n in names}
    for name, error in errors.items():
        if not error < 2e-2:
            raise SystemExit(f"T={p.tokens}: {name} is wrong, relative error {error}")
    return errors


def host_time(call: Any, calls: int = 20) -> float:
    """Median microseconds from the call to its synchronised end, without a graph."""
    times = []
    for i in range(calls + 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times[5:])[calls // 2]


# What --sweep tries, by stage and by rows an expert, in the order of the fields of Tile.
_SMALL = ((64, 128, 4, 3), (64, 128, 4, 4), (32, 256, 4, 3), (64, 256, 4, 2), (128, 64, 4, 4), (128, 128, 4, 3))
_MIDDLE = ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4))
_TWO_PROGRAMS = ((192, 64, 8, 2, 128), (192, 32, 8, 4, 128), (192, 32, 8, 5, 128), (128, 64, 8, 3, 128))
_LARGE = {
    "gate_up": ((128, 64, 8, 4, None), (64, 64, 8, 4, None), (64, 64, 4, 4, None), (128, 32, 8, 6, None)),
    "down": (*_TWO_PROGRAMS, (192, 64, 8, 3, None), (256, 64, 8, 4, None), (256, 32, 8, 6, None)),
}
_FEW = {
    "gate_up_few": ((1, 2048, 2), (2, 2048, 4), (4, 1024, 4), (2, 1024, 2), (8, 512, 4), (16, 256, 4)),
    "down_few": ((4, 1024, 4), (2, 1024, 4), (8, 512, 4), (16, 256, 4), (8, 256, 2), (4, 256, 2)),
}
_GRADS = ((128, 32, 4, 5), (128, 32, 4, 7), (192, 32, 4, 5), (192, 32, 4, 6), (192, 32, 4, 7), (192, 32, 8, 5))
_GRADS = (*_GRADS, (192, 32, 8, 6), (192, 32, 8, 7), (192, 64, 4, 2), (192, 64, 8, 2), (192, 64, 8, 4), (192, 64, 4, 4))
_GRADS_SMALL = ((64, 128, 16, 4, 2), (128, 128, 16, 4, 2), (128, 128, 32, 4, 2), (128, 128, 32, 4, 3))


def candidates(name: str, mean_rows: int) -> list[Tile]:
    """The tiles to try for a stage with `mean_rows` rows an expert."""
    if name in _FEW:
        return [Tile(1, *tail, stages) for tail in _FEW[name] for stages in (1, 3)]
    if name in ("grad_down", "grad_gate_up"):
        return [Tile(128, *tail, 4) for tail in _GRADS] if mean_rows > 64 else [Tile(*t, 8) for t in _GRADS_SMALL]
    result = []
    if mean_rows <= 32:
        rows = (16,) if mean_rows <= 8 else (16, 32) if mean_rows < 32 else (32, 64)
        result += [Tile(r, *tail, 1, swap, True) for r in rows for tail in _SMALL for swap in (False, True)]
    if 24 <= mean_rows <= 128:
        tails = [(64, *tail, 1) for tail in _MIDDLE]
        result += [Tile(*tail, swap, True, half) for tail in tails for swap in (False, True) for half in (False, True)]
    if mean_rows >= 64:
        for *tail, registers in _LARGE.get(name, _LARGE["down"]):
            result += [Tile(128, *tail, group, False, True, True, registers) for group in (1, 8)]
    return result


TILED = ("gate_up_few", "down_few", "gate_up", "down", "grad_act", "grad_down", "grad_pairs", "grad_gate_up")
_worker: dict[str, Any] = {}


def compile_one(job: tuple[str, int, str, Tile | None, bool]) -> str | None:
    """Compile (and run once) one stage with one tile; the error's text if it cannot be."""
    shape_name, tokens, name, tile, train = job
    shape = SHAPES[shape_name]
    if "weights" not in _worker:
        _worker["weights"] = {
            "gate": torch.empty(shape.experts, 2 * shape.inner, shape.hidden, dtype=torch.bfloat16, device="cuda"),
            "down": torch.empty(shape.experts, shape.hidden, shape.inner, dtype=torch.bfloat16, device="cuda"),
        }
    key = (tokens, train)
    if _worker.get("key") != key:
        _worker["problem"], _worker["key"] = Problem(shape, tokens, 1, _worker["weights"], train), key
    try:
        for pdl in (True,) if tile else (True, False):
            _worker["problem"].launch(name, 0, pdl, **({"tile": tile} if tile else {}))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {tile}: {type(error).__name__} {str(error)[:200]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 32, 128, 512, 2048, 8192])
    parser.add_argument("--train", type=int, nargs="*", default=[8192], help="token counts for forward + backward")
    parser.add_argument("--sweep", action="store_true", help="try the tiles of every stage")
    parser.add_argument("--only", nargs="*", help="sweep these stages only")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options = parser.parse_args()
    shape, start = SHAPES[options.shape], time.time()
    cases = [(t, False) for t in options.tokens] + [(t, True) for t in options.train]
    stages = {
        (t, train): forward_names(shape, t) + (BACKWARD if train else ()) if not few(shape, t) or train else FORWARD_FEW
        for t, train in cases
    }
    sweeps = {
        case: {
            name: candidates(name, -(-case[0] * shape.k // shape.experts))
            for name in names
            if options.sweep
            and name in TILED
            and (not options.only or name in options.only)
            # The forward of a training case differs by what it saves only.
            and (not case[1] or name in BACKWARD)
        }
        for case, names in stages.items()
    }
    jobs = [(options.shape, t, n, None, train) for (t, train), names in stages.items() for n in names]
    jobs += [
        (options.shape, t, n, tile, train) for (t, train), s in sweeps.items() for n, ts in s.items() for tile in ts
    ]
    jobs.sort(key=lambda job: (job[1], job[4]))
    failed: list[str] = []
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            failed = [text for text in pool.map(compile_one, jobs, chunksize=4) if text]
    print(
        f"{len(jobs)} compilations, {len(failed)} failed, {time.time() - start:.0f} s", *failed, sep="\n  ", flush=True
    )
    weights = make_weights(shape)
    record: dict[str, Any] = {"shape": options.shape, "device": torch.cuda.get_device_name(), "cases": []}
    table = []
    for tokens, train in cases:
        case = measure(shape, tokens, train, weights, stages[(tokens, train)], sweeps[(tokens, train)])
        record["cases"].append(case)
        if out := os.environ.get("OUT"):
            Path(out, f"kernels_{options.shape}.json").write_text(json.dumps(record))
        table.append(row(case))
        print(table[-1], flush=True)
        torch.cuda.empty_cache()
    spent = f"{time.time() - start:.0f} s in all"
    print(f"\n{options.shape}, {record['device']}, us in a CUDA graph ({spent})", *table, sep="\n")


def measure(
    shape: Shape,
    tokens: int,
    train: bool,
    weights: dict[str, torch.Tensor],
    names: tuple[str, ...],
    sweep: dict[str, list[Tile]],
) -> dict[str, Any]:
    """Check one case, then time its stages, its chain and the tiles of `sweep`."""
    p = Problem(shape, tokens, (8 if tokens <= 512 else 2) if not train else 1, weights, train)
    errors = check(p)
    for i in range(1, p.inputs):
        p.chain(names, i, True)
    torch.cuda.synchronize()

    def block(i: int) -> None:
        d = p.sets[i % p.inputs]
        d["logits"] = F.linear(d["x"], weights["router"]).float()
        p.chain(names, i, True)

    case: dict[str, Any] = {"T": tokens, "train": train, "errors": errors, "floor": p.floor()}
    case["stages"] = {name: graph_us(lambda i, n=name: p.launch(n, i, True), p.inputs, replays=20) for name in names}
    case["pdl"] = graph_us(lambda i: p.chain(names, i, True), p.inputs, replays=20)
    case["plain"] = graph_us(lambda i: p.chain(names, i, False), p.inputs, replays=20)
    case["host"] = host_time(lambda i: p.chain(names, i, True))
    case["with_router"] = None if train else graph_us(block, p.inputs, replays=20)
    case["tiles"] = {}
    for name, tiles in sweep.items():
        found = []
        for tile in tiles:
            try:
                spent = graph_us(lambda i, n=name, t=tile: p.launch(n, i, True, tile=t), p.inputs, replays=8)
                found.append((spent, astuple(tile)))
            except Exception as error:
                print(f"  {name} {tile}: {type(error).__name__} {str(error)[:120]}", flush=True)
        case["tiles"][name] = sorted(found)
        for spent, tile in case["tiles"][name][:5]:
            print(f"  T={tokens} {name} {spent:.1f} us {tile}", flush=True)
    return case


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    stages = " ".join(f"{name} {spent:.1f}" for name, spent in case["stages"].items())
    router = f"{case['with_router']:7.1f}" if case["with_router"] else "      -"
    return (
        f"{case['T']:6d}{' f+b' if case['train'] else '    '} floor {case['floor']:7.1f}  pdl {case['pdl']:7.1f}  "
        f"plain {case['plain']:7.1f}  +router {router}  host {case['host']:7.1f}  "
        f"err {max(case['errors'].values()):.4f}  | {stages}"
    )


if __name__ == "__main__":
    main()
