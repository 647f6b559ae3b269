"""What device kernels compute, without a GPU: triton's interpreter against the references in float64.

Every kernel that reads or writes gate and up, in the layouts of packed weights, with ids out of range and biases.
Compiled code is another matter (`test_audit`, `test_wide_loads`, tests/gpu); this is whether the source is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="device code is interpreted by triton")

LAYOUTS = ("packed", "packed_transposed", "turns", "turns_transposed")
# The kernels' own tiles in float32; descriptors, the matrix on either side, and half tiles in float16.
WAYS = (
    ("float32", "own", 5),
    ("float16", "16x32x32 w4 s2 swap tma", 3),
    ("float16", "32x32x32 w4 s2 tma halves", 1),
)
LIMITS = {"float32": 1e-5, "float16": 4e-3}
RESULTS = {
    *("gate_up_few.act", "down_few.y", "gate_up.act", "gate_up.preact", "down.pairs", "grad_pairs.pairs"),
    *("grad_act.grad_preact", "grad_act.act", "grad_act.grad_weights"),
    *("grad_gate_up.grad_gate", "grad_gate_up_bias.grad_gate_bias"),
}


# Some ten seconds each: in every run the layout that is unlike the others, in each way.
CASES = [
    pytest.param(layout, *way, marks=() if layout == "turns_transposed" else pytest.mark.slow)
    for layout in LAYOUTS
    for way in WAYS
]


@pytest.mark.parametrize(("layout", "dtype", "tile", "experts"), CASES)
def test_kernels_compute_what_their_references_do(layout, dtype, tile, experts):
    command = [sys.executable, "-m", "tests.runtime_kernels.interpreted", layout, dtype, tile, str(experts)]
    root = Path(__file__).parents[2]
    told = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert told.returncode == 0, told.stderr[-3000:]
    errors = json.loads(told.stdout.splitlines()[-1])
    assert set(errors) == RESULTS
    assert not {name: error for name, error in errors.items() if not error <= LIMITS[dtype]}
