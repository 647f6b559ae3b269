"""Logs: names that `TORCH_LOGS` understands, and what is said when a compilation ends.

`autoload` is the entry point of the group `torch.backends`: torch calls it at the end of `import torch`, just before it
reads `TORCH_LOGS`, so `TORCH_LOGS=moepdl` works without importing anything of ours. An exception there would abort
`import torch` for everybody, hence it raises nothing and imports nothing heavy.

    TORCH_LOGS=moepdl            the report of each compilation, a few lines
    TORCH_LOGS=moepdl_match      blocks with their sizes and attributes, near misses
    TORCH_LOGS=moepdl_graph      the graph after each pass that changed it
    TORCH_LOGS=moepdl_schedule   the launches of each chain with their predicted times

Registration is a private corner of torch and lives in this file alone; a test holds it against the installed torch.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_compiler.report import Report

__all__ = ["artifact", "autoload", "emit", "log"]

LOG_NAME = "moepdl"
LOGGER = "moe_compiler"
# name -> (what TORCH_LOGS=help says, visible in the short help). Over 30 characters a name breaks that help.
ARTIFACTS = {
    "moepdl_match": ("MoE blocks that moepdl recognised, and near misses with the step that failed", True),
    "moepdl_graph": ("The graph after each moepdl pass that changed it", False),
    "moepdl_schedule": ("The kernel launches of each moepdl chain with their predicted times", False),
}


def autoload() -> None:
    """Register our log and artifacts with torch. Never raises; may be called any number of times."""
    with contextlib.suppress(Exception):
        _register()


def _register() -> None:
    from torch._logging._internal import log_registry, register_artifact, register_log

    if LOG_NAME not in log_registry.log_alias_to_log_qnames:
        register_log(LOG_NAME, LOGGER)
    for name, (description, visible) in ARTIFACTS.items():
        if not log_registry.is_artifact(name):
            register_artifact(name, description, visible=visible, off_by_default=True)


def log() -> logging.Logger:
    """The logger behind `TORCH_LOGS=moepdl`."""
    return logging.getLogger(LOGGER)


def artifact(name: str) -> logging.Logger:
    """The logger of one artifact; log to it at level DEBUG.

    Where torch has no such registry any more, an ordinary child logger. Raises KeyError for a name not in ARTIFACTS.
    """
    if name not in ARTIFACTS:
        raise KeyError(name)
    try:
        from torch._logging import getArtifactLogger

        _register()  # torch older than the entry point, or started with TORCH_DEVICE_BACKEND_AUTOLOAD=0
        return getArtifactLogger(LOGGER, name)
    except (ImportError, AttributeError):
        return logging.getLogger(f"{LOGGER}.{name}")


def emit(report: Report) -> None:
    """Say what a compilation did: a summary at INFO where there is anything to tell, artifacts, and torch's trace.

    A failure in here never fails the compilation; it is logged at DEBUG.
    """
    try:
        _emit(report)
    except Exception:
        log().debug("the report of frame %s could not be logged", report.frame, exc_info=True)


def _emit(report: Report) -> None:
    from moe_compiler.report import match_lines, miss_lines
    from moe_compiler.torch_private import trace_artifact
    from moe_compiler.viz.timeline import schedule_text

    something = report.matches or report.misses or report.fragments or report.errors or report.notes
    log().log(logging.INFO if something else logging.DEBUG, "%s", report)

    found = artifact("moepdl_match")
    if found.isEnabledFor(logging.DEBUG):
        for match in report.folded_matches():
            found.debug("%s", "\n".join(match_lines(match)))
        for miss in report.folded_misses():
            found.debug("%s", "\n".join(miss_lines(miss)))
    graphs = artifact("moepdl_graph")
    if graphs.isEnabledFor(logging.DEBUG):
        for graph in report.graphs:
            graphs.debug("%s after %s\n%s", graph.phase, graph.name, graph.code)
    schedule = artifact("moepdl_schedule")
    if report.schedule and schedule.isEnabledFor(logging.DEBUG):
        schedule.debug("%s", schedule_text(report))

    trace_artifact("moepdl_report", "json", report.to_json)
    trace_artifact("moepdl_report_text", "string", lambda: str(report))
