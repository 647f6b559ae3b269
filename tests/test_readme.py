"""The README keeps up with the code: every option with its default, every command, every target it names."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch

import moe_compiler
from moe_compiler import options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_options_table_is_complete_and_in_order():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", README, flags=re.MULTILINE)
    assert [key for key, _, _ in rows] == list(options.keys())
    assert {key: ast.literal_eval(default) for key, default, _ in rows} == options.Options().to_dict()


def test_the_example_is_five_lines_of_python():
    (code,) = re.findall(r"```python\nimport torch, moe_compiler\n(.*?)```", README, flags=re.DOTALL)
    ast.parse(code)
    assert len(code.splitlines()) == 5


def test_every_command_is_named():
    from moe_compiler import cli

    commands = re.findall(r"^    moepdl (\w+)", cli.__doc__ or "", flags=re.MULTILINE)
    assert len(commands) == 11
    assert [name for name in commands if f"`moepdl {name}" not in README] == []


def test_the_routers_are_explained():
    rows = re.findall(r"^\| .+ \| (R\d+) \|$", README, flags=re.MULTILINE)
    assert rows == ["R1", "R2", "R3", "R4", "R5", "R6", "R7", "R11"]


def test_no_path_is_shortened_by_hand():
    assert ".../" not in README


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_a_target_that_is_named_exists(target: str):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_a_link_leads_somewhere(link: str):
    assert (ROOT / link).exists()


def test_the_example_of_prepare_runs_by_itself(tmp_path, monkeypatch, capsys) -> None:
    (code,) = [part for part in re.findall(r"```python\n(.*?)```", README, re.S) if "moe_compiler.prepare(" in part]
    (tmp_path / "prepared.py").write_text(code)
    monkeypatch.setenv("MOEPDL_REMAINDER", "eager")
    torch.compiler.reset()
    runpy.run_path(str(tmp_path / "prepared.py"))
    said = capsys.readouterr().out
    assert "-> a loop over all of experts: 4 modules" in said and "not matched" not in said
    assert [match.formulation for match in moe_compiler.last_reports()[-1].matches] == ["where_loop"]
