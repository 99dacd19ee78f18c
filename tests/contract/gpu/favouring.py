"""Profiles by which ``auto`` takes one path."""

from __future__ import annotations

from dataclasses import replace

from kvplan.cost.profile import GPU_ROUTES, TERMS, DeviceProfile, PathCosts, default, route_paths


def favouring(path: str) -> DeviceProfile:
    """A profile in which one path costs next to nothing and the others the same as one another, much."""
    costs = {}
    for name, terms in TERMS.items():
        nothing = dict.fromkeys(terms, 0.0)
        each = nothing | {"fixed": 1.0 if name == path else 1e9}
        costs[name] = PathCosts(each, each, nothing if name == "kernel" else {})
    return replace(default(), costs={way: {path: costs[path] for path in route_paths(way)} for way in GPU_ROUTES})
