"""Importing this module defines every operator torch.ops.moepdl.*, once."""

from moe_compiler.runtime_kernels.chain import beside as _beside  # noqa: F401
from moe_compiler.runtime_kernels.chain import op as _chain  # noqa: F401
from moe_compiler.runtime_kernels.combine import op as _combine  # noqa: F401
from moe_compiler.runtime_kernels.down import op as _down  # noqa: F401
from moe_compiler.runtime_kernels.exchange import gather as _gather  # noqa: F401
from moe_compiler.runtime_kernels.exchange import halves as _halves  # noqa: F401
from moe_compiler.runtime_kernels.exchange import op as _exchange  # noqa: F401
from moe_compiler.runtime_kernels.experts import op as _experts  # noqa: F401
from moe_compiler.runtime_kernels.gate_up import op as _gate_up  # noqa: F401
from moe_compiler.runtime_kernels.grad_act import op as _grad_act  # noqa: F401
from moe_compiler.runtime_kernels.grad_biases import op as _grad_biases  # noqa: F401
from moe_compiler.runtime_kernels.grad_input_weights import op as _grad_input_weights  # noqa: F401
from moe_compiler.runtime_kernels.grad_pairs import op as _grad_pairs  # noqa: F401
from moe_compiler.runtime_kernels.grad_weights import op as _grad_weights  # noqa: F401
from moe_compiler.runtime_kernels.order import op as _order  # noqa: F401
from moe_compiler.runtime_kernels.route import op as _route  # noqa: F401
from moe_compiler.runtime_kernels.router_logits import op as _router_logits  # noqa: F401
