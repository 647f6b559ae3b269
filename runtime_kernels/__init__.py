"""Operators and device kernels, one operator a file or folder. Imports nothing of the compiler."""

if __name__ != "moe_compiler.runtime_kernels":
    raise ImportError(f"import 'moe_compiler.runtime_kernels', not {__name__!r}")
