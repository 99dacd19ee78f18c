"""Profiles by which ``auto`` takes one path, or another path for each number of blocks."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from kvplan.cost.profile import GPU_ROUTES, TERMS, DeviceProfile, PathCosts, default, route_paths


def favouring(path: str) -> DeviceProfile:
    """A profile in which one path costs next to nothing and the others the same as one another, much."""
    costs = {}
    for name, terms in TERMS.items():
        nothing = dict.fromkeys(terms, 0.0)
        each = nothing | {"fixed": 1.0 if name == path else 1e9}
        costs[name] = PathCosts(each, each, nothing if name == "kernel" else {})
    return replace(default(), costs={way: {path: costs[path] for path in route_paths(way)} for way in GPU_ROUTES})


def drawn(seed: int) -> DeviceProfile:
    """A profile in which no path is the cheapest for all numbers of blocks."""
    chance, costs = Random(seed), {}
    for name, terms in TERMS.items():
        each = {term: chance.uniform(0, 50_000 if term == "fixed" else 2000) for term in terms} | {"byte": 0.0}
        costs[name] = PathCosts(each, each, dict.fromkeys(terms, 0.0) if name == "kernel" else {})
    return replace(default(), costs={way: {path: costs[path] for path in route_paths(way)} for way in GPU_ROUTES})
