"""Pictures of a compile: DOT, Mermaid, timelines and the HTML report. Reads only a Report and a DAG."""

if __name__ != "moe_compiler.viz":
    raise ImportError(f"import 'moe_compiler.viz', not {__name__!r}")
