"""`prepare(model)`: put a form that becomes one graph in the place of MoE code that cannot.

Loops over the experts that were hit, loops that branch on how many rows an expert got, `moe_infer` with counts in
numpy, rows assigned by a boolean mask: Dynamo breaks them, and no compiler sees a block. For each module that has
experts and is not captured whole, its own source says where the loop is, and a run on probe inputs which of its values
are tokens, ids and weights. The loop is replaced on that one module instance, or the library's own setting switched
(transformers 5: `experts_implementation`). The result must agree with the original, gradients included, and become one
graph; else the original is put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moe_compiler.errors import PrepareError
from moe_compiler.preparation import one_graph, probe
from moe_compiler.preparation.change import Change
from moe_compiler.preparation.expert_dispatch import Holding, holding
from moe_compiler.preparation.experts_setting import setting_of, switched_settings
from moe_compiler.preparation.loop_replacement import Block, Known, is_prepared
from moe_compiler.preparation.module_state import exchange, state_kept
from moe_compiler.preparation.probe import Call

__all__ = ["Change", "prepare"]


def prepare(model: nn.Module, *args: Any, **kwargs: Any) -> list[Change]:
    """Make the MoE blocks of `model` capturable, in place, and return what was changed: [] when nothing had to be.

    args, kwargs: inputs of the model. It is called with them once, without gradients, and every block is compared on
    what it got; without them the inputs are made from the blocks' own sizes. Whatever runs here leaves parameters,
    buffers, attributes and random state as they were.

    The modules are changed for the mode they are in; in the other mode (training, evaluation) the original runs, unless
    it agrees there too. A block whose experts are a list of modules compiles with `fullgraph=True`. Experts without a
    token get a gradient of zeros where the original left None.

    What was compiled before in this process is compiled again at its next call (`torch.compiler.reset()`), if anything
    was changed: Dynamo keeps the pieces of a frame that it once broke.

    Raises PrepareError, with nothing changed, when a block cannot be prepared: it draws random numbers in this mode
    (dropout, jitter: call `model.eval()`), its source cannot be read, or no form agrees with it.
    """
    names = {name: module for name, module in model.named_modules() if _may_hold_experts(module)}
    calls = _own_calls(model, names, args, kwargs) if args or kwargs else {}
    changes: list[Change] = []
    try:
        changes += switched_settings(names, calls)
        recipes: Known = {}
        verdicts: dict[Any, one_graph.Verdict] = {}
        for name in sorted(names, key=lambda name: -name.count(".") if name else 1):
            module = names[name]
            held = holding(module)
            if held is None or setting_of(module) is not None or is_prepared(module):
                continue
            tests = _tests(model, name, module, held, calls)
            block = Block(name, module, held, tests)
            if not tests and not calls and block.methods():
                raise PrepareError(
                    f"no inputs could be made for {name or 'the model'} ({type(module).__name__})",
                    why="its forward takes neither x nor x, ids and weights of its own sizes",
                    try_="moe_compiler.prepare(model, *args) with inputs of the model",
                )
            if not tests or not (block.chooses() or block.is_hidden()):
                continue
            # Equal layers are asked once.
            key = block.key()
            if key not in verdicts:
                verdicts[key] = one_graph.verdict(module, tests[0])
            change = block.prepared(verdicts[key], recipes)
            if change is not None:
                changes.append(change)
    except BaseException:
        for change in reversed(changes):
            change.undo()
        raise
    if changes:
        torch.compiler.reset()
    return changes


def _may_hold_experts(module: nn.Module) -> bool:
    written = type(module).forward is not nn.Module.forward
    return written and (setting_of(module) is not None or holding(module) is not None)


# Inputs


def _own_calls(
    model: nn.Module, modules: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Call]:
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with (
        probe.captured_calls(modules) as calls,
        torch.random.fork_rng(devices),
        torch.no_grad(),
        state_kept(model),
    ):
        exchange(model, {id(value): value.detach().clone() for value in model.buffers()})
        model(*args, **kwargs)
    return calls


def _tests(model: nn.Module, name: str, module: nn.Module, held: Holding, calls: dict[str, Call]) -> list[Call]:
    """Calls to compare a module on: the model's own, and a larger one; else one that is made and that it takes.

    Another one has a single token, so that most experts have none.
    """
    found = [calls[name]] if name in calls else []
    if found:
        others = (probe.larger(found[0], held.count), probe.one_token(found[0]))
        return found + [other for other in others if other is not None and probe.runs(module, other)]
    widths = [width for width in (held.width, *probe.widths(module)) if width]
    for made in probe.made_calls(module, list(dict.fromkeys(widths)), held.count):
        if probe.runs(module, made):
            one = probe.one_token(made)
            return [made] + ([one] if one is not None and probe.runs(module, one) else [])
    # Experts whose arguments are not the usual ones: ask the module around them.
    parent = name.rpartition(".")[0]
    around = model.get_submodule(parent) if name else None
    if around is not None and around is not model:
        for made in probe.made_calls(around, list(dict.fromkeys(widths)), held.count):
            with probe.captured_calls({name: module}) as seen:
                ran = probe.runs(around, made)
            if ran and name in seen:
                return [seen[name]]
    return []
