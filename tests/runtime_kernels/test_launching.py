"""What the launches decide on the host, without a GPU: tiles that suffice, descriptors, data types, recording."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="launches import triton")

from moe_compiler.runtime_kernels import audit, launching
from moe_compiler.runtime_kernels.audit import AuditResult
from moe_compiler.runtime_kernels.launching import (
    UnsupportedDtypeError,
    box,
    check_dtype,
    matrix,
    power_of_two,
    precision,
    recording,
)
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import slots


@given(st.lists(st.integers(0, 300), min_size=2, max_size=40), st.sampled_from([16, 64, 128]))
def test_slots_suffice_for_any_distribution(rows: list[int], height: int) -> None:
    """The last group holds the pairs of no expert."""
    needed = sum(-(-n // height) for n in rows)
    assert needed <= slots(sum(rows), len(rows) - 1, height)


def test_slots_of_few_pairs_are_no_more_than_the_pairs() -> None:
    assert slots(8, 128, 16) == 8
    assert slots(0, 128, 16) == 0


def test_power_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    assert power_of_two(3, 16) == 16


def test_precision_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert precision(torch.float32) == "tf32"
        torch.set_float32_matmul_precision("highest")
        assert precision(torch.float32) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    assert precision(torch.bfloat16) == "ieee"


def test_float64_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedDtypeError, match="float64"):
        check_dtype(torch.float64, "x")


def test_a_descriptor_needs_stored_rows_without_gaps() -> None:
    weights = torch.zeros(4, 64, 128, dtype=torch.bfloat16)
    with recording():
        assert box(matrix([weights], "gate"), 64, False, (32, 64)) is not None
        gaps = torch.zeros(4, 80, 128, dtype=torch.bfloat16)[:, :64]
        assert box(matrix([gaps], "gate"), 64, False, (32, 64)) is None
        wide = weights.float()
        assert box(matrix([wide], "gate"), 64, False, (32, 64)) is None
        turned = weights.transpose(1, 2)
        assert box(matrix([turned], "gate"), 64, True, (32, 64)) is not None
        listed = list(weights.unbind())
        assert box(matrix(listed, "gate"), 64, False, (32, 64)) is None


def test_more_pairs_than_are_counted_is_an_error() -> None:
    """Nothing is launched with a number that has wrapped around."""
    pairs = 2**31 - 2**20
    for count, error in ((pairs, None), (pairs + 1, launching.TooManyError)):
        with torch.device("meta"):
            rows, perm = torch.empty(count, 64, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int32)
            ins = {"act": rows, "perm": perm, "starts": torch.empty(5, dtype=torch.int32), "down_bias": None}
            ins["down"] = [torch.empty(4, 64, 64, dtype=torch.bfloat16)]
        with recording() as starts:
            if error is None:
                kernel("down").launch({"pairs": rows}, ins, {}, pdl=False)
                assert len(starts) == 1
            else:
                with pytest.raises(
                    error, match=r"the kernels count tokens, .* up to 2146435072\. Give the model fewer"
                ):
                    kernel("down").launch({"pairs": rows}, ins, {}, pdl=False)


def test_recording_launches_nothing_and_ends() -> None:
    pairs = torch.zeros(6, 32, dtype=torch.bfloat16)
    outs, ins = {"y": torch.ones(3, 32)}, {"pairs": pairs, "weights": None}
    with recording() as starts:
        kernel("combine").launch(outs, ins, {"k": 2, "dtype": torch.float32}, pdl=True)
    assert [(s.kernel.__name__, s.pdl) for s in starts] == [("combine_kernel", True)]
    assert outs["y"].eq(1).all()
    with recording() as again:
        pass
    assert again == []


def test_code_that_breaks_the_rules_is_launched_without_pdl(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[bool] = []

    class Handle:
        def __init__(self, pdl: bool) -> None:
            self.pdl = pdl

        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments: launched.append(arguments[-1])

    compiled: list[bool] = []

    def compile(kernel: Any, operands: Any, numbers: Any, constants: Any, pdl: bool, *rest: Any) -> Handle:
        compiled.append(pdl)
        return Handle(pdl)

    monkeypatch.setattr(launching, "_compile", compile)
    monkeypatch.setattr(launching, "_handles", {})
    monkeypatch.setattr(launching, "_refused", set())
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    found = AuditResult("broken_kernel", True, 0, 0, (), ("launched with the PDL attribute but never waits",))
    monkeypatch.setattr(audit, "audited", lambda handle: found)
    with pytest.warns(UserWarning, match="broken_kernel is launched without PDL: .* never waits"):
        launching.start("broken", 3, (), (), {}, pdl=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launching.start("broken", 3, (), (), {}, pdl=True)
    assert launched == [False, False]
    assert compiled == [True, False]
