"""The mean of a calibration and an earlier profile, so that the noise of one calibration does not change choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvplan.cost.profile import Beside, DeviceProfile, PathCosts, ceiling_names, route_paths

# An earlier profile counts as at most 14 calibrations, so that a lasting change has an effect.
MOST_WEIGHT = 14
# If ceilings differ more, the machine is another one, or its link lost lanes: the earlier profile is not used.
ALIKE = 0.8


def weighed(new: DeviceProfile, earlier: DeviceProfile) -> DeviceProfile:
    """Return the mean of a calibration and an earlier profile, weighted by the number of calibrations.

    Args:
        new: profile of one calibration.
        earlier: a profile calibrated here, or shipped. It is not used if it is the default, or has another GPU, peer
            or link, other ceilings, or another number of Triton programs. Costs that it guessed do not count.

    >>> from kvplan.cost.profile import default
    >>> one = replace(default(), gpu="H100", how="calibrated", calibrations=1)
    >>> faster = replace(one, ceilings=dict(one.ceilings, load=26.0))
    >>> weighed(faster, replace(one, calibrations=3)).ceilings["load"], weighed(faster, default()) == faster
    (24.5, True)
    """
    if earlier.how == "default" or not earlier.calibrations or _key(earlier) != _key(new):
        return new
    known = _measured(earlier)
    both = [route for route in known if route in _measured(new)]
    if any(new.programs[route] != earlier.programs[route] for route in known) or not _alike(new, earlier, both):
        return new
    weight = min(earlier.calibrations, MOST_WEIGHT)

    def mean(told: str, one: Any, other: Any) -> dict[str, Any]:
        if told in earlier.guessed:
            return asdict(one)
        return asdict(other) if told in new.guessed else _mean(asdict(one), asdict(other), weight)

    guessed = tuple(told for told in new.guessed if told in earlier.guessed)
    return replace(
        new,
        ceilings={
            **new.ceilings,
            **_of(earlier.ceilings, known),
            **_mean(_of(new.ceilings, both), earlier.ceilings, weight),
        },
        costs={
            route: {path: PathCosts(**mean(f"{route} {path}", costs, earlier.costs[route][path]))
                    for path, costs in paths.items()}
            for route, paths in new.costs.items()
        },
        beside={
            kind: {route: {path: Beside(**mean(f"{kind} {route} {path}", one, earlier.beside[kind][route][path]))
                           for path, one in paths.items()}
                   for route, paths in routes.items()}
            for kind, routes in new.beside.items()
        },
        calibrations=earlier.calibrations + new.calibrations,
        guessed=guessed,
        note=f"guessed, for want of samples: {'; '.join(guessed)}" if guessed else "",
    )  # fmt: skip


def _key(profile: DeviceProfile) -> tuple[Any, ...]:
    return profile.gpu, profile.peer, profile.generation, profile.width, profile.nvlinks


def _of(ceilings: Mapping[str, float], routes: Sequence[str]) -> dict[str, float]:
    """Return the ceilings of some routes."""
    return {name: ceilings[name] for name in ceiling_names(routes)}


def _measured(profile: DeviceProfile) -> list[str]:
    """Return the routes for which a profile has more than guesses."""
    return [route for route in profile.routes
            if any(f"{route} {path}" not in profile.guessed for path in route_paths(route))]  # fmt: skip


def _alike(new: DeviceProfile, earlier: DeviceProfile, routes: Sequence[str]) -> bool:
    """Return whether two profiles have similar ceilings for some routes."""
    pairs = ((new.ceilings[name], earlier.ceilings[name]) for name in ceiling_names(routes) if name != "memory")
    return all(min(pair) >= ALIKE * max(pair) for pair in pairs)


def _mean(new: Mapping[str, Any], earlier: Mapping[str, Any], weight: int) -> dict[str, Any]:
    """Return the mean of nested numbers; earlier numbers count ``weight`` times."""
    return {
        name: _mean(value, earlier[name], weight)
        if isinstance(value, Mapping)
        else (value + weight * earlier[name]) / (1 + weight)
        for name, value in new.items()
    }
