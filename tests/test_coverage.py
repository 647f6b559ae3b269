"""docs/coverage.md: it is what its numbers say, the classes are found, and a cell says what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")

from benchmarks.coverage import cells
from benchmarks.coverage.classes import Experts, build, expert_modules, find_experts
from benchmarks.coverage.numbers import Choices, Double, exactly, judge
from benchmarks.coverage.page import render, totals

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def classes() -> dict[str, Experts]:
    return {experts.name: experts for experts in find_experts()}


def test_the_page_is_what_its_numbers_say():
    data = json.loads((DOCS / "coverage.json").read_text())
    assert (DOCS / "coverage.md").read_text() == render(data)
    cells_of = [cell for row in data["rows"] for cell in row.get("cells", {}).values()]
    assert not [cell["text"] for cell in cells_of if cell["status"] == "wrong"]


def test_packed_experts_lists_and_look_alikes_are_found(classes):
    packed = [name for name, experts in classes.items() if experts.packed]
    assert len(packed) >= 60 and {"MixtralExperts", "GptOssExperts", "Qwen3OmniMoeTalkerTextExperts"} <= set(packed)
    others = {"Llama4TextExperts", "SwitchTransformersExperts", "LongcatFlashExperts", "DogeCDMoE"}
    assert others <= set(classes) - set(packed)


def test_a_small_model_holds_the_experts_that_it_was_built_for(classes):
    built = build(classes["DeepseekV3Experts"])
    # One dense layer, then two with experts.
    assert expert_modules(built.model, classes["DeepseekV3Experts"]) == [
        "model.layers.1.mlp.experts",
        "model.layers.2.mlp.experts",
    ]
    bias = built.model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.std() > 0, "groups and biases choose alike when all biases are zero"


def test_a_class_that_is_rewritten_says_so(classes, monkeypatch):
    monkeypatch.setattr(cells, "COLUMNS", ("as loaded", "batched_mm"))
    row = cells.measure(classes["MixtralExperts"])
    texts = {column: cell["text"] for column, cell in row["cells"].items()}
    assert texts == {"as loaded": "matched 3/3", "batched_mm": "matched 3/3"}
    assert row["loaded as"] == "grouped_mm" and 0 < row["cells"]["batched_mm"]["own"] < 1e-5


@pytest.mark.slow
def test_a_loop_that_no_graph_holds_is_a_fragment_with_a_remedy(classes, monkeypatch):
    monkeypatch.setattr(cells, "COLUMNS", ("as loaded",))
    row = cells.measure(classes["DbrxExpertGLU"])
    cell = row["cells"]["as loaded"]
    assert cell["status"] == "fragment" and cell["text"].startswith("fragment: none known")
    assert "modeling_dbrx.py" in cell["broken"]


def test_an_error_of_ours_is_no_graph_break():
    from torch._dynamo.exc import BackendCompilerFailed, Unsupported

    assert cells._is_break(Unsupported("a loop over nonzero"))
    assert not cells._is_break(BackendCompilerFailed(lambda: None, ValueError("ours"), None))
    assert not cells._is_break(ValueError("the model's"))


def test_remedies_are_those_that_were_seen_to_work():
    broken = {"status": "fragment", "broken": "why", "matched": 0}
    left = {"status": "left", "text": "left alone"}
    matched, none = {"status": "matched", "text": "matched 2/2"}, {"status": "none", "text": "-"}
    for others, remedy in (
        ((matched, left, left), 'model.set_experts_implementation("grouped_mm")'),
        ((left, matched, matched), 'model.set_experts_implementation("batched_mm")'),
        ((left, left, matched), "moe_compiler.prepare(model)"),
        ((left, left, left), 'model.set_experts_implementation("grouped_mm") makes it one graph; see there'),
        ((none, none, left), "none known; why"),
    ):
        row = {"layers": 2, "cells": dict(zip(cells.COLUMNS, (dict(broken), *others), strict=True))}
        cells._name_remedies(row)
        assert row["cells"]["as loaded"]["text"] == f"fragment: {remedy}"


def test_a_class_that_cannot_be_built_says_why():
    assert "MixtralNoExperts" in cells.measure(Experts("mixtral", "MixtralNoExperts", packed=True))["not built"]
    row = cells.measure(Experts("mixtral", "MoeCausalLMOutputWithPast", packed=False))
    assert not row["cells"] and row["not built"].startswith("LookupError: no model of transformers.models.mixtral")


def test_a_difference_beyond_rounding_is_wrong():
    exact = torch.randn(50, dtype=torch.float64)
    eager = exact.float()
    assert not judge([eager], [eager], [exact]).bad
    assert "error" in judge([eager * (1 + 1e-5)], [eager], [exact]).bad
    assert "error" in judge([eager * float("nan")], [eager], [exact]).bad
    assert "outputs" in judge([], [eager], [exact]).bad
    assert "torch.float64" in judge([eager.double()], [eager], [exact]).bad


def test_the_float64_run_keeps_the_choice_and_drops_the_narrow_casts():
    scores = torch.randn(5, 8)
    with Choices() as choices:
        ids = torch.topk(scores.softmax(-1, dtype=torch.float32), 2, dim=-1).indices

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(-scores.double().float().softmax(-1, dtype=torch.float32), 2, dim=-1)
        return weights, chosen

    weights, chosen = exactly(run, choices.ids)
    assert torch.equal(chosen, ids) and weights.dtype == torch.float64
    assert torch.equal(weights, -scores.double().softmax(-1).gather(-1, ids))
    with Double([]):
        assert torch.arange(3).float().dtype == torch.float64


def test_totals_count_classes_by_what_became_of_them():
    def row(name: str, *statuses: str) -> dict:
        return {
            "name": name, "folder": "f", "packed": True, "model": "M", "commit": "c", "layers": 1,
            "cells": {c: {"status": s, "text": s} for c, s in zip(cells.COLUMNS, statuses, strict=True)},
        }  # fmt: skip

    data = {"environment": {}, "columns": list(cells.COLUMNS), "rows": [
        row("A", "matched", "matched", "left", "none"),
        row("B", "fragment", "matched", "part", "none"),
    ]}  # fmt: skip
    assert totals(data)[:3] == [
        "packed experts, as loaded: 1 matched in every layer, 1 fragments (of 2)",
        "packed experts, grouped_mm: 2 matched in every layer (of 2)",
        "packed experts, batched_mm: 1 in part, 1 left alone (of 2)",
    ]
