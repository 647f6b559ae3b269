"""What the launches decide on the host, without a GPU: tiles that suffice, descriptors, data types, recording."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="launches import triton")

from moe_compiler.runtime_kernels.launching import (
    UnsupportedDtypeError,
    box,
    check_dtype,
    matrix,
    power_of_two,
    precision,
    recording,
    slots,
)
from moe_compiler.runtime_kernels.registry import kernel


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
        assert box([weights], matrix([weights], "gate"), 64, False, (32, 64)) is not None
        gaps = torch.zeros(4, 80, 128, dtype=torch.bfloat16)[:, :64]
        assert box([gaps], matrix([gaps], "gate"), 64, False, (32, 64)) is None
        wide = weights.float()
        assert box([wide], matrix([wide], "gate"), 64, False, (32, 64)) is None
        turned = weights.transpose(1, 2)
        assert box([turned], matrix([turned], "gate"), 64, True, (32, 64)) is not None
        listed = list(weights.unbind())
        assert box(listed, matrix(listed, "gate"), 64, False, (32, 64)) is None


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
