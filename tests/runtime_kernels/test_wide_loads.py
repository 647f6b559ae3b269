"""How many bytes an instruction loads of the weights, read from machine code for sm_90; no GPU is needed.

gpt-oss keeps its weights transposed, with gate and up in turns: what is contiguous are the columns of both. A kernel
that looked at gate alone would load two bytes at a time.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="device code is compiled by triton")

from moe_compiler.runtime_kernels.accesses import _Analysis, addresses  # noqa: E402
from moe_compiler.runtime_kernels.audit import compile_offline  # noqa: E402
from moe_compiler.runtime_kernels.launching import Start, recording  # noqa: E402
from moe_compiler.runtime_kernels.registry import kernel  # noqa: E402
from moe_compiler.runtime_kernels.sass import disassemble  # noqa: E402
from moe_compiler.runtime_kernels.weights import in_turns  # noqa: E402

# gpt-oss-20b
EXPERTS, K, HIDDEN, INNER = 32, 4, 2880, 2880
BF16 = torch.bfloat16


def gpt_oss(tokens: int, *, transposed: bool, apart: bool = False) -> dict[str, Any]:
    """Operands without memory."""
    pairs = tokens * K
    with torch.device("meta"):

        def weights(out: int, in_: int) -> torch.Tensor:
            turned = torch.empty(EXPERTS, in_, out, dtype=BF16).mT
            return turned if transposed else torch.empty(EXPERTS, out, in_, dtype=BF16)

        both, down = weights(2 * INNER, HIDDEN), weights(HIDDEN, INNER)
        return {
            "x": torch.empty(tokens, HIDDEN, dtype=BF16),
            "grad_y": torch.empty(tokens, HIDDEN, dtype=BF16),
            "y": torch.empty(tokens, HIDDEN, dtype=BF16),
            "weights": None,
            "ids": torch.empty(tokens, K, dtype=torch.int64),
            "perm": torch.empty(pairs, dtype=torch.int32),
            "starts": torch.empty(EXPERTS + 1, dtype=torch.int32),
            "act": torch.empty(pairs, INNER, dtype=BF16),
            "pairs": torch.empty(pairs, HIDDEN, dtype=BF16),
            "grad_preact": torch.empty(pairs, 2 * INNER, dtype=BF16),
            "gate": [both[:, ::2] if apart else in_turns(both, 1)],
            "up": [both[:, 1::2]] if apart else [],
            "down": [down],
            "grad_gate": [torch.empty_like(in_turns(both, 1))],
            "grad_up": [],
        }


def started(name: str, tensors: dict[str, Any]) -> Start:
    traits = kernel(name).traits
    attrs = {"activation": "silu(alpha=1.702,limit=7.0,shift=1.0)", "gated": True, "k": K, "save": False}
    with recording() as starts:
        kernel(name).launch(
            {key: tensors[key] for key in traits.writes if key in tensors},
            {key: tensors.get(key) for key in traits.reads},
            attrs | {"dtype": BF16},
            pdl=True,
        )
    (start,) = starts
    return start


def moved(start: Start, kind: str, parameter: str) -> set[int]:
    """Bytes of a thread's accesses to a parameter's memory, by instruction; 0: a tile through a descriptor."""
    compiled = compile_offline(start)
    code = disassemble(compiled.asm["cubin"])
    found = set()
    for place, access, names in _Analysis(code, addresses(compiled.src.signature)).found():
        if kind in access.kinds and names is not None and parameter in names:
            told = re.search(r"\.(128|64|[US]?16|[US]?8)\b", str(code.instructions[place.index]))
            bits = int(told[1].lstrip("US")) if told else 32
            found.add(0 if access.tile else bits // 8)
    return found


def spills(start: Start) -> int:
    """Instructions that keep a register in memory, or take it back."""
    code = disassemble(compile_offline(start).asm["cubin"])
    return sum(instruction.kind in ("STL", "LDL") for instruction in code.instructions)


@pytest.mark.parametrize(("name", "tokens"), [("gate_up", 16), ("gate_up", 512), ("gate_up_few", 1)])
@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gate_and_up_in_turns_are_loaded_together(name, tokens, transposed):
    start = started(name, gpt_oss(tokens, transposed=transposed))
    assert moved(start, "read", "gate") == ({16} if name.endswith("few") else {0})
    assert spills(start) == 0


@pytest.mark.parametrize(("name", "tokens"), [pytest.param("gate_up", 512, marks=pytest.mark.slow), ("gate_up_few", 1)])
def test_of_two_views_every_other_column_is_loaded_by_itself(name, tokens):
    """What the layout is for, and that the check above sees it."""
    assert 2 in moved(started(name, gpt_oss(tokens, transposed=True, apart=True)), "read", "gate")


@pytest.mark.parametrize(
    ("name", "tokens"), [pytest.param("down", 512, marks=pytest.mark.slow), ("down_few", 1), ("down_few", 2)]
)
def test_transposed_weights_of_the_second_projection(name, tokens):
    start = started(name, gpt_oss(tokens, transposed=True))
    parameter = "down" if name.endswith("few") else "first_part"
    assert moved(start, "read", parameter) == ({16} if name.endswith("few") else {0})


@pytest.mark.parametrize("tokens", [pytest.param(16, marks=pytest.mark.slow), 4096])
def test_the_gradient_of_x_reads_both_together(tokens):
    start = started("grad_pairs", gpt_oss(tokens, transposed=True))
    assert moved(start, "read", "first_part") == {0}


@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_gradients_of_both_are_stored_together(transposed):
    start = started("grad_gate_up", gpt_oss(4096, transposed=transposed))
    assert moved(start, "write", "first_part") == {16}
