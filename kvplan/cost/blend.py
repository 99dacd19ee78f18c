"""The mean of a calibration and an earlier profile, so that the noise of one calibration does not change choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from kvplan.cost.profile import Beside, DeviceProfile, PathCosts

# An earlier profile counts as at most 14 calibrations, so that a lasting change has an effect.
MOST_WEIGHT = 14
# If ceilings differ more, the machine is another one, or its link lost lanes: the earlier profile is not used.
ALIKE = 0.8


def weighed(new: DeviceProfile, earlier: DeviceProfile) -> DeviceProfile:
    """Return the mean of a calibration and an earlier profile, weighted by the number of calibrations.

    Args:
        new: profile of one calibration.
        earlier: a profile calibrated here, or shipped. It is not used if it is the default, or has another GPU or
            link, other ceilings, or another number of Triton programs.

    >>> from kvplan.cost.profile import default
    >>> one = replace(default(), gpu="H100", how="calibrated", calibrations=1)
    >>> faster = replace(one, ceilings=dict(one.ceilings, load=26.0))
    >>> weighed(faster, replace(one, calibrations=3)).ceilings["load"], weighed(faster, default()) == faster
    (24.5, True)
    """
    known = (earlier.gpu, earlier.generation, earlier.width) == (new.gpu, new.generation, new.width)
    known = known and earlier.programs == new.programs
    if earlier.how == "default" or not earlier.calibrations or not known or not _alike(new.ceilings, earlier.ceilings):
        return new
    weight = min(earlier.calibrations, MOST_WEIGHT)

    def mean(told: str, one: Any, other: Any) -> dict[str, Any]:
        if told in earlier.guessed:
            return asdict(one)
        return asdict(other) if told in new.guessed else _mean(asdict(one), asdict(other), weight)

    guessed = tuple(told for told in new.guessed if told in earlier.guessed)
    return replace(
        new,
        ceilings=_mean(new.ceilings, earlier.ceilings, weight),
        costs={
            direction: {path: PathCosts(**mean(f"{direction} {path}", costs, earlier.costs[direction][path]))
                        for path, costs in paths.items()}
            for direction, paths in new.costs.items()
        },
        beside={
            kind: {direction: {path: Beside(**mean(f"{kind} {direction} {path}", one, known[direction][path]))
                               for path, one in paths.items()}
                   for direction, paths in directions.items()}
            for kind, directions in new.beside.items() for known in (earlier.beside[kind],)
        },
        calibrations=earlier.calibrations + new.calibrations,
        guessed=guessed,
        note=f"guessed, for want of samples: {'; '.join(guessed)}" if guessed else "",
    )  # fmt: skip


def _alike(new: Mapping[str, float], earlier: Mapping[str, float]) -> bool:
    return all(min(new[name], value) >= ALIKE * max(new[name], value) for name, value in earlier.items()
               if name != "memory")  # fmt: skip


def _mean(new: Mapping[str, Any], earlier: Mapping[str, Any], weight: int) -> dict[str, Any]:
    """Return the mean of nested numbers; earlier numbers count ``weight`` times."""
    return {
        name: _mean(value, earlier[name], weight)
        if isinstance(value, Mapping)
        else (value + weight * earlier[name]) / (1 + weight)
        for name, value in new.items()
    }
