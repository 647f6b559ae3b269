"""The README's worked example: a pass of one's own, tested the way its author would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_readmes_worked_example_runs():
    section = README.read_text().partition("## Testing a pass")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    namespace: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()  # type: ignore[operator]


def test_the_examples_pass_is_held_to_its_word():
    import torch

    from moe_compiler.errors import PassError
    from moe_compiler.graph_pass import graph_pass
    from moe_compiler.moe_ir import Level
    from moe_compiler.testing import run_passes

    @graph_pass(level=Level.CAPTURED, numerics="exact")
    def forgetful(graph, context):
        """Changes the graph and says that it did not."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.sigmoid.default
        return 0

    with pytest.raises(PassError, match="it reported 0 rewrites, but the graph has changed"):
        run_passes(torch.relu, [forgetful], torch.randn(3))
