"""The operations of an expert-parallel block in their order: the compiler's launches with the exchanges between them.

The launches are those of `block_program`, so what `plan.variants` chooses for the rows of a rank; what each takes is
its expression in `cost` at the rows that the rank computes, with the device's numbers. The exchanges are the operators
of expert parallelism in their start / wait form:

    forward    router_logits, route, ep_dispatch_start, ep_dispatch_wait, order ... combine, ep_combine_start, _wait
    backward   ep_redispatch_start, _wait, grad_act ... combine, ep_return_weights_start, _wait, ep_combine_start, _wait

A start makes the rows ready to leave and sends them, a wait ends when the rank has everything of that exchange. Between
the two an order puts what needs neither:

    plain        nothing
    filler       the shared expert, and in the backward the gradients of weights
    local_first  also the rank's own rows: gate_up (grad_act) of them while the others travel, then the others' down
                 (grad_pairs) before their own, so that those leave first
    chunks       also the other chunks of the tokens
    columns      in the way home also the other columns: down (grad_pairs) and combine make some columns of every row,
                 which leave while the next are made. No kernel does that yet (`operation.WISHED`)

Each part of the rows has launches of its own, so what splitting costs (weights read again, tiles filled in part, one
more launch) is in the times. The backward's parts each add to the gradients of the weights; that addition is not in
the times.
"""

from __future__ import annotations

from moe_compiler.device_model import DeviceModel
from moe_compiler.exchange_plan.backward import backward
from moe_compiler.exchange_plan.builder import Block, Builder
from moe_compiler.exchange_plan.forward import forward
from moe_compiler.exchange_plan.operation import Op, Way
from moe_compiler.exchange_plan.traffic import Traffic

__all__ = ["operations"]


def operations(
    block: Block, traffic: Traffic, model: DeviceModel, way: Way, direction: str, *, every_slot: bool = True
) -> tuple[Op, ...]:
    """The operations of one direction ("forward" or "backward") of a block, in the order of the current stream.

    every_slot: as the kernels do, the sort, the sum over k and the filling with zeros go over unused slots and choices
    of other ranks too; False: as if they did not.
    """
    builder = Builder(block, traffic, model, way, every_slot)
    (forward if direction == "forward" else backward)(builder)
    return tuple(builder.ops)
