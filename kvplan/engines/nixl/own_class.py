"""NIXL's own class of agents, which the switch may have replaced."""

from __future__ import annotations

import importlib
from typing import Any

from kvplan.errors import PathError

MODULE, CLASS = "nixl._api", "nixl_agent"
replaced: list[Any] = []  # the class that the switch has replaced


def agent_class() -> Any:
    """Return NIXL's own class of agents.

    Raises:
        PathError: NIXL is not installed.
    """
    if not replaced:
        try:
            module = importlib.import_module(MODULE)
        except ImportError as error:
            raise PathError(f"this agent needs NIXL: pip install nixl ({error})") from error
        if not replaced:  # the import may have switched kvplan's agent on
            return getattr(module, CLASS)
    return replaced[-1]
