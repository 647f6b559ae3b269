"""Where there are no kernels a block stays with Inductor, and the report says why."""

from __future__ import annotations

import pytest
import torch

from moe_compiler import device
from moe_compiler.backend import last_reports, moepdl
from tests.moe_compiler.blocks import qwen3_block


def test_a_device_without_kernels_leaves_the_block_alone_and_says_why(monkeypatch):
    monkeypatch.setattr(device, "why_left_alone", lambda kind, dtype: f"there are no kernels for {kind} devices")
    block = qwen3_block()
    x = torch.randn(1, 7, 32)
    with torch.no_grad():
        out = torch.compile(block, backend=moepdl, options={"remainder": "eager"})(x)
        torch.testing.assert_close(out, block(x))
        report = last_reports()[-1]
        assert report.status == "unchanged"
        assert report.matches[0].left_alone == "there are no kernels for cpu devices"
        assert "1 left alone" in report.summary()
        torch._dynamo.reset()
        with pytest.raises(Exception, match="0 MoE blocks matched"):
            torch.compile(block, backend=moepdl, options={"remainder": "eager", "require_match": True})(x)


def test_experts_that_are_stored_differently_are_left_alone_in_training_too():
    from moe_compiler.testing import examples

    module = examples()["where_loop"]().module
    weight = next(p for name, p in module.named_parameters() if "experts.1." in name or name.endswith(".1.weight"))
    weight.data = weight.data.t().contiguous().t()
    x = torch.randn(7, 32, requires_grad=True)
    ours = torch.compile(module, backend=moepdl, options={"remainder": "eager"}, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(ours(x).sum(), x), torch.autograd.grad(module(x).sum(), x))
    (match,) = last_reports()[-1].matches
    assert "of expert 1 has strides" in match.left_alone


@pytest.mark.parametrize(
    ("kind", "dtype", "triton", "capability", "reason"),
    [
        ("cpu", torch.float64, None, None, ""),
        ("mps", torch.float32, "3.6.0", None, "there are no kernels for mps devices"),
        ("cuda", torch.bfloat16, None, (9, 0), "triton is not installed"),
        ("cuda", torch.float64, "3.6.0", (9, 0), "not in float64"),
        ("cuda", torch.bfloat16, "3.6.0", (7, 5), "the kernels need sm_80, the device is sm_75"),
        ("cuda", torch.bfloat16, "3.6.0", (9, 0), ""),
    ],
)
def test_why_left_alone(kind, dtype, triton, capability, reason, monkeypatch):
    monkeypatch.setattr(device, "triton_version", lambda: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    found = device.why_left_alone(kind, dtype)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("kind", "triton", "capability", "reason"),
    [
        ("cpu", "3.6.0", None, "the block runs on cpu"),
        ("cuda", None, (9, 0), "triton is not installed"),
        ("cuda", "3.6.0", (8, 6), "sm_86 is older than sm_90"),
        ("cuda", "3.4.0", (9, 0), "triton 3.4.0 cannot call the device-side wait"),
        ("cuda", "3.6.0", (9, 0), ""),
    ],
)
def test_why_no_pdl(kind, triton, capability, reason, monkeypatch):
    monkeypatch.setattr(device, "triton_version", lambda: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    found = device.why_no_pdl(kind)
    assert reason in found and bool(found) == bool(reason)


def test_a_pair_of_versions_that_was_not_tested_is_named(monkeypatch):
    monkeypatch.setattr(device, "triton_version", lambda: "2.0.0")
    assert "with triton 2.0 is not among the tested pairs" in device.untested_versions()
    own = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(device, "TESTED", ((own, "2.0"),))
    assert device.untested_versions() == ""
