"""The blocks that can be measured: sizes and rules of known models, or sizes alone as `E,k,H,I[,shared]`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe_compiler.errors import UsageError, near_name

__all__ = ["NAMED", "Shape", "find_shape"]


@dataclass(frozen=True)
class Shape:
    """One MoE block: `experts` gated experts of width `intermediate`, `k` a token, over tokens of width `hidden`.

    shared        width of the expert that every token has, 0: none; shared_gate: it has a sigmoid gate of its own
    router        its rule, a key of `routers.ROUTERS`
    renormalize   the k weights of a token are divided by their sum
    weights_wide  the routing weights stay in float32 (else they get the dtype of the tokens)
    groups        the choice is limited to the best `kept_groups` of so many groups of experts
    scale         of the routing weights
    biases        on the router and on both projections
    activation    "silu": silu(gate) * up. "clamped": gpt-oss's, gate and up in turns
    transposed    weights are kept as [E, in, out] instead of [E, out, in]
    """

    name: str
    experts: int
    k: int
    hidden: int
    intermediate: int
    shared: int = 0
    shared_gate: bool = False
    router: str = "softmax"
    renormalize: bool = True
    weights_wide: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    biases: bool = False
    activation: str = "silu"
    transposed: bool = False

    @property
    def matmul_size(self) -> int:
        """Elements of the three matrices of one expert."""
        return 3 * self.hidden * self.intermediate

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as results keep them."""
        return asdict(self)


# As the models' published configurations say: Qwen3-30B-A3B, Mixtral-8x7B, DeepSeek-V3, gpt-oss-20b,
# Qwen3-Next-80B-A3B, OLMoE-1B-7B, GLM-4.5-Air, Phi-3.5-MoE.
NAMED: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("qwen3", 128, 8, 2048, 768),
        Shape("mixtral", 8, 2, 4096, 14336, weights_wide=True),
        Shape(
            "deepseek-v3",
            256,
            8,
            7168,
            2048,
            shared=2048,
            router="sigmoid",
            weights_wide=True,
            groups=8,
            kept_groups=4,
            scale=2.5,
        ),
        Shape(
            "gpt-oss-20b",
            32,
            4,
            2880,
            2880,
            router="top_k_first",
            biases=True,
            activation="clamped",
            transposed=True,
        ),
        Shape("qwen3-next", 512, 10, 2048, 512, shared=512, shared_gate=True),
        Shape("olmoe", 64, 8, 2048, 1024, renormalize=False),
        Shape("glm-4.5-air", 128, 8, 4096, 1408, shared=1408, router="sigmoid", weights_wide=True),
        Shape("phi-3.5-moe", 16, 2, 4096, 6400, router="sparsemixer"),
    )
}


def find_shape(text: str) -> Shape:
    """The shape of this name, or of sizes `E,k,H,I` or `E,k,H,I,shared`. Raises UsageError."""
    if text in NAMED:
        return NAMED[text]
    names = ", ".join(NAMED)
    parts = text.split(",")
    if len(parts) == 1:
        raise UsageError(
            f"there is no shape {text!r}",
            why=f"the shapes are {names}, or sizes as E,k,H,I",
            try_=near_name(text, NAMED) or "--shape 128,8,2048,768",
        )
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if len(sizes) not in (4, 5) or 0 in sizes:
        raise UsageError(
            f"{text!r} is no shape",
            why="sizes are four or five whole numbers from 1 on: experts, experts a token, hidden, intermediate and, "
            "if there is one, the width of the shared expert",
            try_="--shape 128,8,2048,768",
        )
    if sizes[1] > sizes[0]:
        raise UsageError(f"{text!r}: {sizes[1]} experts a token of {sizes[0]}", try_="E first, then k")
    experts, k, hidden, intermediate, shared = [*sizes, 0][:5]
    return Shape(text, experts, k, hidden, intermediate, shared)
