"""The operators moepdl::route and moepdl::route_backward; route is differentiable in its logits and expert_scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.library import below_autograd, differentiable_once
from moe_compiler.runtime_kernels.route.reference import check_groups, check_operand, check_route
from moe_compiler.runtime_kernels.stage import define_stage


def _allocate(
    logits: Tensor,
    bias: Tensor | None,
    expert_scale: Tensor | None,
    k: int,
    score: str,
    order: str,
    groups: int,
    kept_groups: int,
    group_top: int,
    fill: str,
    renormalize: bool,
    clamp: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_route(score, order)
    tokens, experts = logits.shape
    check_groups(experts, groups, kept_groups, group_top, fill)
    check_operand(bias, experts, "bias")
    check_operand(expert_scale, experts, "expert_scale")
    return logits.new_empty((tokens, k), dtype=dtype), logits.new_empty((tokens, k), dtype=torch.int64)


def _allocate_backward(
    grad_weights: Tensor,
    logits: Tensor,
    ids: Tensor,
    expert_scale: Tensor | None,
    score: str,
    order: str,
    renormalize: bool,
    clamp: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_route(score, order)
    grad_scale = logits.new_empty(0) if expert_scale is None else expert_scale.new_empty(expert_scale.shape)
    return logits.new_empty(logits.shape), grad_scale


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, expert_scale: Tensor | None, bias: Tensor | None, *attrs: Any
    ) -> tuple[Tensor, Tensor]:
        with below_autograd():
            weights, ids = ROUTE(logits, bias, expert_scale, *attrs)
        ctx.save_for_backward(logits, ids, expert_scale)
        ctx.mark_non_differentiable(ids)
        _k, score, order, _groups, _kept, _top, _fill, *rest, _dtype = attrs
        ctx.attrs = (score, order, *rest)
        return weights, ids

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, _grad_ids: Any) -> tuple[Any, ...]:
        logits, ids, expert_scale = ctx.saved_tensors
        with torch.no_grad():
            grads = ROUTE_BACKWARD(grad_weights, logits, ids, expert_scale, *ctx.attrs)
        wanted = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)]
        sources = [source for source in (grad_weights, logits, expert_scale) if source is not None]
        return *differentiable_once("route", wanted, sources), *[None] * 14


def _autograd(logits: Tensor, bias: Tensor | None, expert_scale: Tensor | None, *attrs: Any) -> Any:
    differentiable = logits.requires_grad or (expert_scale is not None and expert_scale.requires_grad)
    if torch.is_grad_enabled() and differentiable:
        return _Route.apply(logits, expert_scale, None if bias is None else bias.detach(), *attrs)
    with below_autograd():
        return ROUTE(logits, bias, expert_scale, *attrs)


ROUTE = define_stage(
    "route(Tensor logits, Tensor? bias, Tensor? expert_scale, int k, str score, str order, int groups, "
    "int kept_groups, int group_top, str fill, bool renormalize, bool clamp, float eps, float scale, "
    "ScalarType score_dtype, ScalarType dtype) -> (Tensor weights, Tensor ids)",
    _allocate,
    autograd=_autograd,
)
ROUTE_BACKWARD = define_stage(
    "route_backward(Tensor grad_weights, Tensor logits, Tensor ids, Tensor? expert_scale, str score, str order, "
    "bool renormalize, bool clamp, float eps, float scale, ScalarType score_dtype) -> (Tensor, Tensor)",
    _allocate_backward,
)
