"""Small MoE modules for the compiler's tests, and the accuracy rule that every numeric test uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

TOKENS = (0, 1, 2, 37, 512)


def qwen3_block(
    dtype: torch.dtype = torch.float32, implementation: str = "grouped_mm", seed: int = 0
) -> torch.nn.Module:
    """transformers' own Qwen3-MoE block, small: E=8, k=2, H=32, I=16."""
    pytest.importorskip("transformers", reason="this test compiles transformers' own block")
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = implementation
    torch.manual_seed(seed)
    block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block


def qwen3_decoder(layers: int = 2, dtype: torch.dtype = torch.float32, **config: Any) -> torch.nn.Module:
    """transformers' own Qwen3-MoE language model, small."""
    pytest.importorskip("transformers", reason="this test compiles transformers' own model")
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    } | config
    torch.manual_seed(0)
    made = Qwen3MoeConfig(**settings)
    made._experts_implementation = "grouped_mm"
    return Qwen3MoeForCausalLM(made).to(dtype)


def float64_block(block: torch.nn.Module, x: Tensor) -> Tensor:
    """The Qwen3 block of `x` [1, T, H] in float64, with the expert ids that the block itself chooses in its dtype."""
    flat = x.reshape(-1, x.shape[-1])
    logits = torch.nn.functional.linear(flat, block.gate.weight)
    ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), block.gate.top_k, dim=-1).indices
    wide = flat.double()
    scores = torch.softmax(torch.nn.functional.linear(wide, block.gate.weight.double()), -1)
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for j in range(ids.shape[1]):
        gate_up = block.experts.gate_up_proj.double()[ids[:, j]]
        gate, up = torch.einsum("th,tnh->tn", wide, gate_up).chunk(2, -1)
        down = block.experts.down_proj.double()[ids[:, j]]
        rows.append(torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, down) * weights[:, j : j + 1])
    return torch.stack(rows).sum(0).reshape(x.shape)


def gpt_oss_block(dtype: torch.dtype, implementation: str) -> torch.nn.Module:
    """The experts and router of transformers' gpt-oss, small: E=8, k=2, H=32, I=48; it returns the output alone."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(
        num_local_experts=8, num_experts_per_tok=2, hidden_size=32, intermediate_size=48, num_hidden_layers=1
    )
    config._experts_implementation = implementation

    class Block(modeling.GptOssMLP):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    torch.manual_seed(0)
    block = Block(config).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block


def float64_gpt_oss(block: torch.nn.Module, x: Tensor) -> Tensor:
    """The gpt-oss block of `x` [1, T, H] in float64, with the expert ids that the block itself chooses in its dtype."""
    flat, router, experts = x.reshape(-1, x.shape[-1]), block.router, block.experts
    ids = torch.topk(torch.nn.functional.linear(flat, router.weight, router.bias), router.top_k, dim=-1).indices
    wide = flat.double()
    logits = torch.nn.functional.linear(wide, router.weight.double(), router.bias.double())
    weights = torch.softmax(logits.gather(1, ids), -1)
    rows = []
    for j in range(ids.shape[1]):
        chosen = ids[:, j]
        both = torch.einsum("th,thn->tn", wide, experts.gate_up_proj.double()[chosen])
        both = both + experts.gate_up_proj_bias.double()[chosen]
        gate, up = both[:, ::2].clamp(max=experts.limit), both[:, 1::2].clamp(-experts.limit, experts.limit)
        act = (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
        row = torch.einsum("ti,tih->th", act, experts.down_proj.double()[chosen])
        rows.append((row + experts.down_proj_bias.double()[chosen]) * weights[:, j : j + 1])
    return torch.stack(rows).sum(0).reshape(x.shape)


def gradients(module: torch.nn.Module, out: Tensor, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of x and of every parameter of the module."""
    return list(torch.autograd.grad(out, [x, *module.parameters()], grad.to(out.dtype)))


def assert_block_is_accurate(
    compiled: Any,
    block: torch.nn.Module,
    tokens: int,
    dtype: torch.dtype,
    device: str,
    float64: Callable[[torch.nn.Module, Tensor], Tensor] = float64_block,
    draws: int = 1,
) -> None:
    """Output and gradients of a compiled block (H=32) for some number of tokens, by the accuracy rule. `float64`: what
    the block computes, in float64. `draws`: how many inputs, at least, are judged together.

    One or two tokens are drawn several times and judged together: the error of a single token's router gradient is the
    luck of one cancellation.
    """
    draws = max(16 // tokens, draws) if tokens else 1
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = []
    for _ in range(draws):
        x = torch.randn(1, tokens, 32, device=device).to(dtype).requires_grad_()
        out, eager, exact = compiled(x), block(x), float64(block, x)
        grad = torch.randn(exact.shape, dtype=torch.float64, device=device)
        triples = zip(*(gradients(block, y, x, grad) for y in (out, eager, exact)), strict=True)
        found.append([(out, eager, exact), *triples])
        with torch.no_grad():
            assert_accurate(compiled(x), block(x), exact)
    for drawn in zip(*found, strict=True):
        assert_accurate(*(torch.cat([item.flatten() for item in parts]) for parts in zip(*drawn, strict=True)))


def assert_accurate(ours: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Our error against float64 is at most 1.5 times eager's own, plus 1e-6 (fp32) or 1e-3 (bf16, fp16) of the norm."""
    assert ours.shape == eager.shape and ours.dtype == eager.dtype
    if not exact.numel():
        return
    assert torch.isfinite(ours).all()
    norm = exact.double().norm()
    slack = 1e-6 if ours.dtype in (torch.float32, torch.float64) else 1e-3
    own = (ours.double() - exact.double()).norm()
    theirs = (eager.double() - exact.double()).norm()
    assert own <= 1.5 * theirs + slack * norm, f"error {own / norm:.2e}, eager {theirs / norm:.2e} of the norm"
