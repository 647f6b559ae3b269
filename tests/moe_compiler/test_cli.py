"""The command line: what each command prints, its JSON, its exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from moe_compiler import cli
from moe_compiler.capture import capture
from moe_compiler.dump import load_graph, render_graph, write_dump
from moe_compiler.report import Report

MODELS = """
import torch

def tiny():
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)

def keyword():
    return torch.nn.Linear(4, 4), (), {"input": torch.randn(2, 4)}

def broken():
    raise ZeroDivisionError("the model's own fault")

def wrong():
    return 3

value = 3
"""


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield "cli_models"
    sys.modules.pop("cli_models", None)


@pytest.fixture
def dump(samples, tmp_path):
    write_dump(samples.sample(), tmp_path / "dump")
    return str(tmp_path / "dump")


@pytest.fixture(scope="module")
def captured() -> str:
    """The file of a captured graph with an in-place activation, which canonicalize makes functional."""
    found: list[str] = []

    def backend(module, inputs):
        found.append(render_graph(capture(module, inputs), "captured"))
        return module

    torch.compile(lambda x: (x * 2).relu_(), backend=backend)(torch.randn(3, 4))
    torch._dynamo.reset()
    return found[0]


@pytest.fixture
def graph(captured, tmp_path) -> str:
    path = tmp_path / "00_captured.py"
    path.write_text(captured)
    return str(path)


def test_without_a_command_the_help_is_printed(capsys):
    code, out, _ = run(capsys)
    assert code == cli.MISUSED
    for name in ("demo", "explain", "passes", "opt", "report", "diff", "env"):
        assert name in out


def test_passes_in_order_with_level_numerics_and_text(capsys):
    from moe_compiler.pipeline import PIPELINE

    code, out, _ = run(capsys, "passes", "--json")
    rows = json.loads(out)
    assert code == cli.DONE
    assert [row["name"] for row in rows] == [graph_pass.name for _, graph_pass in PIPELINE]
    assert rows[0] == {
        "order": 0,
        "phase": "before autograd",
        "name": "canonicalize",
        "level": "captured",
        "numerics": "exact",
        "summary": PIPELINE[0][1].summary,
    }
    code, out, _ = run(capsys, "passes")
    lines = out.splitlines()
    assert lines[0] == "before autograd:"
    assert "forward and backward:" in lines
    assert len(lines) == len(PIPELINE) + 2
    assert all(graph_pass.summary in out for _, graph_pass in PIPELINE)


def test_env_tells_versions_and_why_there_is_no_pdl(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MOEPDL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOEPDL_PDL", "off")
    code, out, _ = run(capsys, "env", "--json")
    facts = json.loads(out)
    assert code == cli.DONE
    assert facts["torch"] == torch.__version__
    assert facts["environment"] == {"MOEPDL_PDL": "off"}
    if not torch.cuda.is_available():
        assert facts["pdl"] == "not available: the block runs on cpu"
    assert "torch 2.13 with triton 3.9" in facts["tested"]
    _, out, _ = run(capsys, "env")
    assert "MOEPDL_PDL=off" in out
    assert "no_option" not in out
    monkeypatch.setenv("MOEPDL_PDLL", "off")
    assert "MOEPDL_PDLL sets no option (try MOEPDL_PDL)" in run(capsys, "env")[1]
    assert torch.__version__ in out


def test_report_prints_and_saves(capsys, dump, tmp_path, samples):
    code, out, _ = run(capsys, "report", dump)
    assert code == cli.DONE
    assert out.splitlines()[0] == samples.sample().summary()
    code, out, _ = run(capsys, "report", dump, "-o", str(tmp_path / "r.html"))
    assert out == f"{tmp_path / 'r.html'}\n"
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    code, out, _ = run(capsys, "report", dump, "--json")
    assert len(Report.from_dict(json.loads(out)).matches) == 32


def test_report_of_all_frames_or_of_one(capsys, dump, samples):
    write_dump(samples.nothing(), dump)
    assert run(capsys, "report", dump)[1].startswith("moepdl 0/0 + 1/0: rewritten")
    assert run(capsys, "report", dump, "--frame", "1/0")[1].startswith("moepdl 1/0: unchanged, 0 blocks matched\n")
    code, _, err = run(capsys, "report", dump, "--frame", "7_0")
    assert code == cli.MISUSED
    assert "has no frame '7_0'" in err
    assert "it has 0_0, 1_0" in err


def test_diff_shows_what_passes_changed(capsys, dump):
    code, out, _ = run(capsys, "diff", dump)
    assert code == cli.DONE
    assert "+y = experts(x)" in out
    assert "--- 02_forward_expand_stages.py" in out
    code, out, _ = run(capsys, "diff", dump, "lower", "--json")
    (entry,) = json.loads(out)
    assert (entry["frame"], entry["file"]) == ("rank0/0_0", "03_forward_lower.py")
    code, _, err = run(capsys, "diff", dump, "lowr")
    assert code == cli.FAILED
    assert err.splitlines()[-1] == "  try: lower"


def test_opt_runs_passes_on_a_graph_file(capsys, tmp_path, graph):
    code, out, err = run(capsys, "opt", graph, "--passes", "canonicalize")
    assert code == cli.DONE
    assert "torch.ops.aten.relu.default" in out
    assert "torch.ops.aten.relu_.default" not in out
    assert "canonicalize" in err
    code, printed, _ = run(capsys, "opt", graph, "--passes", "canonicalize", "--out", str(tmp_path / "o" / "after.py"))
    assert (code, printed) == (cli.DONE, "")
    targets = [str(node.target) for node in load_graph(tmp_path / "o" / "after.py").graph.nodes]
    assert "aten.relu.default" in targets
    code, out, _ = run(capsys, "opt", graph, "--passes", "canonicalize", "--json")
    result = json.loads(out)
    assert result["rewrites"] == 1
    assert result["report"]["passes"][0]["name"] == "canonicalize"
    assert "torch.ops.aten.relu.default" in result["graph"]


@pytest.mark.parametrize(
    ("passes", "first", "last"),
    [
        ("canonicalise", "there is no pass 'canonicalise'", "  try: canonicalize"),
        ("canonicalize,lower", "canonicalize, lower do not run on one graph", "  try: one call for each"),
        (",", "--passes is empty", "  try: --passes canonicalize"),
    ],
)
def test_opt_refuses_what_it_cannot_run(capsys, graph, passes, first, last):
    code, _, err = run(capsys, "opt", graph, "--passes", passes)
    assert code == cli.MISUSED
    assert err.splitlines()[0] == f"moepdl: {first}"
    assert err.splitlines()[-1].startswith(last)


def test_opt_names_the_levels_when_nothing_fits(capsys, graph):
    code, out, err = run(capsys, "opt", graph, "--passes", "expand_stages")
    assert code == cli.DONE
    assert (
        "nothing was rewritten: 00_captured.py is at level captured, and expand_stages works on a graph of level moe"
        in err
    )
    assert "nothing was rewritten" not in out
    assert "of level stages" in run(capsys, "opt", graph, "--passes", "lower")[2]
    assert "nothing was rewritten" not in run(capsys, "opt", graph, "--passes", "find_moe")[2]


def test_opt_on_a_missing_file(capsys, tmp_path):
    code, _, err = run(capsys, "opt", str(tmp_path / "none.py"), "--passes", "canonicalize")
    assert code == cli.FAILED
    assert "there is no graph file" in err


def test_explain_a_model_without_blocks(capsys, models, tmp_path):
    code, out, _ = run(capsys, "explain", f"{models}:tiny", "-o", str(tmp_path / "r.json"))
    assert code == cli.DONE
    assert "unchanged, 0 blocks matched" in out
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "unchanged"
    code, out, _ = run(capsys, "explain", f"{models}:keyword", "--json", "--options", '{"pdl": "off"}')
    report = Report.from_dict(json.loads(out))
    assert report.options["pdl"] == "off"
    assert report.options["dryrun"] is True


def test_explain_a_model_that_waits_for_the_data(capsys, tmp_path, monkeypatch):
    (tmp_path / "cli_waits.py").write_text(
        "import torch\n\n\ndef waits(x):\n    for number in x.long().unique().tolist():\n        x = x + number\n"
        "    return x\n\n\ndef made():\n    return waits, (torch.ones(4),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run(capsys, "explain", "cli_waits:made")
    assert code == cli.DONE and "Traceback" not in err
    assert "the model does not make one graph" in out and "cli_waits.py:5" in out and "moe_compiler.prepare" in out


def test_explain_tells_how_each_launch_is_made_and_why(capsys, tmp_path, monkeypatch):
    (tmp_path / "cli_block.py").write_text(
        "from moe_compiler.testing import examples\n\n\n"
        "def block():\n    example = examples()['grouped_mm']()\n    return example.module, example.inputs(5)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(capsys, "explain", "cli_block:block", "--options", '{"remainder": "eager"}')
    assert code == cli.DONE
    table = out.partition("launches by chain: start and duration")[2]
    assert "forward moe_forward" in table and "experts_loop" in table
    assert "plain  the block runs on cpu" in table
    code, out, _ = run(capsys, "explain", "cli_block:block", "--options", '{"remainder": "eager"}', "--measure")
    assert code == cli.DONE
    assert "launches by chain: start and duration, gains not measured: no CUDA device" in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nosuchmodule:f"], cli.MISUSED, "there is no module 'nosuchmodule'"),
        (["cli_models"], cli.MISUSED, "'cli_models' is not MODULE:FACTORY"),
        (["cli_models:tinny"], cli.MISUSED, "has no 'tinny'\n  try: tiny"),
        (["cli_models:value"], cli.MISUSED, "cli_models:value is a int, not a function"),
        (["cli_models:wrong"], cli.MISUSED, "returned int, not (model, args)"),
        (["cli_models:tiny", "--options", "{"], cli.MISUSED, "--options is not JSON"),
        (["cli_models:tiny", "--options", '{"pld": 1}'], cli.MISUSED, "options has no key 'pld'"),
        (
            ["cli_models:tiny", "--measure", "--options", '{"tune": "off"}'],
            cli.MISUSED,
            "--measure means tune=\"full\", and --options says 'off'",
        ),
        (["cli_models:broken"], cli.FAILED, "ZeroDivisionError: the model's own fault"),
    ],
)
def test_explain_called_wrongly(capsys, models, arguments, code, text):
    found, out, err = run(capsys, "explain", *arguments)
    assert found == code
    assert text in err
    assert out == ""
    assert "Traceback" not in err


def test_errors_as_json(capsys, models):
    code, _, err = run(capsys, "explain", f"{models}:tinny", "--json")
    assert code == cli.MISUSED
    error = json.loads(err)
    assert (error["error"], error["try"]) == ("UsageError", "tiny")


def test_the_stack_is_shown_on_request(capsys, models, monkeypatch):
    monkeypatch.setenv("MOEPDL_VERBOSE", "1")
    assert "Traceback" in run(capsys, "explain", f"{models}:broken")[2]


def test_demo_gets_its_own_arguments(monkeypatch, capsys):
    import types

    seen = []
    fake = types.ModuleType("moe_compiler.demo")
    fake.main = lambda argv: seen.append(argv) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moe_compiler.demo", fake)
    monkeypatch.setattr("moe_compiler.demo", fake, raising=False)
    assert cli.main(["demo", "--layers", "2"]) == 0
    assert seen == [["--layers", "2"]]


def test_python_m_is_the_same_program_and_loads_no_torch_for_a_dump(dump):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['moepdl', 'diff', {dump!r}]\n"
        "try:\n    runpy.run_module('moe_compiler', run_name='__main__')\n"
        "except SystemExit as end:\n    print('EXIT', end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == "EXIT 0 False"
    assert "+y = experts(x)" in done.stdout
