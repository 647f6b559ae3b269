"""The MoE classes of the installed transformers, found by what their modeling files contain, and built small.

A class that holds experts has packed weights behind transformers' experts decorator, a list of expert modules, or a
name that says so. The model that is built for it is the smallest one of its file that runs it on token ids.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.sizes import INPUTS, SIZES, SPECIAL, token_ids

__all__ = ["Built", "Experts", "build", "expert_modules", "find_experts"]

# A model above this is not small: a size that has another name than those above kept its default.
LIMIT_MILLIONS = 20.0


@dataclass(frozen=True)
class Experts:
    """A class that holds experts: its modeling file, and whether the library can switch its implementation."""

    folder: str
    name: str
    packed: bool

    @property
    def module(self) -> str:
        return f"transformers.models.{self.folder}.modeling_{self.folder}"


@dataclass
class Built:
    """A small model, the arguments of a call, and where its class came from."""

    model: nn.Module
    inputs: dict[str, Any]
    name: str


def find_experts() -> list[Experts]:
    """Every class of the installed transformers that holds experts, in the order of their files."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    found: list[Experts] = []
    for path in sorted(folder.glob("*/modeling_*.py")):
        if path.name == f"modeling_{path.parent.name}.py":
            found += _experts_in(path)
    return found


def _experts_in(path: Path) -> list[Experts]:
    text = path.read_text(encoding="utf-8")
    if "xpert" not in text and "moe" not in text.lower():
        return []
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    packed = [c.name for c in classes if any("use_experts_implementation" in ast.unparse(d) for d in c.decorator_list)]
    if packed:
        return [Experts(path.parent.name, name, True) for name in packed]
    holders = [c.name for c in classes if _holds_experts(c)]
    # Of a list of experts and the block around it the list is named, as for packed experts.
    inner = [name for name in holders if "Experts" in name or "NaiveMoe" in name] or holders
    return [Experts(path.parent.name, name, False) for name in inner]


def _holds_experts(node: ast.ClassDef) -> bool:
    """Does the class make a list of expert modules, packed expert weights, or gather rows of an expert table?"""
    lists, parameters = False, False
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
            target, made = ast.unparse(part.targets[0]).lower(), ast.unparse(part.value.func)
            of_experts = "expert" in target or "expert" in ast.unparse(part.value).lower()
            lists |= made in ("nn.ModuleList", "nn.ModuleDict") and "expert" in target
            lists |= made == "nn.Embedding" and of_experts
            parameters |= made == "nn.Parameter" and of_experts
    bases = {ast.unparse(base) for base in node.bases}
    model = any(base.endswith("PreTrainedModel") for base in bases)
    return not model and (
        lists
        or (parameters and "xpert" in node.name)
        or (bool(bases & {"nn.ModuleList", "nn.ModuleDict"}) and ("xpert" in node.name or "Moe" in node.name))
    )


def _candidates(module: Any) -> Iterator[type]:
    """The models of a file, those that need the least and run the most first."""
    from transformers import PreTrainedModel

    models = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
    ]
    for ending in ("ForCausalLM", "TextModel", "TalkerModel", "Model", "ForConditionalGeneration", "Backbone", ""):
        for model in models:
            skipped = ("PreTrainedModel", "VisionModel", "AudioModel", "MTPModel")
            if model.__name__.endswith(ending) and not model.__name__.endswith(skipped):
                yield model


def small_config(cls: Any, special: dict[str, Any]) -> Any:
    """A configuration of this class with SIZES and what is special to it."""
    names = {field.name: field.default for field in dataclasses.fields(cls)}
    mapped = dict(getattr(cls, "attribute_map", {}))
    wanted: dict[str, Any] = {}
    for name, value in SIZES.items():
        target = mapped.get(name, name)
        if target in names and not (name == "topk_group" and names[target] in (1, None)):
            wanted.setdefault(target, value)
    if isinstance(names.get("n_group"), int) and names["n_group"] > 1:
        wanted.update(n_group=4, topk_group=2)
    if "kv_lora_rank" in names and "num_key_value_heads" in wanted:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    wanted.update(special)
    return cls(**wanted)


def build(experts: Experts) -> Built:
    """A small model that runs these experts. Raises what the last candidate raised when none can be built."""
    module = importlib.import_module(experts.module)
    holder = getattr(module, experts.name)
    special = dict(SPECIAL.get(experts.name, SPECIAL.get(experts.folder, {})))
    wanted, inputs = special.pop("class", None), special.pop("inputs", None)
    special.pop("counted", None)
    error: Exception = LookupError(f"no model of {experts.module} holds {experts.name}")
    for cls in dict.fromkeys(_candidates(module)):
        if (wanted is not None and cls.__name__ != wanted) or cls.config_class is None:
            continue
        try:
            config = small_config(cls.config_class, special)
            with torch.device("meta"):
                trial = cls(config)
            held = any(isinstance(part, holder) for part in trial.modules())
            millions = sum(parameter.numel() for parameter in trial.parameters()) / 1e6
            if held and millions > LIMIT_MILLIONS:
                raise ValueError(f"{cls.__name__} has {millions:.0f} million parameters with the small sizes")
            torch.manual_seed(0)
            model = cls(config).eval() if held else None
        except Exception as failure:
            if isinstance(error, LookupError):
                error = failure
            continue
        if model is not None:
            _spread(model)
            return Built(model, INPUTS[inputs](config) if inputs is not None else token_ids(config), cls.__name__)
    raise error


def _spread(model: nn.Module) -> None:
    """Weights of unit gain, and biases of the choice that differ, so that every expert's rows show in the result."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if "bias" in name.rpartition(".")[2] and buffer.is_floating_point():
                buffer.normal_(std=0.1, generator=generator)


def expert_modules(model: nn.Module, experts: Experts) -> list[str]:
    """The paths of the modules that hold these experts."""
    name = SPECIAL.get(experts.folder, {}).get("counted", experts.name)
    holder = getattr(importlib.import_module(experts.module), name)
    return [name for name, part in model.named_modules() if isinstance(part, holder)]
