"""The layouts of expert weights, and the table of their addresses."""

from __future__ import annotations

import pytest
import torch

from moe_compiler.runtime_kernels.weights import (
    ExpertWeights,
    WeightLayoutError,
    are_in_turns,
    in_turns,
    num_experts,
    out_size,
    preact_size,
)


def test_packed():
    tensor = torch.randn(4, 6, 3)
    weights = ExpertWeights([tensor])
    assert (weights.experts, weights.out, weights.inner, weights.is_packed) == (4, 6, 3, True)
    assert (weights.expert_stride, weights.strides) == (18, (3, 1))
    assert torch.equal(weights.matrix(2), tensor[2])
    assert [m.data_ptr() for m in weights.matrices()] == weights.pointers().tolist()


def test_packed_and_transposed():
    weights = ExpertWeights([torch.randn(4, 3, 6).transpose(1, 2)])
    assert (weights.out, weights.inner, weights.strides) == (6, 3, (1, 6))


@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_in_turns(transposed):
    tensor = torch.randn(4, 3, 6).transpose(1, 2) if transposed else torch.randn(4, 6, 3)
    halves = in_turns(tensor, 1)
    assert torch.equal(halves[:, 0], tensor[:, ::2]) and torch.equal(halves[:, 1], tensor[:, 1::2])
    weights = ExpertWeights([halves])
    assert weights.turns and weights.is_packed and (weights.experts, weights.out, weights.inner) == (4, 6, 3)
    assert (weights.expert_stride, *weights.strides) == tensor.stride()
    assert weights.tensors[0].data_ptr() == tensor.data_ptr() and torch.equal(weights.matrix(2), tensor[2])
    (given,) = weights.as_given(weights.empty_like())
    assert (
        (given.shape, given.stride())
        == (halves.shape, halves.stride())
        == (halves.shape, torch.empty_like(halves).stride())
    )
    assert (num_experts([halves]), out_size([halves]), preact_size([halves], [])) == (4, 6, 6)
    assert are_in_turns([halves]) and not are_in_turns([tensor])


@pytest.mark.parametrize("sizes", [(1, 6, 3), (4, 2, 3), (4, 6, 1), (1, 2, 1)])
def test_gate_and_up_in_turns_of_sizes_of_one(sizes):
    tensor = torch.randn(sizes)
    weights = ExpertWeights([in_turns(tensor, 1)])
    assert weights.turns and torch.equal(weights.tensors[0], tensor)
    assert ExpertWeights([torch.empty_like(in_turns(tensor, 1))]).out == sizes[1]


def test_one_tensor_an_expert():
    tensors = [torch.randn(6, 3) for _ in range(4)]
    weights = ExpertWeights(tensors)
    assert (weights.experts, weights.out, weights.inner, weights.is_packed) == (4, 6, 3, False)
    assert (weights.expert_stride, weights.strides) == (0, (3, 1))
    assert weights.pointers().tolist() == [t.data_ptr() for t in tensors]
    assert weights.matrix(1) is tensors[1]


def test_a_single_expert_in_a_list_is_not_packed():
    assert not ExpertWeights([torch.randn(6, 3)]).is_packed


def test_the_table_is_kept_until_the_weights_move():
    tensors = [torch.randn(6, 3) for _ in range(4)]
    table = ExpertWeights(tensors).pointers()
    assert ExpertWeights(list(tensors)).pointers() is table
    tensors[2].data = torch.randn(6, 3)
    moved = ExpertWeights(tensors).pointers()
    assert moved.tolist() == [t.data_ptr() for t in tensors]
    assert moved.tolist() != table.tolist()


def test_gradients_have_the_strides_of_the_weights():
    tensor = torch.randn(4, 3, 6).transpose(1, 2)
    (grad,) = ExpertWeights([tensor]).empty_like()
    assert grad.stride() == tensor.stride()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "gate: the list of weights is empty"),
        ([torch.ones(2, 3, 4), torch.ones(2, 3, 4)], "gate: a packed 3-D tensor must come alone, got 2 tensors"),
        (
            [torch.ones(3)],
            r"gate: expected one tensor \[E, out, in\] or \[E, 2, I, in\], or E tensors.*, got shape \(3,\)",
        ),
        (
            [torch.ones(2, 3, 4, 5)],
            r"gate: shape \(2, 3, 4, 5\) with strides \(60, 20, 5, 1\) is not gate and up in turns",
        ),
        (
            [torch.ones(2, 2, 4, 5)],
            r"gate: shape \(2, 2, 4, 5\) with strides \(40, 20, 5, 1\) is not gate and up in turns",
        ),
        ([torch.ones(3, 4), torch.ones(3, 5)], r"gate: expert 1 has shape \(3, 5\) and strides \(5, 1\)"),
        ([torch.ones(3, 4), torch.ones(4, 3).t()], r"gate: expert 1 has shape \(3, 4\) and strides \(1, 3\)"),
        ([torch.ones(3, 4), torch.ones(3, 4).double()], "gate: expert 1 is torch.float64 on cpu, expert 0 is"),
    ],
)
def test_errors(tensors, message):
    with pytest.raises(WeightLayoutError, match=message):
        ExpertWeights(tensors, "gate").check()
    if tensors and tensors[0].dim() == 2:
        with pytest.raises(WeightLayoutError, match=message):
            ExpertWeights(tensors, "gate").pointers()


def test_sizes_of_the_preactivation():
    assert preact_size([torch.ones(2, 8, 3)], []) == 8
    assert preact_size([torch.ones(4, 3)] * 2, [torch.ones(4, 3)] * 2) == 8
