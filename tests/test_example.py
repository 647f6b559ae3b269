"""The training example: its text, its model, and what its verdict accepts. The whole of it is `slow`."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "examples" / "train_char_moe.py"
    spec = importlib.util.spec_from_file_location("train_char_moe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def same_threads():
    """The example sets the number of threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_text_is_python_source_and_the_same_each_time(example: ModuleType):
    text = example.read_text(50_000)
    assert torch.equal(text, example.read_text(50_000))
    assert b"import" in bytes(text.tolist())


def test_the_loss_starts_at_chance_and_falls(example: ModuleType):
    run = example.train(example.read_text(50_000), 12, None, 1, "eager")
    losses = run.losses
    assert len(run.seconds) == 12 and min(run.seconds) * 1e3 <= run.step_ms
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("shift_early", "shift_late", "good"), [(0.0, 0.0, True), (2e-3, 0.0, False), (0.0, 5e-4, True), (0.0, 5e-3, False)]
)
def test_the_verdict_without_spread_of_eager(example: ModuleType, shift_early: float, shift_late: float, good: bool):
    eager = [5.0 - 0.01 * i for i in range(200)]
    ours = [v + (shift_early if i < 20 else shift_late) for i, v in enumerate(eager)]
    assert example.verdict(eager, eager, ours)[0] is good


def test_the_verdict_allows_what_eager_itself_shows(example: ModuleType):
    one = [5.0 - 0.01 * i for i in range(200)]
    two = [v + (0.02 if i > 100 else 0.0) for i, v in enumerate(one)]
    assert example.verdict(one, two, [v + (0.03 if i > 100 else 0.0) for i, v in enumerate(one)])[0]
    assert not example.verdict(one, two, [v + (0.05 if i > 100 else 0.0) for i, v in enumerate(one)])[0]


def test_a_nan_does_not_agree(example: ModuleType):
    eager = [5.0] * 100
    assert example.verdict(eager, eager, [*eager[:90], *[math.nan] * 10]) == (
        False,
        ["step 91: the loss is not finite"],
    )


def test_the_curves_are_drawn(example: ModuleType):
    curves = {"eager, 1 thread": [5.0, 4.0, 3.0], "moepdl": [5.0, 4.1, 3.1]}
    picture = example.draw_svg(curves, "loss")
    assert picture.count('<path d="M60.0') == 2 and "moepdl" in picture
    assert example.sparkline([5.0, 4.0, 3.0], 3.0, 5.0) == "█▄▁"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_agrees_with_eager(example: ModuleType, tmp_path: Path):
    assert example.main(["--steps", "60", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "losses.svg").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_that_share_the_experts_have_the_loss_of_one():
    """A few steps: they start at chance, agree with eager on one process, and the exchange is told."""
    path = Path(__file__).resolve().parent.parent / "examples" / "train_ep.py"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), "--steps", "6"], capture_output=True, text=True, timeout=550
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "expert parallelism agrees with eager on one process" in ran.stdout
    assert "exchange x3: 2 ranks over torch.distributed (gloo), E=8 contiguous" in ran.stdout
