"""transformers' Qwen3 MoE block on one GPU: Inductor against moepdl, with and without a CUDA graph; forward + backward
too.

    python -m benchmarks.block_h200              # writes docs/benchmarks/h200.json and h200.md

E=128, k=8, H=2048, I=768 in bf16, router included. "graph": one CUDA graph of 8 calls on 8 inputs (2 from T=2048 on),
replay time divided by the calls. "nograph": one call between two events on an idle device, so host time counts.
Inductor's column is the better of transformers' two spellings; moepdl compiles grouped_mm. Each output is checked
against float64 first.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, captured, device_us, median, table, write
from moe_compiler import timing
from moe_compiler.demo import (
    FACTOR,
    TOLERANCE,
    backend_or_function,
    chosen_ids,
    float64_mode,
    forced_ids,
    ignore_known_warnings,
)

DEVICE = "cuda"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
# The gathered weights of batched_mm take T * k * 3 * H * I elements; above this it is left out.
GATHER_LIMIT = 20e9
BANDWIDTH, FLOPS = 4.3e12, 790e12


def build() -> tuple[torch.nn.Module, Any]:
    """The block in bf16 on the GPU, seed 0, and its config, on which the spelling can be changed."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(DEVICE):
        module = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    return module, config


def floor_us(tokens: int, hit: int, passes: int = 1) -> float:
    """The larger of the time to read the experts hit and the time to multiply, in us. passes: 3 with backward."""
    read = hit * 3 * HIDDEN * INTERMEDIATE * 2 / BANDWIDTH
    return max(read, passes * tokens * TOP_K * 6 * HIDDEN * INTERMEDIATE / FLOPS) * 1e6


def exact_output(module: torch.nn.Module, x: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
    """The block's output in float64, with these expert ids."""
    twin = copy.deepcopy(module).double()
    twin.experts.config._experts_implementation = "eager"  # its own copy of the config
    with torch.no_grad(), float64_mode(), forced_ids(twin, ids):
        return twin(x.double())


def check(name: str, output: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    """Empty when the output is right; else what is wrong."""
    error, own = (((y.double() - exact).norm() / exact.norm()).item() for y in (output, eager))
    if error <= FACTOR * own + TOLERANCE["bfloat16"]:
        return ""
    return f"{name} is wrong: error {error:.1e} against float64, eager's is {own:.1e}"


def forward(module: torch.nn.Module, config: Any, tokens: int, backend: str) -> dict[str, Any]:
    """One row: medians in us, by column, and the ratio of moepdl to the better Inductor spelling."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    count = 8 if tokens <= 512 else 2
    inputs = [torch.randn(1, tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
    config._experts_implementation = "grouped_mm"
    problems: list[str] = []
    graphs: dict[str, Callable[[], object]] = {}
    singles: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        eager = module(inputs[0])
        ids = chosen_ids(module, lambda: module(inputs[0]))
        exact = exact_output(module, inputs[0], ids)
        ways = [("inductor grouped_mm", "inductor", "grouped_mm"), ("moepdl", backend, "grouped_mm")]
        if tokens * TOP_K * 3 * HIDDEN * INTERMEDIATE <= GATHER_LIMIT:
            ways.append(("inductor batched_mm", "inductor", "batched_mm"))
        for way, name, spelling in ways:
            config._experts_implementation = spelling
            # Each spelling has a module of its own: Dynamo would see one module whose config changes.
            own = copy.deepcopy(module) if spelling != "grouped_mm" else module
            compiled = torch.compile(own, backend=backend_or_function(name), dynamic=False)
            problem = check(f"{way} T={tokens}", compiled(inputs[0]), eager, exact)
            if problem:
                problems.append(problem)
            singles[way] = lambda compiled=compiled: compiled(inputs[0])
            graphs[way] = captured(compiled, inputs)
        config._experts_implementation = "grouped_mm"
        graph = device_us(graphs, calls=count)
        single = device_us(singles, rounds=20)
    row: dict[str, Any] = {"T": tokens, "floor": floor_us(tokens, int(ids[0].unique().numel()))}
    for label, samples in (("graph", graph), ("nograph", single)):
        best = min((way for way in samples if way != "moepdl"), key=lambda way: median(samples[way]))
        row[f"Inductor {label}"] = median(samples[best])
        row[f"moepdl {label}"] = median(samples["moepdl"])
        row[f"ratio {label} (95 %)"] = str(timing.ratio(samples["moepdl"], samples[best]))
        row[f"Inductor's spelling, {label}"] = best.removeprefix("inductor ")
    row["check"] = "; ".join(problems) or "ok"
    return row


def training(module: torch.nn.Module, tokens: int, backend: str) -> dict[str, Any]:
    """Forward + backward, without a graph; peak memory above inputs, parameters and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    x = torch.randn(1, tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    tensors = [x, *module.parameters()]

    def step(call: Callable[[Any], Any]) -> Any:
        for tensor in tensors:
            tensor.grad = None
        y = call(x)
        y.backward(grad)
        return y

    exact = copy.deepcopy(module).double()
    exact.experts.config._experts_implementation = "eager"
    ids = chosen_ids(module, lambda: step(module))
    eager = [tensor.grad for tensor in tensors]
    x64 = x.detach().double().requires_grad_()
    with float64_mode(), forced_ids(exact, ids):
        exact(x64).backward(grad.double())
    want = [x64.grad, *(p.grad for p in exact.parameters())]
    ways = {"eager": module}
    row: dict[str, Any] = {"T": tokens, "floor": floor_us(tokens, EXPERTS, passes=3)}
    problems = []
    for way, name in (("Inductor", "inductor"), ("moepdl", backend)):
        ways[way] = torch.compile(module, backend=backend_or_function(name), dynamic=False)
        step(ways[way])
        got = [tensor.grad for tensor in tensors]
        for label, ours, own, right in zip(("x", "gate_up", "down", "router"), got, eager, want, strict=False):
            problems.append(check(f"{way} grad of {label}", ours, own, right))
    del want, eager, got, exact, x64
    samples = device_us({way: (lambda call=call: step(call)) for way, call in ways.items()}, rounds=10)
    for way in ways:
        row[way] = median(samples[way])
    row["ratio (95 %)"] = str(timing.ratio(samples["moepdl"], samples["Inductor"]))
    for way, call in ways.items():
        step(call)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = sum(t.numel() * t.element_size() for t in [*tensors, *(t.grad for t in tensors), grad])
        step(call)
        row[f"{way} GiB"] = (torch.cuda.max_memory_allocated() - resident) / 2**30
    row["check"] = "; ".join(filter(None, problems)) or "ok"
    return row


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    p.add_argument("--train-tokens", type=int, default=8192, help="0: no forward + backward")
    p.add_argument("--backend", default="moepdl")
    p.add_argument("--out", type=Path, default=RESULTS)
    arguments = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("block_h200: needs a CUDA device; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    notes = [
        f"Qwen3MoeSparseMoeBlock: E={EXPERTS} k={TOP_K} H={HIDDEN} I={INTERMEDIATE}, bf16, with router; medians in us.",
        "graph: 8 inputs (2 from T=2048 on) in one CUDA graph; nograph: one call on an idle device, with host time.",
        "Inductor: the better of grouped_mm and batched_mm. moepdl: grouped_mm. Ratios with a 95 % bootstrap interval.",
        f"floor: distinct experts hit / {BANDWIDTH / 1e12} TB/s or FLOP / {FLOPS / 1e12:.0f} TFLOP/s, the larger.",
        "GiB: peak above inputs, parameters and gradients.",
    ]
    ignore_known_warnings()
    begin = time.monotonic()
    module, config = build()
    module.eval()
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        rows.append(forward(module, config, tokens, arguments.backend))
        print(f"[{time.monotonic() - begin:.0f}s] T={tokens}: {rows[-1]}", flush=True)
        write(arguments.out, "h200", "Qwen3 MoE block, forward", rows, device=DEVICE, notes=notes)
    steps = []
    if arguments.train_tokens:
        steps.append(training(module.train(), arguments.train_tokens, arguments.backend))
        write(arguments.out, "h200_train", "Qwen3 MoE block, forward + backward", steps, device=DEVICE, notes=notes)
    print(table([{k: v for k, v in row.items() if "spelling" not in k} for row in rows]))
    print(table(steps))
    return 0 if all(row["check"] == "ok" for row in rows + steps) else 1


if __name__ == "__main__":
    sys.exit(main())
