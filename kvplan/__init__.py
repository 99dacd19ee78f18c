"""kvplan: a layout-aware KV-cache descriptor compiler.

Describe two layouts, compile the pair once, plan each transfer from block ids, and execute it at the link's speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplan.base import __version__
from kvplan.errors import (
    BlockIndexError,
    HostMemoryError,
    IncompatibleLayoutsError,
    KVPlanError,
    LayoutError,
    NotationError,
    OverlapError,
    PathError,
    TransferError,
)

if TYPE_CHECKING:
    from kvplan.agents.agent import Agent
    from kvplan.agents.peer import Peer
    from kvplan.cost.policy import Policy
    from kvplan.execute.executor import Executor
    from kvplan.execute.transfer import LayerwiseTransfer, Transfer, TransferResult
    from kvplan.layout.kvlayout import KVLayout
    from kvplan.layout.places import Place, locate
    from kvplan.memory.allocate import allocate
    from kvplan.plan.copy_program import CopyProgram, compile
    from kvplan.plan.descriptors import Descriptors, StridedRows
    from kvplan.plan.plan import Plan, join
    from kvplan.ranks.groups import Groups
    from kvplan.ranks.resharding import PairProgram, Resharding, reshard
    from kvplan.ranks.shards import Shard
    from kvplan.verification.verify import Verification, verify

__all__ = [
    "Agent",
    "BlockIndexError",
    "CopyProgram",
    "Descriptors",
    "Executor",
    "Groups",
    "HostMemoryError",
    "IncompatibleLayoutsError",
    "KVLayout",
    "KVPlanError",
    "LayerwiseTransfer",
    "LayoutError",
    "NotationError",
    "OverlapError",
    "PairProgram",
    "PathError",
    "Peer",
    "Place",
    "Plan",
    "Policy",
    "Resharding",
    "Shard",
    "StridedRows",
    "Transfer",
    "TransferError",
    "TransferResult",
    "Verification",
    "__version__",
    "allocate",
    "compile",
    "join",
    "locate",
    "reshard",
    "verify",
]

# Modules that are imported when their name is first used, so that `import kvplan` is fast.
_LATER = {
    "Agent": "kvplan.agents.agent",
    "CopyProgram": "kvplan.plan.copy_program",
    "Descriptors": "kvplan.plan.descriptors",
    "Executor": "kvplan.execute.executor",
    "Groups": "kvplan.ranks.groups",
    "KVLayout": "kvplan.layout.kvlayout",
    "LayerwiseTransfer": "kvplan.execute.transfer",
    "PairProgram": "kvplan.ranks.resharding",
    "Peer": "kvplan.agents.peer",
    "Place": "kvplan.layout.places",
    "Plan": "kvplan.plan.plan",
    "Policy": "kvplan.cost.policy",
    "Resharding": "kvplan.ranks.resharding",
    "Shard": "kvplan.ranks.shards",
    "StridedRows": "kvplan.plan.descriptors",
    "Transfer": "kvplan.execute.transfer",
    "TransferResult": "kvplan.execute.transfer",
    "Verification": "kvplan.verification.verify",
    "allocate": "kvplan.memory.allocate",
    "compile": "kvplan.plan.copy_program",
    "join": "kvplan.plan.plan",
    "locate": "kvplan.layout.places",
    "reshard": "kvplan.ranks.resharding",
    "verify": "kvplan.verification.verify",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'kvplan' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
