"""Device times of a chain in several ways of launching it, in turns. Needs a CUDA device.

Each way is one CUDA graph of a few calls on different inputs, so that no call finds its activations in the cache. A
chain's first launch is a plain one, which keeps the calls of a graph from overlapping. The ways take turns, and each
round starts with another one, so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moe_compiler import torch_private
from moe_compiler.chain_operands import NoSample, are_weights, sample_operands
from moe_compiler.chain_runs import light_graph
from moe_compiler.launch import Chain

__all__ = ["interleaved_us", "times_us"]

ROUNDS = 40
# Tokens from which on one input is enough: its activations fill the cache.
_MANY = 2048
_CALLS = 4


def times_us(chain: Chain, tokens: int, texts: Mapping[str, str]) -> dict[str, list[float]]:
    """Microseconds a call for T tokens of each program of `texts`, one value a round, in the same rounds.

    Raises NoSample when the operands cannot be made up, or do not fit into the device's free memory.
    """
    if torch.cuda.is_current_stream_capturing():
        raise NoSample("a CUDA graph is being captured")
    with torch_private.real_tensors(), torch.no_grad():
        try:
            return _times_us(chain, tokens, texts)
        except torch.OutOfMemoryError as error:
            raise NoSample("the operands do not fit into the device's free memory") from error
        finally:
            torch.cuda.empty_cache()


def _times_us(chain: Chain, tokens: int, texts: Mapping[str, str]) -> dict[str, list[float]]:
    runs = [sample_operands(chain, tokens, "cuda")]
    weights = are_weights(chain.program)
    for _ in range(0 if tokens >= _MANY else _CALLS - 1):
        runs.append([t if weight else t.clone() for t, weight in zip(runs[0], weights, strict=True)])
    return interleaved_us(runs, texts)


def interleaved_us(
    runs: list[list[torch.Tensor]], texts: Mapping[str, str], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Microseconds a call of each program of `texts` on these operands of one T each, one value a round."""
    graphs = {way: _captured(runs, text) for way, text in texts.items()}
    names = list(graphs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3 / len(runs))
    return samples


def _captured(runs: list[list[torch.Tensor]], text: str) -> torch.cuda.CUDAGraph:
    """The graph of one call on each input. The first calls compile, and note what later ones repeat (see `bound`)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for tensors in runs:
                torch.ops.moepdl.chain(tensors, text)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return light_graph(lambda: [torch.ops.moepdl.chain(tensors, text) for tensors in runs])
