"""The policy that a variable of an engine's environment asks for."""

from __future__ import annotations

import os
from dataclasses import replace

from kvplan.cost.policy import BESIDE_COMPUTE, PATHS, Policy
from kvplan.errors import KVPlanError


def asked_policy(variable: str) -> Policy | None:
    """Return the policy beside compute whose path a variable names; None if it is empty, ``0`` or not set.

    Raises:
        KVPlanError: the variable has another value than these, ``auto`` and the names of paths.

    >>> asked_policy("KVPLAN_NOT_SET") is None
    True
    """
    asked = os.environ.get(variable, "")
    if asked in {"", "0"}:
        return None
    if asked not in {"auto", *PATHS}:
        raise KVPlanError(f"{variable} is {asked!r}; give 'auto' or a path: {', '.join(PATHS)}; or '0' to do nothing")
    return replace(BESIDE_COMPUTE, path=asked)
