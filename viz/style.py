"""The style sheet of the HTML report. Every rule is under `.moepdl`, so that a notebook around a report stays as it is.

Colours repeat what a word, a sign, a hatch or a dash already says. Light and dark follow the reader's system.
"""

from __future__ import annotations

__all__ = ["CSS", "PAGE_CSS"]

# Only for the stand-alone page.
PAGE_CSS = """
html { background: #ffffff; color-scheme: light dark; }
body { margin: 0; }
@media (prefers-color-scheme: dark) { html { background: #10141a; } }
"""

_LIGHT = """
  --bg: #ffffff; --panel: #f6f8fa; --raised: #ffffff; --line: #d5dbe1; --grid: #e6eaee;
  --ink: #1b2027; --muted: #57606a; --accent: #0b5fc1; --accent-soft: #dcebfd;
  --ok: #176f35; --ok-soft: #e0f4e5; --warn: #855600; --warn-soft: #fdf1d3; --bad: #b3261e; --bad-soft: #fce4e2;
  --bar: #cfe2fb; --bar-line: #4a86cf; --bar2: #dcd6f7; --bar2-line: #7b68c8; --edge: #6b7682;
  --box: #ffffff; --box-line: #8a96a3;
"""
_DARK = """
  --bg: #10141a; --panel: #171d25; --raised: #1d242e; --line: #323c49; --grid: #262e39;
  --ink: #e7ebf0; --muted: #a0abb8; --accent: #79b4ff; --accent-soft: #17304f;
  --ok: #63cf85; --ok-soft: #12301c; --warn: #e8b849; --warn-soft: #362a0c; --bad: #ff8d84; --bad-soft: #401714;
  --bar: #1f4373; --bar-line: #6aa5ee; --bar2: #3a3168; --bar2-line: #a595f0; --edge: #93a0ae;
  --box: #1d242e; --box-line: #76828f;
"""

CSS = (
    f".moepdl {{ {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ .moepdl {{ {_DARK} }} }}\n"
    """
.moepdl { box-sizing: border-box; max-width: 1120px; margin: 0 auto; padding: 28px 24px 64px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.moepdl *, .moepdl *::before { box-sizing: border-box; }
.moepdl h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
.moepdl h2 { font-size: 19px; line-height: 1.3; margin: 40px 0 12px; }
.moepdl h3 { font-size: 15px; margin: 0; }
.moepdl p { margin: 6px 0; }
.moepdl a { color: var(--accent); }
.moepdl code, .moepdl pre, .moepdl .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; font-size: 0.87em; }
.moepdl code { overflow-wrap: anywhere; }
.moepdl .muted { color: var(--muted); }
.moepdl header { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px; }
.moepdl .badge { display: inline-flex; align-items: center; gap: 6px; padding: 2px 11px; border-radius: 999px;
  border: 1px solid currentColor; font-weight: 600; font-size: 13px; white-space: nowrap; }
.moepdl .ok { color: var(--ok); background: var(--ok-soft); }
.moepdl .warn { color: var(--warn); background: var(--warn-soft); }
.moepdl .bad { color: var(--bad); background: var(--bad-soft); }
.moepdl .tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 20px 0 6px; padding: 0; list-style: none; }
.moepdl .tiles li { margin: 0; padding: 12px 14px; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
.moepdl .tiles b { display: block; font-size: 24px; line-height: 1.15; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.moepdl .tiles span { color: var(--muted); font-size: 13px; }
.moepdl nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; }
.moepdl .card { margin: 10px 0; padding: 14px 16px; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
.moepdl .card.note { border-left: 4px solid var(--accent); }
.moepdl .card.miss { border-left: 4px solid var(--warn); }
.moepdl .card.error { border-left: 4px solid var(--bad); }
.moepdl .head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 10px; }
.moepdl .times { font-weight: 600; color: var(--accent); }
.moepdl .chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 8px 0 0; padding: 0; list-style: none; }
.moepdl .chips li { margin: 0; padding: 1px 9px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--raised); font-size: 13px; }
.moepdl .where { display: block; margin: 8px 0 0; padding: 6px 10px; background: var(--raised);
  border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.moepdl .where .file { color: var(--muted); }
.moepdl .steps { letter-spacing: 2px; color: var(--warn); }
.moepdl .scroll { overflow-x: auto; }
.moepdl table { border-collapse: collapse; width: 100%; font-size: 14px; }
.moepdl th { text-align: left; font-weight: 600; color: var(--muted); font-size: 13px; }
.moepdl th, .moepdl td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
.moepdl td.number, .moepdl th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.moepdl td.name code { white-space: nowrap; overflow-wrap: normal; }
.moepdl tr.idle td { color: var(--muted); }
.moepdl .delta { display: inline-block; margin: 0 8px 0 0; white-space: nowrap; }
.moepdl .delta.plus { color: var(--ok); } .moepdl .delta.minus { color: var(--bad); }
.moepdl details { margin: 8px 0; }
.moepdl details > summary { cursor: pointer; padding: 3px 0; }
.moepdl details > summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.moepdl details.block { border: 1px solid var(--line); border-radius: 8px; padding: 4px 14px;
  background: var(--panel); }
.moepdl pre { margin: 8px 0; padding: 12px; overflow: auto; max-height: 520px; background: var(--raised);
  color: var(--ink); border: 1px solid var(--line); border-radius: 6px; line-height: 1.45; tab-size: 4; }
.moepdl pre .plus { background: var(--ok-soft); display: block; }
.moepdl pre .minus { background: var(--bad-soft); display: block; }
.moepdl figure { margin: 10px 0 18px; padding: 14px 16px; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
.moepdl figcaption { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: baseline; margin: 0 0 10px; }
.moepdl svg { display: block; max-width: none; }
.moepdl svg text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif; }
.moepdl svg .small { font-size: 11px; fill: var(--muted); }
.moepdl svg .strong { font-weight: 600; }
.moepdl svg .band { fill: var(--raised); stroke: var(--line); }
.moepdl svg .grid { stroke: var(--grid); stroke-width: 1; }
.moepdl svg .bar { fill: var(--bar); stroke: var(--bar-line); }
.moepdl svg .bar.other { fill: var(--bar2); stroke: var(--bar2-line); }
.moepdl svg .hatch { stroke: var(--ink); stroke-width: 1.4; opacity: 0.7; fill: none; }
.moepdl svg .early { stroke: var(--bar-line); }
.moepdl svg .line { fill: none; stroke: var(--edge); stroke-width: 1.3; }
.moepdl svg .line.pdl { stroke: var(--accent); stroke-width: 2.6; }
.moepdl svg .line.data { stroke-dasharray: 5 4; }
.moepdl svg .tip { fill: var(--edge); } .moepdl svg .tip.pdl { fill: var(--accent); }
.moepdl svg .mark { fill: var(--accent); font-size: 10.5px; font-weight: 700; paint-order: stroke;
  stroke: var(--panel); stroke-width: 4px; stroke-linejoin: round; }
.moepdl svg .box { fill: var(--box); stroke: var(--box-line); stroke-width: 1.2; }
.moepdl svg .box.exchange { fill: var(--warn-soft); stroke: var(--warn); }
.moepdl svg .box.end { fill: var(--panel); stroke-dasharray: 2 3; }
.moepdl .legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; color: var(--muted); margin: 4px 0 0;
  padding: 0; list-style: none; }
.moepdl .legend li { display: flex; align-items: center; gap: 7px; margin: 0; }
@media (max-width: 640px) { .moepdl { padding: 18px 14px 48px; } }
@media print { .moepdl pre { max-height: none; } .moepdl nav { display: none; } }
"""
)
