"""The plan of a chain: which kernels run a block's stages, for which numbers of tokens.

A chain's stages arrive as `Step`s, a straight line of named values. Rules turn them into variants by T: two kernels
stream each pair's weights when there are few tokens, the sort is one program or two, and on a CPU one loop over the
experts keeps everything of an expert in cache. A rule only fires when the values it would no longer compute are not
wanted by anybody, so the same rules are right for inference, training and half-disabled pipelines.

Thresholds are in tokens, chosen at call time on the host from the shape: no recompilation, no synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_compiler.runtime_kernels.chain.program import Attribute, Buffer, Launch, Variant
from moe_compiler.runtime_kernels.order.reference import ORDER_BLOCK
from moe_compiler.runtime_kernels.registry import kernel

__all__ = ["FEW_SHARE", "ONE_PROGRAM_PAIRS", "Step", "variants"]

# One token in four experts or fewer: few pairs meet in one expert, so streaming each pair's weights costs no more.
FEW_SHARE = 4
# Up to here one program sorts the pairs; beyond, a count and a scatter kernel over blocks of pairs.
ONE_PROGRAM_PAIRS = 4096


@dataclass(frozen=True)
class Step:
    """One stage over named values. `outs` holds only the results that somebody reads."""

    stage: str
    ins: Mapping[str, str | None]
    outs: Mapping[str, str]
    attrs: Mapping[str, Attribute] = field(default_factory=dict)


def _launch(
    name: str, ins: Mapping[str, str | None], outs: Mapping[str, str], attrs: Mapping[str, Attribute]
) -> Launch:
    reads = kernel(name).traits.reads
    return Launch(kernel=name, ins={key: ins.get(key) for key in reads}, outs=dict(outs), attrs=dict(attrs))


def _plain(step: Step) -> Launch:
    return _launch(step.stage, step.ins, step.outs, step.attrs)


def _forward_block(steps: tuple[Step, ...], outputs: frozenset[str]) -> tuple[int, Step, Step, Step, Step] | None:
    """(position, order, gate_up, down, combine) when these four stand in a row and feed each other."""
    names = [step.stage for step in steps]
    for at in range(len(steps) - 3):
        if names[at : at + 4] != ["order", "gate_up", "down", "combine"]:
            continue
        order, first, second, last = steps[at : at + 4]
        linked = (
            first.ins["perm"] == second.ins["perm"] == order.outs.get("perm")
            and second.ins["act"] == first.outs.get("act")
            and last.ins["pairs"] == second.outs.get("pairs")
        )
        private = not {first.outs.get("act"), second.outs.get("pairs")} & outputs
        if linked and private:
            return at, order, first, second, last
    return None


def _few(steps: tuple[Step, ...], outputs: frozenset[str]) -> tuple[Launch, ...] | None:
    """Two kernels and no sort: each pair streams its own expert, the second sums over k."""
    block = _forward_block(steps, outputs)
    if block is None:
        return None
    at, order, first, second, last = block
    if first.attrs["save"] or set(order.outs.values()) & outputs:
        return None
    act = first.outs["act"]
    gate_up = _launch(
        "gate_up_few",
        {**first.ins, "ids": order.ins["ids"]},
        {"act": act},
        {"activation": first.attrs["activation"], "gated": first.attrs["gated"]},
    )
    down = _launch(
        "down_few",
        {**second.ins, "act": act, "ids": order.ins["ids"], "weights": last.ins["weights"]},
        {"y": last.outs["y"]},
        {"dtype": last.attrs["dtype"]},
    )
    return (*map(_plain, steps[:at]), gate_up, down, *map(_plain, steps[at + 4 :]))


def _split_order(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Replace the one-program sort by a count and a scatter over blocks of pairs."""
    result: list[Launch] = []
    for launch in launches:
        if launch.kernel == "order":
            counts = f"{launch.outs['perm']}.counts"
            result.append(Launch("order_count", launch.ins, {"counts": counts}, launch.attrs))
            result.append(Launch("order_scatter", {**launch.ins, "counts": counts}, launch.outs, launch.attrs))
        else:
            result.append(launch)
    return tuple(result)


def _loop(steps: tuple[Step, ...], outputs: frozenset[str]) -> tuple[Launch, ...] | None:
    """The CPU plan of a forward block: one loop over the experts."""
    block = _forward_block(steps, outputs)
    if block is None:
        return None
    at, order, first, second, last = block
    weights = first.ins["weights"] or last.ins["weights"]
    ins = {
        **{name: first.ins.get(name) for name in ("x", "gate", "up", "gate_bias", "up_bias", "perm", "starts")},
        **{name: second.ins.get(name) for name in ("down", "down_bias")},
        "ids": order.ins["ids"],
        "weights": weights,
    }
    attrs: dict[str, Attribute] = {
        "activation": first.attrs["activation"],
        "gated": first.attrs["gated"],
        "weight_at": "input" if first.ins["weights"] else "output",
        "dtype": last.attrs["dtype"],
    }
    if first.attrs["save"]:
        outs = {"y": last.outs["y"], "preact": first.outs["preact"]}
        loop = _launch("experts_loop_saving", ins, outs, attrs)
    else:
        loop = _launch("experts_loop", ins, {"y": last.outs["y"]}, attrs)
    return (*map(_plain, steps[: at + 1]), loop, *map(_plain, steps[at + 4 :]))


def _loop_backward(steps: tuple[Step, ...], outputs: frozenset[str]) -> tuple[Launch, ...] | None:
    """The CPU plan of a backward block: one loop over the experts for all its gradients."""
    by_name = {step.stage: step for step in steps}
    act, wide, pairs = by_name.get("grad_act"), by_name.get("grad_gate_up"), by_name.get("grad_pairs")
    down, combine, scores = by_name.get("grad_down"), by_name.get("combine"), by_name.get("grad_input_weights")
    bias, down_bias = by_name.get("grad_gate_up_bias"), by_name.get("grad_down_bias")
    source = wide or pairs
    if act is None or source is None or len(by_name) != len(steps):
        return None
    inner = {act.outs.get("grad_preact"), act.outs.get("act"), pairs.outs["pairs"] if pairs is not None else None}
    if inner & outputs:
        return None
    at_output = act.ins["weights"] is not None
    # The loop also reads the tokens and the routing weights; a block that needs neither gradient has no stage for them.
    x = wide.ins["x"] if wide is not None else scores.ins["x"] if scores is not None else None
    weights = act.ins["weights"] if at_output else (wide or combine or act).ins.get("weights")
    if x is None or weights is None:
        return None
    outs: dict[str, str] = {}
    if combine is not None:
        outs["grad_x"] = combine.outs["y"]
    if at_output and "grad_weights" in act.outs:
        outs["grad_weights"] = act.outs["grad_weights"]
    if scores is not None:
        outs["grad_weights"] = scores.outs["grad_weights"]
    if wide is not None:
        outs |= {name: wide.outs[name] for name in ("grad_gate", "grad_up") if name in wide.outs}
    for step in (down, bias, down_bias):
        outs |= step.outs if step is not None else {}
    ins = {
        **{name: act.ins.get(name) for name in ("grad_y", "down", "down_bias", "preact", "perm", "starts")},
        **({name: bias.ins.get(name) for name in ("gate_bias", "up_bias")} if bias is not None else {}),
        **{name: source.ins[name] for name in ("gate", "up")},
        "x": x,
        "weights": weights,
    }
    attrs: dict[str, Attribute] = {
        "activation": act.attrs["activation"],
        "gated": act.attrs["gated"],
        "weight_at": "output" if at_output else "input",
        "needs": tuple(name in outs for name in kernel("experts_loop_backward").traits.writes),
    }
    return (_launch("experts_loop_backward", ins, outs, attrs),)


def _variant(
    name: str, limit: int | None, launches: tuple[Launch, ...], shapes: Mapping[str, Buffer], experts: int, k: int
) -> Variant:
    buffers: dict[str, Buffer] = {}
    for launch in launches:
        for value in launch.outs.values():
            if value.endswith(".counts"):
                buffers[value] = Buffer((f"CeilDiv(T*{k}, {ORDER_BLOCK})", str(experts)), "int32")
            else:
                buffers[value] = shapes[value]
    return Variant(name, limit, buffers, launches)


def variants(
    steps: tuple[Step, ...],
    *,
    outputs: frozenset[str],
    shapes: Mapping[str, Buffer],
    device: str,
    k: int,
    experts: int,
) -> tuple[Variant, ...]:
    """The variants of a chain, smallest T first.

    steps: the stages in order; outputs: the values that are read outside; shapes: the buffer of every value;
    device: "cuda" or "cpu"; k experts a token, of `experts`.
    """

    def make(name: str, limit: int | None, launches: tuple[Launch, ...]) -> Variant:
        return _variant(name, limit, launches, shapes, experts, k)

    plain = tuple(map(_plain, steps))
    if device != "cuda":
        loop = _loop(steps, outputs) or _loop_backward(steps, outputs)
        return (make("loop", None, loop),) if loop is not None else (make("stages", None, plain),)
    found: list[Variant] = []
    few = _few(steps, outputs)
    if few is not None:
        found.append(make("few", max(experts // (FEW_SHARE * k), 1), few))
    if any(launch.kernel == "order" for launch in plain):
        found.append(make("sorted", ONE_PROGRAM_PAIRS // k, plain))
        found.append(make("blocked", None, _split_order(plain)))
    else:
        found.append(make("stages", None, plain))
    return tuple(found)
