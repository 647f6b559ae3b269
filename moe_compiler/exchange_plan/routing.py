"""How often each expert is chosen, and how likely a token is to have an expert on a rank.

A token's k experts are a set S that is drawn with a probability proportional to the product of its experts' weights.
With equal weights every set is as likely as any other, so what is said of uniform routing is exact; otherwise it is
the distribution that assumes nothing but how often each expert is chosen. (X.-H. Chen, A. P. Dempster and J. S. Liu,
"Weighted finite population sampling to maximize entropy", 1994, whose fixed point finds the weights.)

All sums are elementary symmetric polynomials, made of positive terms only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_compiler.errors import UsageError

__all__ = ["Routing", "from_counts", "routing_of", "uniform", "zipf"]

# How close the chances of the fixed point come to those that were asked for, and after how many rounds it must.
_CLOSE, _ROUNDS = 1e-6, 2000
# No expert is chosen by more than this share of the tokens, nor by less: a set needs k experts that can be drawn.
_MOST, _LEAST = 0.999999, 1e-9


@dataclass(frozen=True)
class Routing:
    """k experts a token; weights: of each expert, float64 [E]; name: "uniform", "zipf" or the file."""

    name: str
    k: int
    weights: Tensor

    @property
    def experts(self) -> int:
        """E."""
        return self.weights.numel()

    def chances(self) -> Tensor:
        """Of each expert, how likely a token is to choose it, [E]; the sum is k."""
        return _chances(self.weights, self.k)

    def reach(self, owner: Tensor, ranks: int) -> Tensor:
        """Of each rank, how likely a token is to have at least one expert there, [ranks]. owner: rank of an expert."""
        elsewhere = _without(self.weights, self.k, owner, ranks)[:, self.k]
        whole = _polynomials(self.weights, self.k)[self.k]
        return (1.0 - elsewhere / whole).clamp(0.0, 1.0)


def uniform(experts: int, k: int) -> Routing:
    """Every expert equally often."""
    return Routing("uniform", k, torch.ones(experts, dtype=torch.float64))


def zipf(experts: int, k: int) -> Routing:
    """The weight of expert e is 1 / (e + 1): the first ones are hot, and under contiguous placement on one rank."""
    return Routing("zipf", k, 1.0 / torch.arange(1, experts + 1, dtype=torch.float64))


def from_counts(name: str, counts: Sequence[float], k: int) -> Routing:
    """The routing in which expert e is chosen in proportion to counts[e]; by every token at most.

    Raises ValueError for counts that fewer than k experts have, that are negative, or of which one is no number.
    """
    given = torch.tensor(list(counts), dtype=torch.float64)
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()):
        raise ValueError("a count is negative or not a number")
    if int((given > 0).sum()) < k:
        raise ValueError(f"{int((given > 0).sum())} experts have a count, and a token chooses {k}")
    wanted = _capped(given, k)
    if bool(torch.allclose(wanted, wanted[:1].expand_as(wanted), rtol=1e-12, atol=0.0)):
        return Routing(name, k, torch.ones_like(wanted))
    weights = wanted / (1 - wanted)
    for _ in range(_ROUNDS):
        found = _chances(weights, k)
        if float((found - wanted).abs().max()) < _CLOSE:
            break
        weights = weights * wanted / found
        weights = weights / weights.log().mean().exp()
    return Routing(name, k, weights)


def _capped(counts: Tensor, k: int) -> Tensor:
    """Chances in proportion to the counts that sum to k, none above one: what is above is shared by the others."""
    chances = torch.zeros_like(counts)
    full = torch.zeros_like(counts, dtype=torch.bool)
    for _ in range(counts.numel()):
        left = k - _MOST * int(full.sum())
        chances = torch.where(full, _MOST, counts * left / counts[~full].sum().clamp(min=1e-300))
        over = (chances > _MOST) & ~full
        if not bool(over.any()):
            break
        full |= over
    return chances.clamp(min=_LEAST)


def routing_of(text: str, experts: int, k: int) -> Routing:
    """The routing called `text`: uniform, zipf, or a JSON file with a list of E counts. Raises UsageError."""
    if text in ("uniform", "zipf"):
        return uniform(experts, k) if text == "uniform" else zipf(experts, k)
    path = Path(text)
    form = f"a JSON list of {experts} numbers, how often each expert was chosen"
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--skew {text!r} is neither uniform nor zipf, and no file that can be read ({error.strerror})",
            why=f"a file holds {form}",
            try_="--skew zipf",
        ) from error
    except ValueError as error:
        raise UsageError(f"--skew {text}: not JSON: {error}", why=f"the file holds {form}") from error
    plain = isinstance(counts, list) and all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in counts
    )
    if not plain or len(counts) != experts:
        held = f"{len(counts)} entries" if isinstance(counts, list) else type(counts).__name__
        raise UsageError(
            f"--skew {text}: {held}, not {experts} numbers",
            why=f"the file holds {form}",
            try_="tokens_per_expert.tolist() of one layer, written with json.dump",
        )
    try:
        return from_counts(path.name, counts, k)
    except ValueError as error:
        raise UsageError(
            f"--skew {text}: {error}", why="every token chooses k different experts", try_="counts of more tokens"
        ) from error


def _polynomials(weights: Tensor, k: int) -> Tensor:
    """Elementary symmetric polynomials of degree 0 to k, [k + 1]."""
    return _without(weights, k, torch.zeros(weights.numel(), dtype=torch.int64), 2)[1]


def _without(weights: Tensor, k: int, owner: Tensor, groups: int) -> Tensor:
    """Of each group, the polynomials of the weights that are not its own, [groups, k + 1].

    Expert by expert for all groups at once, so that nothing is subtracted or divided.
    """
    found = torch.zeros(groups, k + 1, dtype=torch.float64)
    found[:, 0] = 1.0
    values, owners = weights.tolist(), owner.tolist()
    for weight, own in zip(values, owners, strict=True):
        kept = found[own].clone()
        found[:, 1:] = found[:, 1:] + weight * found[:, :-1]
        found[own] = kept
    return found


def _chances(weights: Tensor, k: int) -> Tensor:
    """How likely each expert is to be in a set of k."""
    experts = weights.numel()
    without = _without(weights, k, torch.arange(experts), experts)
    return weights * without[:, k - 1] / _polynomials(weights, k)[k]
