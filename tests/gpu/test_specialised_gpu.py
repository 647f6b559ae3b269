"""The kernel with specialised warps computes what the plain one does, to the bit, however the rows are shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compiler.runtime_kernels.order.reference import order
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import TABLES, Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

NAN = float("nan")


def specialised(name: str) -> Tile:
    _, tile = TABLES[name].hopper[-1]
    assert tile.instead is not None
    return tile


def chosen(routing: str, tokens: int, k: int, experts: int) -> Tensor:
    """ids [tokens, k] on the GPU."""
    scores = torch.rand(tokens, experts, device="cuda")
    if routing == "same":
        return torch.arange(k, device="cuda").expand(tokens, k).contiguous()
    if routing == "skewed":
        scores /= torch.arange(1, experts + 1, device="cuda")
    if routing == "empty":
        scores[:, ::3] = -1
    ids = scores.topk(k).indices
    if routing == "outside":
        ids = torch.where(torch.rand(tokens, k, device="cuda") < 0.3, experts + 1, ids)
    return ids


def launched(
    name: str, like: dict[str, Tensor], ins: dict[str, Any], attrs: dict[str, Any], **how: Any
) -> dict[str, Tensor]:
    outs = {key: torch.full_like(value, NAN) for key, value in like.items()}
    kernel(name).launch(outs, ins, attrs, **how)
    return outs


def check(name: str, like: dict[str, Tensor], ins: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Tensor]:
    tile = specialised(name)
    assert tile.instead is not None
    right = launched(name, like, ins, attrs, pdl=False, tile=tile.instead)
    for pdl in (False, True):
        got = launched(name, like, ins, attrs, pdl=pdl, tile=tile)
        for key, value in right.items():
            assert torch.equal(got[key], value), f"{name}.{key}, pdl={pdl}"
    return right


SIZES = [
    (1, 8, 128, 256, 192),
    (127, 8, 16, 320, 128),
    (129, 4, 32, 2880, 64),
    (1000, 8, 128, 256, 192),
    (4097, 6, 60, 512, 704),
    (700, 2, 8, 192, 1856),
    (16, 2, 255, 128, 128),
    (300, 8, 511, 128, 64),
]


@pytest.mark.parametrize("routing", ["uniform", "same", "skewed", "empty", "outside"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_same_bits_as_the_plain_kernels(sizes, routing):
    tokens, k, experts, hidden, inner = sizes
    torch.manual_seed(tokens)
    dtype = torch.float16 if tokens % 2 else torch.bfloat16

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype) / shape[-1] ** 0.5

    both, down = made(experts, 2 * inner, hidden), made(experts, hidden, inner)
    perm, starts = order(chosen(routing, tokens, k, experts), experts)
    rows = {"perm": perm, "starts": starts}
    pairs = tokens * k
    act, pre, out = made(pairs, inner), made(pairs, 2 * inner), made(pairs, hidden)
    layouts = {
        "packed": ([both], [], [down]),
        "separate": ([both[:, :inner].contiguous()], [both[:, inner:].contiguous()], [down.mT.contiguous().mT]),
    }
    for number, (gate, up, projection) in enumerate(layouts.values()):
        second = {**rows, "down": projection, "down_bias": [made(experts, hidden)] if number else []}
        check("down", {"pairs": out}, {"act": act, **second}, {})
        check("grad_pairs", {"pairs": out}, {"grad_preact": pre, **rows, "gate": gate, "up": up}, {"gated": True})


def test_a_thousand_runs_give_the_same_bits():
    torch.manual_seed(0)
    tokens, k, experts, hidden, inner = 4096, 8, 64, 512, 256
    perm, starts = order(chosen("skewed", tokens, k, experts), experts)
    down = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    act = torch.randn(tokens * k, inner, device="cuda", dtype=torch.bfloat16)
    like = {"pairs": act.new_empty(tokens * k, hidden)}
    ins = {"act": act, "perm": perm, "starts": starts, "down": [down], "down_bias": []}
    first = launched("down", like, ins, {}, pdl=True, tile=specialised("down"))["pairs"]
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differ += (launched("down", like, ins, {}, pdl=True, tile=specialised("down"))["pairs"] != first).sum()
    assert int(differ) == 0


@pytest.mark.parametrize("tokens", [1, 4, 5, 64, 65, 1500, 5000])
@pytest.mark.parametrize(("experts", "hidden"), [(128, 2048), (60, 704), (7, 90)])
def test_router_logits(tokens, experts, hidden):
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden + 8, device="cuda", dtype=torch.bfloat16)[:, :hidden]
    router = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    for right, bias in ((router.t(), None), (router.t().contiguous(), torch.randn(experts).to(router))):
        want = x.double() @ right.double() + (0 if bias is None else bias.double())
        like = {"logits": x.new_empty(tokens, experts)}
        ins = {"x": x, "router": right, "router_bias": bias}
        got = [launched("router_logits", like, ins, {}, pdl=pdl)["logits"] for pdl in (False, True)]
        assert torch.equal(*got)
        assert (got[0].double() - want).norm() <= 3e-3 * want.norm()
