"""One rank of tests/moe_compiler/test_distributed.py: `python -m tests.moe_compiler.distributed_worker RANK FOLDER`.

Runs every scenario and writes what it found, as JSON, to FOLDER/RANK.json: for each scenario an error text or None,
and what the reports said.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_compiler.backend import last_reports, moepdl
from tests.moe_compiler.blocks import qwen3_block, qwen3_decoder

WORLD = 2
OPTIONS: dict[str, Any] = {"remainder": "eager"}


def batches(rank: int, steps: int) -> list[torch.Tensor]:
    return [
        torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(10 * s + rank)) for s in range(steps)
    ]


def trained_alone(make, data, loss_of, steps: int) -> torch.nn.Module:
    """The same training without any parallelism: the mean of the ranks' losses, in eager."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        (sum(loss_of(model, data(rank, step)) for rank in range(WORLD)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(model, rank: int, data, loss_of, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        loss_of(model, data(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same_parameters(model: torch.nn.Module, wanted: torch.nn.Module, **tolerance: float) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(full.detach(), theirs.detach(), msg=lambda text, n=name: f"{n}: {text}", **tolerance)


def decoder_data(rank: int, step: int) -> torch.Tensor:
    return batches(rank, step + 1)[step]


def decoder_loss(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def block_data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(1, 9 + rank, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def wide_data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(1, 9 + rank, 256, generator=torch.Generator().manual_seed(10 * step + rank))


def square_loss(model, x):
    return model(x).square().mean()


def wide_block(width: int = 256) -> torch.nn.Module:
    """At this width the down projections fill DDP's first bucket of 1 MiB: the graph is cut between the matmuls."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=width, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return block


def fsdp_whole(rank: int) -> None:
    """fully_shard on every layer and on the root, each layer compiled: how torchtitan does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = qwen3_decoder().train()
    for layer in model.model.layers:
        layer.compile(backend=moepdl, options={**OPTIONS, "require_match": True})
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(model, rank, decoder_data, decoder_loss, 2)
    wanted = trained_alone(lambda: qwen3_decoder().train(), decoder_data, decoder_loss, 2)
    same_parameters(model, wanted, rtol=1e-4, atol=1e-5)


def fsdp_around(rank: int) -> None:
    """torch.compile around a sharded model: Dynamo breaks at FSDP's hooks, and the blocks between are found."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = qwen3_decoder().train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    trained(torch.compile(model, backend=moepdl, options=OPTIONS), rank, decoder_data, decoder_loss, 2)
    wanted = trained_alone(lambda: qwen3_decoder().train(), decoder_data, decoder_loss, 2)
    same_parameters(model, wanted, rtol=1e-4, atol=1e-5)


def fsdp_bfloat16(rank: int) -> None:
    """Parameters are kept in fp32 and gathered in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    models = [qwen3_block(), qwen3_block()]
    models[0].compile(backend=moepdl, options={**OPTIONS, "require_match": True})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model in models:
        fully_shard(model, mesh=mesh, mp_policy=policy)
        trained(model, rank, block_data, square_loss, 1)
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=2e-2, atol=1e-3)


def ddp_whole(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(qwen3_decoder().train())
    ours = torch.compile(model, backend=moepdl, options={**OPTIONS, "require_match": 2})
    trained(ours, rank, decoder_data, decoder_loss, 2)
    wanted = trained_alone(lambda: qwen3_decoder().train(), decoder_data, decoder_loss, 2)
    same_parameters(model, wanted, rtol=1e-4, atol=1e-5)


def ddp_inductor(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(qwen3_block())
    trained(torch.compile(model, backend=moepdl, dynamic=True), rank, block_data, square_loss, 2)
    same_parameters(model, trained_alone(qwen3_block, block_data, square_loss, 2), rtol=1e-4, atol=1e-5)


def ddp_cut(rank: int) -> None:
    """DDP's own graph splitting cuts through the block: a fragment with a remedy, and right all the same."""
    model = torch.nn.parallel.DistributedDataParallel(wide_block(), bucket_cap_mb=1)
    trained(torch.compile(model, backend=moepdl, options=OPTIONS), rank, wide_data, square_loss, 2)
    same_parameters(model, trained_alone(wide_block, wide_data, square_loss, 2), rtol=1e-4, atol=1e-5)


def ddp_cut_inductor(rank: int) -> None:
    """The cuts are behind the block, which is whole in its part of the graph; with Inductor."""
    model = torch.nn.parallel.DistributedDataParallel(WidePair(), bucket_cap_mb=1)
    trained(torch.compile(model, backend=moepdl, dynamic=False), rank, wide_data, square_loss, 1)
    same_parameters(model, trained_alone(WidePair, wide_data, square_loss, 1), rtol=1e-4, atol=1e-5)


class WidePair(torch.nn.Module):
    """Two linear layers fill DDP's first buckets; the block before them is smaller than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.block = wide_block(width=32)
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.block(x)))


def ddp_uncut(rank: int) -> None:
    """The remedy that the report names."""
    model = torch.nn.parallel.DistributedDataParallel(wide_block(), bucket_cap_mb=1)
    with torch._dynamo.config.patch(optimize_ddp=False):
        ours = torch.compile(model, backend=moepdl, options={**OPTIONS, "require_match": True})
        trained(ours, rank, wide_data, square_loss, 2)
    same_parameters(model, trained_alone(wide_block, wide_data, square_loss, 2), rtol=1e-4, atol=1e-5)


SCENARIOS = (fsdp_whole, fsdp_around, fsdp_bfloat16, ddp_whole, ddp_inductor, ddp_cut, ddp_cut_inductor, ddp_uncut)


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        torch._dynamo.reset()
        known = last_reports()
        error = None
        try:
            scenario(rank)
        except Exception:
            error = traceback.format_exc()
        made = [report for report in last_reports() if not any(report is old for old in known)]
        found[scenario.__name__] = {
            "error": error,
            "matches": [sum(match.count for match in report.matches) for report in made],
            "status": [report.status for report in made],
            "directions": sorted({chain.direction for report in made for chain in report.schedule}),
            "notes": [note for report in made for note in report.notes],
        }
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if error is not None:
            break  # the other rank waits in a collective: nothing after it can be right
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
