"""The router's matmul in plain torch: the scores of every expert for every token, before anything is made of them."""

from __future__ import annotations

import torch
from torch import Tensor


def router_logits(x: Tensor, router: Tensor, router_bias: Tensor | None) -> Tensor:
    """x [T,H], router [H,E], router_bias [E] or None -> logits [T,E] in x's dtype."""
    return torch.mm(x, router) if router_bias is None else torch.addmm(router_bias, x, router)
