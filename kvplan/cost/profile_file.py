"""The reader of a device profile's JSON text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.cost.policy import OVERLAPS, PEER_ROUTES
from kvplan.cost.profile import (
    GPU_ROUTES,
    HOWS,
    SCHEMA,
    TERMS,
    VERSION,
    Beside,
    DeviceProfile,
    PathCosts,
    ceiling_names,
    route_paths,
)
from kvplan.errors import KVPlanError, LayoutError

MOST_FACTOR = 1e3
MOST = 1e15  # the largest number in a profile, so that sums of products stay finite


def from_json(text: str) -> DeviceProfile:
    """Read a profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a value is missing or wrong.

    >>> from kvplan.cost.profile import default, default_pair
    >>> from_json(default().to_json()) == default(), from_json(default_pair().to_json()) == default_pair()
    (True, True)
    """
    document = document_of(text, SCHEMA, VERSION, "device profile")
    try:
        return _profile(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KVPlanError(f"a value of the device profile is missing or wrong: {quoted(str(error))}") from None


def document_of(text: str, schema: str, version: int, what: str) -> dict[str, Any]:
    """Read a JSON object of a schema and a version.

    Raises:
        KVPlanError: the text is no such object.
    """
    if len(text) > LIMITS.profile_nbytes:
        raise KVPlanError(f"more than {LIMITS.profile_nbytes:,} bytes")
    try:
        document = json_of(text)
    except LayoutError as error:
        raise KVPlanError(f"no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise KVPlanError(f"no {what}: its schema is not {schema!r}")
    if (found := document.get("version")) != version:
        newer = isinstance(found, int) and found > version
        raise KVPlanError(f"version {quoted(found)}, {'newer than' if newer else 'where'} {version} is "
                          "what is read here")  # fmt: skip
    return document


def _profile(document: dict[str, Any]) -> DeviceProfile:
    peer = text_of(document.get("peer", ""))
    routes = PEER_ROUTES if peer else GPU_ROUTES
    if document["how"] not in HOWS:
        raise ValueError(f"how is {document['how']!r}")
    programs = {route: _whole(document["programs"][route]) for route in routes}
    if None in programs.values() or 0 in programs.values():
        raise ValueError("a kernel has at least one program")
    facts: dict[str, Any] = {name: text_of(document.get(name, "")) for name in ("gpu", "driver", "how", "made", "note")}
    facts |= {name: _whole(document.get(name)) for name in ("generation", "width", "nvlinks")}
    return DeviceProfile(
        **facts,
        multiprocessors=_whole(document.get("multiprocessors")) or 0,
        ceilings=_numbers(document["ceilings"], ceiling_names(routes)),
        costs={route: {path: _costs(document["costs"][route][path], path) for path in route_paths(route)}
               for route in routes},
        beside={kind: {route: {path: _beside(document["beside"][kind][route][path]) for path in route_paths(route)}
                       for route in routes} for kind in OVERLAPS[1:]},
        programs=programs, guessed=tuple(map(text_of, document.get("guessed", ()))), peer=peer,
    )  # fmt: skip


def number_of(value: Any, most: float = MOST) -> float:
    """Return a number from 0 to ``most``, or raise ValueError."""
    if type(value) not in (int, float) or not 0 <= value <= most:  # nan is not
        raise ValueError(f"{value!r} is no number from 0 to {most:g}")
    return float(value)


def text_of(value: Any) -> str:
    """Return a text, or raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004  # one kind of error for all values
    return value


def _whole(value: Any) -> Any:
    return None if value is None else int(number_of(value, LIMITS.number))


def _numbers(values: Any, names: Iterable[str]) -> dict[str, float]:
    return {name: number_of(values[name]) for name in names}


def _costs(values: Any, path: str) -> PathCosts:
    seconds, wall, cpu = (_numbers(values[target], TERMS[path]) for target in ("seconds", "wall", "cpu"))
    return PathCosts(seconds, wall, cpu, _numbers(values["program"], TERMS[path]) if path == "kernel" else {})


def _beside(values: Any) -> Beside:
    effects = _numbers(values, ("rate", "slower"))
    if not 1e-3 <= effects["rate"] <= MOST_FACTOR or not 1 <= effects["slower"] <= MOST_FACTOR:
        raise ValueError(f"{effects}: a rate is 0.001 to 1000, and slower is 1 to 1000")
    return Beside(**effects)
