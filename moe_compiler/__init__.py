"""moepdl: a torch.compile backend that runs Mixture-of-Experts blocks as chains of kernels.

`torch.compile(model, backend="moepdl")` needs no import of this package. What it did can be read back with
`last_reports()`; what it would do, with `explain(model, *args)`. Importing the package is cheap: each name below is
loaded at its first use, so `import moe_compiler` imports neither torch nor triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_compiler import errors as errors
    from moe_compiler import testing as testing
    from moe_compiler.backend import explain as explain
    from moe_compiler.backend import last_reports as last_reports
    from moe_compiler.preparation.prepare import Change as Change
    from moe_compiler.preparation.prepare import prepare as prepare
    from moe_compiler.report import Report as Report
    from moe_compiler.sharding import Sharded as Sharded
    from moe_compiler.sharding import expert_parallel as expert_parallel
    from moe_compiler.sharding import full_state_dict as full_state_dict

__version__ = "0.1.0"
__all__ = [
    "Change",
    "Report",
    "Sharded",
    "__version__",
    "errors",
    "expert_parallel",
    "explain",
    "full_state_dict",
    "last_reports",
    "prepare",
    "testing",
]

_WHERE = {
    "Change": "moe_compiler.preparation.prepare",
    "Report": "moe_compiler.report",
    "Sharded": "moe_compiler.sharding",
    "expert_parallel": "moe_compiler.sharding",
    "explain": "moe_compiler.backend",
    "full_state_dict": "moe_compiler.sharding",
    "last_reports": "moe_compiler.backend",
    "prepare": "moe_compiler.preparation.prepare",
}
_MODULES = ("errors", "testing")


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
