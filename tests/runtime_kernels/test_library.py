"""What importing defines, and the private torch that this package relies on."""

from __future__ import annotations

import subprocess
import sys

import torch

from moe_compiler.runtime_kernels.library import below_autograd
from moe_compiler.runtime_kernels.matmul import matmul


def test_importing_the_library_alone_defines_no_operator():
    code = (
        "import torch, sys; import moe_compiler.runtime_kernels.library, moe_compiler.runtime_kernels.registry\n"
        "names = lambda: {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith('moepdl::')}\n"
        "assert names() == set(), names()\n"
        "import moe_compiler.runtime_kernels.register\n"
        "print(*sorted(n.partition('::')[2] for n in names()))\n"
        "assert 'triton' not in sys.modules\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == [
        "chain",
        "chain_start",
        "chain_wait",
        "combine",
        "down",
        "ep_combine",
        "ep_combine_start",
        "ep_combine_wait",
        "ep_dispatch",
        "ep_dispatch_start",
        "ep_dispatch_wait",
        "ep_redispatch",
        "ep_redispatch_start",
        "ep_redispatch_wait",
        "ep_return_weights",
        "ep_return_weights_start",
        "ep_return_weights_wait",
        "experts",
        "experts_backward",
        "experts_saving",
        "gate_up",
        "gather_expert",
        "gather_experts",
        "grad_act",
        "grad_down",
        "grad_down_bias",
        "grad_gate_up",
        "grad_gate_up_bias",
        "grad_input_weights",
        "grad_pairs",
        "order",
        "reduce_expert",
        "reduce_experts",
        "route",
        "route_backward",
        "router_logits",
    ]


def test_torch_still_has_a_guard_that_skips_autograd():
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_torch_still_has_the_float32_linear_of_onednn():
    """Where a build has oneDNN. If torch moves the operator, `matmul` falls back to torch.mm and this test says so."""
    from moe_compiler.runtime_kernels import matmul as module

    if torch.backends.mkldnn.is_available():
        assert module._onednn_linear is not None


def test_matmul():
    left, right = torch.randn(5, 4), torch.randn(4, 3)
    expected = left.double() @ right.double()
    strided = torch.zeros(5, 6)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b = left.to(dtype), right.to(dtype)
        for one, two in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
            torch.testing.assert_close(matmul(one, two).double(), expected, rtol=2e-2, atol=3e-2)
            out = strided.to(dtype)[:, 3:]
            assert matmul(one, two, out=out) is out
            torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=3e-2)
