"""Executors, which move the bytes of plans, and their transfers and statistics."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplan.cost.policy import PATHS, Policy
    from kvplan.execute.executor import Executor
    from kvplan.execute.stats import ExecutorStats, FlowStats, PathStats
    from kvplan.execute.transfer import Transfer, TransferResult

__all__ = ["PATHS", "Executor", "ExecutorStats", "FlowStats", "PathStats", "Policy", "Transfer", "TransferResult"]

_MODULES = {
    "PATHS": "kvplan.cost.policy",
    "Executor": "kvplan.execute.executor",
    "ExecutorStats": "kvplan.execute.stats",
    "FlowStats": "kvplan.execute.stats",
    "PathStats": "kvplan.execute.stats",
    "Policy": "kvplan.cost.policy",
    "Transfer": "kvplan.execute.transfer",
    "TransferResult": "kvplan.execute.transfer",
}


def __getattr__(name: str) -> Any:
    """Import a public name of this room on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
