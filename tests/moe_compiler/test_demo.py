"""The demo's judgement: a true float64 run with eager's experts, and what counts as right. The whole demo is `slow`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from moe_compiler import demo, progress

pytest.importorskip("transformers", minversion="5.0")

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def model() -> torch.nn.Module:
    return demo.build_model(TINY, 2, "grouped_mm", "cpu", torch.float32)


def workload(train: bool) -> demo.Workload:
    return demo.Workload("small", torch.arange(24).reshape(2, 12), train)


@pytest.mark.parametrize("train", [False, True])
def test_eager_is_close_to_the_float64_twin(model: torch.nn.Module, train: bool):
    job, exact = workload(train), demo.Exact(model)
    result = demo.Result(job)
    ids = demo.chosen_ids(model, lambda: demo._run(model, job))
    want = exact.outputs(job, ids, result)
    assert all(output.dtype == torch.float64 for output in want)
    error = demo.relative_error(demo._outputs(model, model, job), want)
    assert 1e-9 < error < 2e-6  # above 1e-9: the twin is no fp32 run in disguise
    assert result.choices == 2 * 24 and result.near_ties == 0


def test_the_twin_does_not_round_to_float32_on_the_way(model: torch.nn.Module):
    """Norms, softmax and rotary angles ask for float32 by name; in float64 their results must not be of float32."""
    twin = demo.Exact(model).model
    with torch.no_grad(), demo.float64_mode():
        normed = twin.model.norm(torch.randn(3, TINY["hidden_size"], dtype=torch.float64))
    assert normed.dtype == torch.float64
    assert not torch.equal(normed, normed.float().double())


def test_forced_ids_are_used_and_differences_counted(model: torch.nn.Module):
    job = workload(False)
    own = demo.chosen_ids(model, lambda: demo._run(model, job))
    other = [ids.flip(0) for ids in own]
    plain = demo._run(model, job)
    with demo.forced_ids(model, own) as ties:
        torch.testing.assert_close(demo._run(model, job), plain)
    assert ties == [0, 0]
    with demo.forced_ids(model, other) as ties:
        assert not torch.allclose(demo._run(model, job), plain)
    assert sum(ties) > 0


def test_a_wrong_loss_is_seen_beside_a_million_gradients():
    exact = [torch.tensor(2.0, dtype=torch.float64), torch.full((1000,), 10.0, dtype=torch.float64)]
    assert demo.relative_error([torch.tensor(2.2), exact[1]], exact) == pytest.approx(0.1)
    assert demo.relative_error(exact[:1], exact) == float("inf")


@pytest.mark.parametrize(("error", "right"), [(1.5e-3, True), (4.1e-3, False), (float("nan"), False)])
def test_what_passes(error: float, right: bool):
    result = demo.Result(workload(False), errors={"eager": 2e-3, "moepdl": error})
    assert result.passes("moepdl", "bfloat16") is right


def test_without_transformers_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def missing(*arguments: object) -> None:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(demo, "build_model", missing)
    assert demo.main(["--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "No module named 'transformers'" in message
    assert "try: pip install 'transformers" in message


def test_a_long_wait_names_each_phase_as_it_begins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "QUIET_S", 0.02)
    stream = io.StringIO()
    with progress.Progress("demo", stream) as line:
        line.step("compiling")
        line._done.wait(0.3)
        line.step("timing")
        line.step("timing")
    assert [text.split(": ")[1] for text in stream.getvalue().splitlines()] == ["compiling", "timing"]


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_the_whole_demo(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "SMALL", TINY)
    arguments = ["--device", "cpu", "--layers", "1", "--seconds", "0.1", "--experts", experts, "--out", str(tmp_path)]
    assert demo.main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["workloads"]] == ["prefill", "decode", "train"]
    assert all(row["right"] for row in told["workloads"])
    assert all(Path(path).read_text().startswith("<!") for path in told["reports"])
