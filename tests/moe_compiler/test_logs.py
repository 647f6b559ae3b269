"""Logs: the entry point is light and never raises, TORCH_LOGS knows our names, and emit is silent when all is quiet."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys

import pytest

from moe_compiler import _logs

PROGRAM = """
import torch, logging, sys
heavy = [name for name in sys.modules if name.startswith("moe_compiler.")]
from moe_compiler import _logs
from moe_compiler.report import MatchRecord, Report
print("HEAVY", heavy)
_logs.emit(Report("0/0", "rewritten", matches=[MatchRecord("layers.0.mlp", "grouped_mm", "R1", where="m.py:1: f(x)")]))
_logs.emit(Report("1/0", "unchanged"))
"""


@functools.cache
def run(**environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_LOGS")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environ, capture_output=True, text=True, check=True
    )


def test_the_entry_point_imports_nothing_else_of_ours():
    assert run().stdout.splitlines()[0] == "HEAVY ['moe_compiler._logs']"


def test_nothing_is_said_without_torch_logs():
    assert "moepdl" not in run().stderr


def test_torch_logs_moepdl_prints_the_report_and_stays_silent_where_nothing_was_found():
    text = run(TORCH_LOGS="moepdl").stderr
    assert "moepdl 0/0: rewritten, 1 block matched" in text
    assert "moepdl 1/0" not in text
    assert "block layers.0.mlp" not in text


def test_torch_logs_moepdl_match_prints_the_details():
    text = run(TORCH_LOGS="moepdl_match").stderr
    assert "matched grouped_mm, router R1, at m.py:1  f(x)" in text
    assert "block layers.0.mlp" in text
    assert "moepdl 0/0: rewritten" not in text


def test_torch_logs_plus_moepdl_also_tells_of_quiet_graphs():
    assert "moepdl 1/0: unchanged" in run(TORCH_LOGS="+moepdl").stderr


def test_autoload_registers_once_and_again():
    from torch._logging._internal import log_registry

    _logs.autoload()
    _logs.autoload()
    assert log_registry.log_alias_to_log_qnames["moepdl"] == ["moe_compiler"]
    assert set(_logs.ARTIFACTS) <= log_registry.artifact_names
    assert "moepdl_match" in log_registry.visible_artifacts
    assert {"moepdl_graph", "moepdl_schedule"}.isdisjoint(log_registry.visible_artifacts)
    assert {"moepdl_graph", "moepdl_schedule"} <= log_registry.off_by_default_artifact_names
    assert all(len(name) <= 30 for name in _logs.ARTIFACTS)


def test_autoload_never_raises(monkeypatch):
    def fails() -> None:
        raise RuntimeError("torch has moved")

    monkeypatch.setattr(_logs, "_register", fails)
    _logs.autoload()


def test_artifact_names_are_checked():
    assert isinstance(_logs.artifact("moepdl_graph"), logging.Logger)
    assert _logs.log().name == "moe_compiler"
    with pytest.raises(KeyError):
        _logs.artifact("moepdl_unknown")


def test_emit_never_fails_a_compilation(monkeypatch, samples, caplog):
    monkeypatch.setattr("moe_compiler.report.Report.__str__", lambda self: 1 / 0)
    with caplog.at_level(logging.DEBUG, logger="moe_compiler"):
        _logs.emit(samples.sample())


def test_artifacts_are_logged_when_they_are_on(samples):
    records: dict[str, list[str]] = {}
    handlers = []
    for name in _logs.ARTIFACTS:
        logger = _logs.artifact(name)
        texts = records.setdefault(name, [])
        handler = logging.Handler()
        handler.emit = lambda record, texts=texts: texts.append(record.getMessage())  # type: ignore[method-assign]
        handlers.append((logger, handler, logger.level))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        _logs.emit(samples.sample())
    finally:
        for logger, handler, level in handlers:
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert len(records["moepdl_match"]) == 2
    assert records["moepdl_match"][0].startswith("matched hf_grouped_mm x32")
    assert records["moepdl_match"][1].startswith("candidate topk at proto.py:47")
    assert len(records["moepdl_graph"]) == 4
    assert records["moepdl_graph"][1].startswith("capture after raise_moe\n")
    assert "forward layers.0.mlp x32, few (T <= 4): 8.1 us predicted" in records["moepdl_schedule"][0]


def test_emit_feeds_the_structured_trace(monkeypatch, samples):
    seen = {}
    monkeypatch.setattr(
        "moe_compiler.torch_private.trace_artifact",
        lambda name, encoding, payload: seen.update({name: (encoding, payload())}),
    )
    report = samples.sample()
    _logs.emit(report)
    assert seen == {"moepdl_report": ("json", report.to_json()), "moepdl_report_text": ("string", str(report))}
