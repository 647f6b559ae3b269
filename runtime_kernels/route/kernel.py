"""Device code of the router's choice and of its gradient. A program owns BT tokens, each with all its E logits.

With groups a token's logits lie in GROUPS_POW2 x SIZE_POW2 slots, so that a group is a row of a reshape whatever its
size; without, in SIZE_POW2 slots of one group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_compiler.runtime_kernels.device import steps, trigger, wait

LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def score_values(values, inside, SCORE: tl.constexpr, SCORE_DTYPE: tl.constexpr):
    """Scores along the last axis, rounded to SCORE_DTYPE, as fp32; positions not `inside` count for nothing."""
    values = values.to(SCORE_DTYPE).to(tl.float32)
    if SCORE == "softmax":
        top = tl.max(tl.where(inside, values, float("-inf")), 1)
        power = tl.where(inside, libdevice.exp(values - top[:, None]), 0.0)
        values = tl.div_rn(power, tl.broadcast_to(tl.sum(power, 1)[:, None], values.shape))
        values = values.to(SCORE_DTYPE).to(tl.float32)
    elif SCORE == "sigmoid":
        values = tl.div_rn(tl.full(values.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-values))
        values = values.to(SCORE_DTYPE).to(tl.float32)
    else:
        tl.static_assert(SCORE == "none", "unknown score")
    return values


@triton.jit
def sortable(values):
    """int32 in the order of the fp32 values, NaN above all and -0 equal to 0, as torch.topk compares."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, bits)


@triton.jit
def unsorted(keys):
    """The fp32 values of `sortable` keys."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def limit_groups(
    choice,
    inside,
    BT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    KEPT: tl.constexpr,
    TOP: tl.constexpr,
    LOWEST_FILL: tl.constexpr,
    CHOICE_DTYPE: tl.constexpr,
):
    """choice [BT, slots] with the fill outside of each token's KEPT best groups, by the sum of their TOP best."""
    keys = tl.reshape(tl.where(inside, sortable(choice), LOWEST), (BT, GROUPS_POW2, SIZE_POW2))
    s = tl.arange(0, SIZE_POW2)[None, None, :]
    total = tl.zeros((BT, GROUPS_POW2), tl.float32)
    for _step in tl.static_range(TOP):
        top = tl.max(keys, 2)
        total += unsorted(top)
        first = tl.min(tl.where(keys == top[:, :, None], s, SIZE_POW2), 2)
        keys = tl.where(s == first[:, :, None], LOWEST, keys)
    total = total.to(CHOICE_DTYPE).to(tl.float32)
    g = tl.arange(0, GROUPS_POW2)[None, :]
    best = tl.where(g < GROUPS, sortable(total), LOWEST)
    kept = tl.zeros((BT, GROUPS_POW2), tl.int32)
    for _step in tl.static_range(KEPT):
        top = tl.max(best, 1)
        first = tl.min(tl.where(best == top[:, None], g, GROUPS_POW2), 1)
        kept = tl.where(g == first[:, None], 1, kept)
        best = tl.where(g == first[:, None], LOWEST, best)
    spread = tl.broadcast_to(kept[:, :, None], (BT, GROUPS_POW2, SIZE_POW2))
    spread = tl.reshape(spread, (BT, GROUPS_POW2 * SIZE_POW2))
    if LOWEST_FILL:
        return tl.where(spread != 0, choice, float("-inf"))
    else:
        return tl.where(spread != 0, choice, 0.0)


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits,
    bias,
    expert_scale,
    weights,
    ids,
    T,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    KEPT: tl.constexpr,
    TOP: tl.constexpr,
    LOWEST_FILL: tl.constexpr,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    BT: tl.constexpr,
    SCORE: tl.constexpr,
    BEFORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CLAMP: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SCORE_DTYPE: tl.constexpr,
    CHOICE_DTYPE: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """weights, ids [T,K]: the K largest entries of the choice of each token, descending; of equals the first.

    PLAIN: the choice is the scores themselves, without bias and groups. BIAS, FACTOR: strides of bias and expert_scale.
    """
    wait(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    SLOTS: tl.constexpr = GROUPS_POW2 * SIZE_POW2
    slot = tl.arange(0, SLOTS)
    if GROUPS == 1 or SIZE == SIZE_POW2:  # neighbours in memory, seen as such by the compiler
        real = slot < GROUPS * SIZE
        e = slot
    else:
        real = (slot // SIZE_POW2 < GROUPS) & (slot % SIZE_POW2 < SIZE)
        # Slots that no expert has get a number that no expert has.
        e = tl.where(real, slot // SIZE_POW2 * SIZE + slot % SIZE_POW2, GROUPS_POW2 * SIZE_POW2)
    at = t.to(tl.int64)[:, None] * ROW + steps(e, COLUMN, SLOTS)[None, :]
    scores = tl.load(logits + at, mask=(t < T)[:, None] & real[None, :], other=0.0)
    if bias is not None:
        offset = tl.load(bias + steps(e, BIAS, SLOTS), mask=real, other=0.0).to(tl.float32)
    trigger(PDL)
    if BEFORE:
        scores = score_values(scores, real[None, :], SCORE, SCORE_DTYPE)
    scores = scores.to(tl.float32)
    choice = scores
    if bias is not None:
        choice = (choice + offset[None, :]).to(CHOICE_DTYPE).to(tl.float32)
    if GROUPS > 1:
        choice = limit_groups(
            choice, real[None, :], BT, GROUPS, GROUPS_POW2, SIZE_POW2, KEPT, TOP, LOWEST_FILL, CHOICE_DTYPE
        )
    # Below every value, even -inf: what is padding or taken.
    keys = tl.where(real[None, :], sortable(choice), LOWEST)
    j = tl.arange(0, K_POW2)
    chosen = tl.zeros((BT, K_POW2), tl.int32)
    values = tl.zeros((BT, K_POW2), tl.float32)
    for step in tl.static_range(K):
        top = tl.max(keys, 1)
        # Of equals the first.
        best = tl.min(tl.where(keys == top[:, None], e[None, :], GROUPS_POW2 * SIZE_POW2), 1)
        mine = e[None, :] == best[:, None]
        keys = tl.where(mine, LOWEST, keys)
        chosen = tl.where(j[None, :] == step, best[:, None], chosen)
        if PLAIN:
            value = unsorted(top)
        else:
            value = tl.sum(tl.where(mine, scores, 0.0), 1)
        values = tl.where(j[None, :] == step, value[:, None], values)
    used = (j < K)[None, :]
    if not BEFORE:
        values = score_values(values, used, SCORE, SCORE_DTYPE)
    if RENORMALIZE:
        total = tl.sum(tl.where(used, values, 0.0), 1)
        if CLAMP:
            total = tl.where(total < EPS, EPS, total)
        else:
            total += EPS
        values = tl.div_rn(values, tl.broadcast_to(total[:, None], values.shape))
    if SCALE != 1.0:
        values *= SCALE
    keep = (t < T)[:, None] & used
    if expert_scale is not None:
        values *= tl.load(expert_scale + steps(chosen, FACTOR, SLOTS), mask=keep, other=0.0).to(tl.float32)
    out = t.to(tl.int64)[:, None] * K + j[None, :]
    tl.store(weights + out, values.to(weights.dtype.element_ty), mask=keep)
    tl.store(ids + out, chosen.to(tl.int64), mask=keep)


@triton.jit(do_not_specialize=["T"])
def route_backward_kernel(
    grad_weights,
    logits,
    ids,
    expert_scale,
    grad_logits,
    partial,
    T,
    GRAD_ROW: tl.constexpr,
    GRAD_COLUMN: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    FACTOR: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    BT: tl.constexpr,
    SCORE: tl.constexpr,
    BEFORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CLAMP: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SCORE_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """grad_logits [T,E] from grad_weights [T,K] and the choice `ids` [T,K]; of expert_scale each program's sum [E]."""
    wait(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    t64 = t.to(tl.int64)[:, None]
    e = tl.arange(0, E_POW2)
    j = tl.arange(0, K_POW2)
    used = (t < T)[:, None] & (j < K)[None, :]
    grad = tl.load(grad_weights + t64 * GRAD_ROW + j.to(tl.int64)[None, :] * GRAD_COLUMN, mask=used, other=0.0).to(
        tl.float32
    )
    chosen = tl.load(ids + t64 * ID_T + j.to(tl.int64)[None, :] * ID_K, mask=used, other=0).to(tl.int64)
    # An id out of range has no logit: it gets no gradient and gives none.
    used = used & (chosen >= 0) & (chosen < E)
    picked = tl.load(logits + t64 * ROW + chosen * COLUMN, mask=used, other=0.0)
    if expert_scale is not None:
        factor = tl.load(expert_scale + chosen * FACTOR, mask=used, other=0.0).to(tl.float32)
    whole = (t < T)[:, None] & (e < E)[None, :]
    everywhere: tl.constexpr = BEFORE and SCORE == "softmax"
    if everywhere:
        row = tl.load(logits + t64 * ROW + e.to(tl.int64)[None, :] * COLUMN, mask=whole, other=0.0)
        row = row.to(SCORE_DTYPE).to(tl.float32)
        top = tl.max(tl.where((e < E)[None, :], row, float("-inf")), 1)
        power = tl.where((e < E)[None, :], libdevice.exp(row - top[:, None]), 0.0)
        total = tl.sum(power, 1)
        scores = tl.div_rn(power, tl.broadcast_to(total[:, None], power.shape)).to(SCORE_DTYPE).to(tl.float32)
        values = libdevice.exp(picked.to(SCORE_DTYPE).to(tl.float32) - top[:, None])
        values = tl.div_rn(values, tl.broadcast_to(total[:, None], values.shape)).to(SCORE_DTYPE).to(tl.float32)
    else:
        values = score_values(picked, used, SCORE, SCORE_DTYPE)
    trigger(PDL)
    values = tl.where(used, values, 0.0)
    grad = tl.where(used, grad * SCALE, 0.0)
    share = values
    if RENORMALIZE:
        norm = tl.sum(values, 1)
        if CLAMP:
            # Where the sum is below the limit the divisor is a constant.
            moves = norm >= EPS
            norm = tl.where(norm < EPS, EPS, norm)
        else:
            norm += EPS
        norm = tl.broadcast_to(norm[:, None], grad.shape)
        share = tl.div_rn(values, norm)
    if expert_scale is not None:
        flow = tl.where(used, grad * share, 0.0)
        sums = tl.zeros((BT, E_POW2), tl.float32)
        for step in tl.static_range(K):
            this = (j == step)[None, :]
            index = tl.sum(tl.where(this & used, chosen, 0), 1)
            value = tl.sum(tl.where(this, flow, 0.0), 1)
            sums += tl.where(e[None, :] == index[:, None], value[:, None], 0.0)
        tl.store(partial + tl.program_id(0).to(tl.int64) * E + e, tl.sum(sums, 0), mask=e < E)
        grad = grad * factor
    if RENORMALIZE:
        inner = tl.sum(grad * values, 1)
        if CLAMP:
            inner = tl.where(moves, inner, 0.0)
        grad = tl.div_rn(grad - tl.div_rn(tl.broadcast_to(inner[:, None], grad.shape), norm), norm)
    result = tl.zeros((BT, E_POW2), tl.float32)
    if SCORE == "sigmoid":
        grad = grad * values * (1.0 - values)
    elif SCORE == "softmax":
        inner = tl.sum(tl.where(used, grad * values, 0.0), 1)
        if everywhere:
            # Every expert's logit moves the denominator, not only those of the chosen ones.
            result = -scores * inner[:, None]
            grad = grad * values
        else:
            grad = values * (grad - inner[:, None])
    grad = tl.where(used, grad, 0.0)
    for step in tl.static_range(K):
        this = (j == step)[None, :]
        index = tl.sum(tl.where(this & used, chosen, 0), 1)
        value = tl.sum(tl.where(this, grad, 0.0), 1)
        result += tl.where(e[None, :] == index[:, None], value[:, None], 0.0)
    out = grad_logits + t64 * E + e[None, :]
    tl.store(out, result.to(grad_logits.dtype.element_ty), mask=whole)
