"""The seam to Inductor: our phase after autograd as a pass that takes part in its cache key, and the stored report.

Inductor calls one pass where users may put theirs; ours does its own work and then runs the user's passes, so nothing
is overwritten. On a cache hit no pass runs, but the user is still told what the loaded code does: what the pass
reported is stored beside Inductor's caches under a key made of the graph, its inputs, the options and our sources.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compiler import torch_private
from moe_compiler.device import describe
from moe_compiler.edge_gain import table_digest
from moe_compiler.options import Options
from moe_compiler.recompute import keep_choices
from moe_compiler.tuning.tile_table import tiles_digest

__all__ = ["JOINT", "POST_GRAD", "ReportStore", "is_backward", "joint_pass", "post_grad_pass", "source_hash"]


# Inductor's names for where a user's passes, and ours, go: ahead of the partition into forward and backward, after it.
JOINT = "joint_custom_pre_pass"
POST_GRAD = "post_grad_custom_pre_pass"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """A hash over the sources that decide what code is generated."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for folder in (root, root / "passes", root / "runtime_kernels"):
        for path in sorted(folder.resolve().rglob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def device_key() -> str:
    """What a plan depends on of this machine: versions, the device, and what was predicted and measured for it."""
    known = {key: value for key, value in describe().items() if key != "cpu_threads"}
    return json.dumps({**known, "measured": table_digest(), "tiles": tiles_digest()}, sort_keys=True)


def is_backward(graph: Graph) -> bool:
    """Is this the backward graph of a training step? AOTAutograd names its incoming gradients `tangents_*`."""
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def post_grad_pass(run: Callable[[GraphModule], None], options: Options) -> Any:
    """The object for Inductor's `post_grad_custom_pre_pass`: `run` on each graph, then the user's own passes.

    The user's are those of options["inductor"], else those of Inductor's configuration.
    """
    return _composed(POST_GRAD, run, options)


def joint_pass(options: Options) -> Any:
    """The object for Inductor's `joint_custom_pre_pass`: `keep_choices`, then the user's own passes."""
    return _composed(JOINT, lambda module: keep_choices(module.graph), options)


def _composed(place: str, run: Callable[[GraphModule], object], options: Options) -> Any:
    theirs = torch_private.passes_of(options.inductor.get(place, torch_private.configured(place)))
    base: Any = torch_private.graph_pass_base()
    aware: Any = torch_private.inference_aware_pass_base()

    class MoepdlPass(aware or base):  # type: ignore[misc]
        """What moepdl does at this place, then the passes that the user had put here."""

        def __call__(self, graph: Graph, is_inference: bool = False) -> None:
            module = graph.owning_module
            assert module is not None
            run(module)
            for own in theirs:
                told = {"is_inference": is_inference} if aware is not None and isinstance(own, aware) else {}
                own(module.graph, **told)

        def uuid(self) -> Any:
            keys = [own.uuid() if isinstance(own, base) else None for own in theirs]
            if not all(keys):
                return None
            device = device_key()
            # A dump shows the graph of every pass, so code that was compiled without one is compiled again.
            dumped = options.dump is not None
            return ("moepdl", source_hash(), options.cache_key(), dumped, device, tuple(map(str, keys)))

    return MoepdlPass()


def _input_text(place: Node, value: Any) -> str:
    """An input as Inductor keys it: sizes that may change by their symbols, not by what they are this time."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shown = place.meta.get("val", value)
    sizes = (*map(str, shown.shape), "/", *map(str, shown.stride()))
    return f"{value.dtype} {' '.join(sizes)} {value.device} {value.requires_grad}"


class ReportStore:
    """What phase B reported about one graph, kept on disk under the key of that graph."""

    def __init__(self, module: GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
        digest = hashlib.sha256()
        digest.update(module.print_readable(print_output=False).encode())
        places = module.graph.find_nodes(op="placeholder")
        digest.update("\n".join(map(_input_text, places, example_inputs)).encode())
        digest.update(f"{options.cache_key()} {options.dump is not None} {device_key()}".encode())
        digest.update(source_hash().encode())
        digest.update(repr(torch.is_grad_enabled()).encode())
        self.key = digest.hexdigest()[:32]

    def _path(self, phase: str) -> Path:
        return Path(torch_private.code_cache_dir()) / "moepdl" / f"{self.key}-{phase}.json"

    def save(self, phase: str, data: dict[str, Any]) -> None:
        """Store the part of a report that `phase` made; a folder that cannot be written is no error."""
        path = self._path(phase)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(data))
            temporary.replace(path)
        except OSError:
            return

    def load(self, phase: str) -> dict[str, Any] | None:
        """The stored part, None when there is none."""
        try:
            return json.loads(self._path(phase).read_text())
        except (OSError, ValueError):
            return None
