"""FSDP2 around a compiled block: its parameters live in new memory at every unshard, and are seen there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_compiler.backend import last_reports, moepdl
from tests.moe_compiler.blocks import qwen3_block


@pytest.fixture
def one_process_group():
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_unsharded_weights_are_read_where_they_are_at_each_call(one_process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    block, twin = qwen3_block(), qwen3_block()
    block.compile(backend=moepdl, options={"remainder": "eager", "require_match": True})
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (block, twin)]
    for step in range(3):
        x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(step))
        losses = []
        for module, optimizer in zip((block, twin), optimizers, strict=True):
            loss = module(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    for mine, theirs in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())
    assert last_reports()[-1].status == "rewritten"
