"""Reports to draw. Under importlib mode a folder of tests is no package, so the builder is loaded by its path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """The module sample_report.py: `sample()`, `all_well()`, `nothing()`, `hostile()` and their parts."""
    path = Path(__file__).with_name("sample_report.py")
    spec = importlib.util.spec_from_file_location("sample_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
