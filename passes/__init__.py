"""Graph passes, one rewrite a file. The order they run in is `moe_compiler.pipeline.PIPELINE`."""

if __name__ != "moe_compiler.passes":
    raise ImportError(f"import 'moe_compiler.passes', not {__name__!r}")
