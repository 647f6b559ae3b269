"""The operators moepdl::route and moepdl::route_backward; route is differentiable in its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.library import below_autograd, differentiable_once
from moe_compiler.runtime_kernels.route.reference import check_route
from moe_compiler.runtime_kernels.stage import define_stage


def _allocate(
    logits: Tensor,
    k: int,
    score: str,
    order: str,
    renormalize: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_route(score, order)
    tokens = logits.shape[0]
    return logits.new_empty((tokens, k), dtype=dtype), logits.new_empty((tokens, k), dtype=torch.int64)


def _allocate_backward(
    grad_weights: Tensor,
    logits: Tensor,
    ids: Tensor,
    score: str,
    order: str,
    renormalize: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
) -> Tensor:
    check_route(score, order)
    return logits.new_empty(logits.shape)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, *attrs: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            weights, ids = ROUTE(logits, k, *attrs)
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        ctx.attrs = attrs[:-1]
        return weights, ids

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, _grad_ids: Any) -> tuple[Any, ...]:
        logits, ids = ctx.saved_tensors
        with torch.no_grad():
            grad = ROUTE_BACKWARD(grad_weights, logits, ids, *ctx.attrs)
        return *differentiable_once("route", [grad], [grad_weights, logits]), *[None] * 8


def _autograd(logits: Tensor, k: int, *attrs: Any) -> Any:
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Route.apply(logits, k, *attrs)
    with below_autograd():
        return ROUTE(logits, k, *attrs)


ROUTE = define_stage(
    "route(Tensor logits, int k, str score, str order, bool renormalize, float eps, float scale, "
    "ScalarType score_dtype, ScalarType dtype) -> (Tensor weights, Tensor ids)",
    _allocate,
    autograd=_autograd,
)
ROUTE_BACKWARD = define_stage(
    "route_backward(Tensor grad_weights, Tensor logits, Tensor ids, str score, str order, bool renormalize, "
    "float eps, float scale, ScalarType score_dtype) -> Tensor",
    _allocate_backward,
)
