"""What expert_parallel finds in a model and makes of it, in a group whose other ranks do not exist."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_compiler
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.errors import PrepareError
from tests.ranks import fake_ranks


@pytest.fixture
def group() -> Iterator[Any]:
    with fake_ranks(4) as ranks:
        yield ranks


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, 8, 16))
        self.w2 = nn.Parameter(torch.randn(experts, 16, 8))
        self.bias = nn.Parameter(torch.randn(experts, 16))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.einsum("th,tkih->tki", x, self.w1[ids]).relu()
        rows = torch.einsum("tki,tkhi->tkh", hidden, self.w2[ids]) + self.bias[ids]
        return (rows * weights[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(16, experts)
        self.experts = Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        return self.experts(x, ids, weights)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)


class Listed(nn.Module):
    def __init__(self, container: type = nn.ModuleList) -> None:
        super().__init__()
        self.router = nn.Linear(16, 5)
        made = [Mlp() for _ in range(5)]
        self.experts = container(made if container is nn.ModuleList else {f"e{i}": m for i, m in enumerate(made)})


def test_shares_of_packed_parameters_and_what_has_none(group):
    model = nn.Sequential(Block(), Block())
    first, second = moe_compiler.expert_parallel(model, group)
    assert (first.path, first.kind, first.experts, first.own) == ("0.experts", "packed", 6, (0, 1))
    assert second.parameters == ("1.experts.w1", "1.experts.w2", "1.experts.bias")
    assert model[0].experts._parameters["w1"].shape == (2, 8, 16) and model[0].router.weight.shape == (6, 16)
    assert model[1].experts.scale.shape == (1,)
    assert first.kept * 3 == first.whole
    assert str(first).startswith("0.experts: rank 0 of 4 keeps 2 of 6 experts (0, 1; contiguous), ")


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_shares_of_a_list_of_modules(group, container):
    model = Listed(container)
    (done,) = moe_compiler.expert_parallel(model, group, placement="round_robin")
    assert (done.kind, done.experts, done.own) == ("modules", 5, (0, 4))
    sizes = [expert.up._parameters["weight"].shape[0] for expert in model.experts.children()]
    assert sizes == [24, 0, 0, 0, 24]
    assert all(expert.up.weight.shape == (24, 16) for expert in model.experts.children())  # read whole


def test_equal_modules_keep_their_names_and_share_one_class(group):
    model = nn.Sequential(Block(), Block())
    moe_compiler.expert_parallel(model, group)
    kind = type(model[0].experts)
    assert kind is type(model[1].experts) and isinstance(model[0].experts, Experts)
    assert (kind.__name__, kind.__module__) == (Experts.__name__, Experts.__module__)


def test_equal_layers_are_compiled_once(group):
    layers = [Block() for _ in range(3)]
    moe_compiler.expert_parallel(nn.ModuleList(layers), group)
    known = last_reports()
    for layer in layers:
        layer.compile(backend=moepdl, options={"remainder": "eager", "require_match": True})
        layer(torch.randn(5, 16))
    (new,) = (report for report in last_reports() if not any(report is old for old in known))
    assert new.exchanges


def test_a_copy_is_sharded_too_and_setting_a_parameter_reads_nothing(group):
    model = Block()
    moe_compiler.expert_parallel(model, group)
    again = copy.deepcopy(model)
    assert again.experts.w1.shape == (6, 8, 16) and again.experts._parameters["w1"].shape == (2, 8, 16)
    from moe_compiler.runtime_kernels.exchange.groups import group as known

    before = known(group.group_name).epoch
    model.experts.w1 = nn.Parameter(torch.zeros(2, 8, 16))
    model.double()
    assert [p.dtype for p in model.experts.parameters()] == [torch.float64] * 4
    assert known(group.group_name).epoch == before


def test_distributed_data_parallel_leaves_the_experts_alone(group):
    model = Block()
    model._ddp_params_and_buffers_to_ignore = ["router.bias"]
    moe_compiler.expert_parallel(model, group)
    assert model._ddp_params_and_buffers_to_ignore == ["router.bias", "experts.w1", "experts.w2", "experts.bias"]


def test_layers_are_no_experts_and_neither_is_a_module_without_a_router(group):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Parameter(torch.zeros(8, 4, 16)), nn.Parameter(torch.zeros(8, 4, 16))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.layers = Heads(), nn.ModuleList(Listed() for _ in range(5))

    done = moe_compiler.expert_parallel(Model(), group)
    assert [one.path for one in done] == [f"layers.{i}.experts" for i in range(5)]


def test_fewer_experts_than_ranks_are_refused(group):
    with pytest.raises(PrepareError, match="experts: 3 experts cannot be spread over 4 ranks"):
        moe_compiler.expert_parallel(Block(3), group)


def test_experts_in_one_matrix_are_refused_and_not_passed_over(group):
    class OneMatrix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 4
            self.w1, self.w2 = nn.Parameter(torch.zeros(32, 16)), nn.Parameter(torch.zeros(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(PrepareError, match="the experts of 1 \\(OneMatrix\\) cannot be shared"):
        moe_compiler.expert_parallel(nn.Sequential(Block(), OneMatrix()), group)


def test_a_tensor_that_is_distributed_already_is_refused(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = Block(8)
    whole = distribute_tensor(model.experts.w1.detach(), init_device_mesh("cpu", (4,)), [Shard(0)])
    model.experts.w1 = nn.Parameter(whole)
    with pytest.raises(PrepareError, match=r"experts\.w1 is a DTensor already"):
        moe_compiler.expert_parallel(model, group)
