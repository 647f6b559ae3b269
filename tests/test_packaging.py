"""The layout: four import names, one of them at the top; a wheel and a source archive that hold every file."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from itertools import chain
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("passes", "runtime_kernels", "viz")


def source_packages() -> dict[str, Path]:
    """Every folder with Python files that belongs to the distribution, by its import name."""
    folders = {"moe_compiler": ROOT / "moe_compiler"} | {f"moe_compiler.{name}": ROOT / name for name in LINKED}
    found = {}
    for name, top in folders.items():
        for file in top.rglob("*.py"):  # does not follow the symlinks, so each file is seen once
            inner = file.parent.relative_to(top).parts
            if not any((top / part).is_symlink() for part in inner[:1]):
                found[".".join((name, *inner))] = file.parent
    return found


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter without what the suite put on the path."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


def test_the_package_list_is_complete():
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    found = set(source_packages())
    assert not found - listed, "pyproject.toml does not list folders with Python files: they would miss from the wheel"
    assert not listed - found, "pyproject.toml lists packages that do not exist"


@pytest.mark.parametrize("name", sorted(source_packages()))
def test_every_package_has_an_init(name: str):
    assert (source_packages()[name] / "__init__.py").exists()


@pytest.mark.parametrize("name", LINKED)
def test_the_link_is_there(name: str):
    link = ROOT / "moe_compiler" / name
    if not link.is_symlink():
        pytest.skip("this checkout has no symlinks (core.symlinks=false): install the package to use it")
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_a_bare_import_says_the_right_name(name: str):
    result = python("-c", f"import {name}", cwd=ROOT)
    assert result.returncode != 0
    assert f"ImportError: import 'moe_compiler.{name}', not '{name}'" in result.stderr


def test_nothing_was_imported_under_a_bare_name():
    import moe_compiler.passes
    import moe_compiler.viz

    assert not set(LINKED) & set(sys.modules)
    assert moe_compiler.passes.__name__ == "moe_compiler.passes"
    assert moe_compiler.viz.__name__ == "moe_compiler.viz"


def test_importing_the_package_is_cheap():
    code = "import sys, moe_compiler; print([m for m in ('torch', 'triton', 'networkx', 'sympy') if m in sys.modules])"
    result = python("-c", code, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stderr


def test_public_names_are_lazy_and_listed():
    import moe_compiler

    tree = ast.parse((ROOT / "moe_compiler" / "__init__.py").read_text())
    static = {
        alias.asname
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert static | {"__version__"} == set(moe_compiler.__all__), "the TYPE_CHECKING block and __all__ differ"
    assert set(moe_compiler.__all__) <= set(dir(moe_compiler))
    with pytest.raises(AttributeError, match="module 'moe_compiler' has no attribute 'explian'"):
        _ = moe_compiler.explian


@pytest.mark.parametrize("name", ["Report", "errors", "explain", "last_reports", "testing"])
def test_a_public_name_resolves(name: str):
    import moe_compiler

    assert getattr(moe_compiler, name) is getattr(moe_compiler, name)


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("torch_dynamo_backends", "moe_compiler.backend:moepdl"),
        ("torch.backends", "moe_compiler._logs:autoload"),
        ("console_scripts", "moe_compiler.cli:main"),
    ],
)
def test_entry_points(group: str, target: str):
    (entry,) = {e.value: e for e in importlib.metadata.entry_points(group=group, name="moepdl")}.values()
    assert entry.value == target
    assert callable(entry.load())


def test_constraints_fit_the_requirements():
    """Each direct requirement of ours that CI installs has a pin: a new one without it would drift."""
    from packaging.requirements import Requirement

    project = PYPROJECT["project"]
    asked = [Requirement(r) for r in chain(project["dependencies"], *project["optional-dependencies"].values())]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {r.name: r for r in map(Requirement, lines)}
    for requirement in asked:
        if requirement.name in ("moepdl", "tomli"):
            continue
        assert requirement.name in pins, f"{requirement.name} has no pin in constraints.txt"
        (pin,) = pins[requirement.name].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} excludes the pin {pin}"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """File names in the wheel and in the source archive, built from a copy of the tree without network."""
    setuptools = importlib.metadata.version("setuptools")
    if int(setuptools.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools} does not know SPDX licences (77 or newer is needed to build)")
    tree = tmp_path_factory.mktemp("tree") / "moepdl"
    out = tmp_path_factory.mktemp("out")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "out")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    # The out folder is read first: setuptools replaces sys.argv.
    build = "import sys; out = sys.argv[1]; from setuptools.build_meta import *; build_sdist(out); build_wheel(out)"
    result = python("-c", build, str(out), cwd=tree)
    assert result.returncode == 0, result.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as z, tarfile.open(sdist) as t:
        return z.namelist(), [name.split("/", 1)[1] for name in t.getnames() if "/" in name]


def test_the_wheel_has_one_top_level_name(archives: tuple[list[str], list[str]]):
    wheel, _ = archives
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"moe_compiler"}


def test_the_wheel_holds_every_file(archives: tuple[list[str], list[str]]):
    wheel, _ = archives
    expected = {"moe_compiler/py.typed"}
    for folder in ("devices", "links"):
        tables = (ROOT / "moe_compiler" / folder).glob("*.json")
        expected |= {f"moe_compiler/{folder}/{table.name}" for table in tables}
    for name, source in source_packages().items():
        expected |= {f"{name.replace('.', '/')}/{file.name}" for file in source.glob("*.py")}
    assert expected == {name for name in wheel if ".dist-info/" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_source_archive_can_build_and_be_tested(archives: tuple[list[str], list[str]]):
    _, sdist = archives
    needed = ["pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "tests/conftest.py"]
    needed += [
        "moe_compiler/devices/nvidia_h200.json",
        "moe_compiler/links/nvidia_h200.json",
        "moe_compiler/__init__.py",
        "moe_compiler/py.typed",
        *(f"{name}/__init__.py" for name in LINKED),
    ]
    assert not set(needed) - set(sdist)
