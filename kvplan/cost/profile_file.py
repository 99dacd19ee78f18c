"""The reader of a device profile's JSON text, which names every wrong value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.base.integers import optional_integer
from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.cost.policy import BESIDE_KERNELS, HOST_ROUTES, OVERLAPS, PEER_ROUTES
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
    default,
    default_programs,
    names_of_costs,
    route_paths,
)
from kvplan.errors import KVPlanError, LayoutError

MOST_FACTOR = 1e3
MOST = 1e15  # the largest number in a profile, so that sums of products stay finite


def from_json(text: str) -> DeviceProfile:
    """Read a profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a wrong value, which the message names.

    >>> from kvplan.cost.profile import default_pair
    >>> from_json(default().to_json()) == default(), from_json(default_pair().to_json()) == default_pair()
    (True, True)
    """
    try:
        document = json_of(text)
    except LayoutError as error:
        raise KVPlanError(f"no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise KVPlanError(f"no device profile: its schema is not {SCHEMA!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise KVPlanError(f"version {quoted(version)}, {'newer than' if newer else 'where'} {VERSION} is "
                          "what is read here")  # fmt: skip
    return _Reader(document).profile()


class _Reader:
    """A reader that checks each value of a profile's JSON document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def profile(self) -> DeviceProfile:
        """Read a profile. Files of kvplan 0.1.0 lack the route "device": its costs are the default's guess."""
        peer = self.text("peer")
        routes: tuple[str, ...] = PEER_ROUTES if peer else GPU_ROUTES
        costs = self._document.get("costs")
        measured = HOST_ROUTES if not peer and isinstance(costs, dict) and "device" not in costs else routes
        lacking = tuple(route for route in routes if route not in measured)
        guess = default()
        multiprocessors = self.whole("multiprocessors") or 0
        guessed = self.texts("guessed")
        ceilings = self.numbers(
            ("ceilings",), [name for name in ceiling_names(routes) if name.removeprefix("sm_") not in lacking]
        )
        return DeviceProfile(
            gpu=self.text("gpu"),
            driver=self.text("driver"),
            generation=self.whole("generation"),
            width=self.whole("width"),
            how=self.one_of("how", HOWS),
            made=self.text("made"),
            multiprocessors=multiprocessors,
            ceilings={name: ceilings.get(name, guess.ceilings.get(name, 0.0)) for name in ceiling_names(routes)},
            costs={route: guess.costs[route] if route in lacking else self.costs(route) for route in routes},
            beside={
                kind: {
                    route: guess.beside[kind][route] if route in lacking else self.beside(kind, route)
                    for route in routes
                }
                for kind in OVERLAPS[1:]
            },
            programs=self.programs("programs", measured) | default_programs(lacking, multiprocessors),
            note=self.text("note"),
            calibrations=self.whole("calibrations") or 0,
            guessed=(*guessed, *(name for name in names_of_costs(lacking) if name not in guessed)),
            peer=peer,
            nvlinks=self.whole("nvlinks"),
        )

    def text(self, name: str) -> str:
        value = self._document.get(name, "")
        if not isinstance(value, str):
            raise KVPlanError(f"{name} is {quoted(value)}; expected a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._document.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise KVPlanError(f"{name} is {quoted(value)}; expected a list of texts")
        return tuple(value)

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in known:
            raise KVPlanError(f"{name} is {quoted(value)}; expected one of {', '.join(known)}")
        return value

    def whole(self, name: str) -> int | None:
        value = self._document.get(name)
        return optional_integer(
            name, value, least=0, most=LIMITS.number, right="expected a whole number", error=KVPlanError
        )

    def numbers(self, place: tuple[str, ...], names: Sequence[str]) -> dict[str, float]:
        held: Any = self._document
        for name in place:
            held = held.get(name) if isinstance(held, dict) else None
        where = ".".join(place)
        if not isinstance(held, dict):
            raise KVPlanError(f"{where} is missing, or not an object")
        for name in names:
            value = held.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST:  # nan is not
                raise KVPlanError(f"{where}.{name} is {quoted(value)}; expected a number of at least 0")
        return {name: float(held[name]) for name in names}

    def programs(self, name: str, routes: Sequence[str]) -> dict[str, int]:
        """Read Triton programs by route. Profiles of kvplan 0.1.0 lack them: they used BESIDE_KERNELS."""
        if name not in self._document:
            return {route: BESIDE_KERNELS[route].programs for route in routes}
        found = {route: int(count) for route, count in self.numbers((name,), routes).items()}
        if min(found.values()) < 1:
            raise KVPlanError(f"{name} is {found}; a kernel has at least one program")
        return found

    def costs(self, route: str) -> dict[str, PathCosts]:
        made = {}
        for path in route_paths(route):
            place, terms = ("costs", route, path), TERMS[path]
            seconds, wall, cpu = (self.numbers((*place, target), terms) for target in ("seconds", "wall", "cpu"))
            program = self.numbers((*place, "program"), terms if path == "kernel" else ())
            made[path] = PathCosts(seconds, wall, cpu, program)
        return made

    def beside(self, kind: str, route: str) -> dict[str, Beside]:
        made = {}
        for path in route_paths(route):
            found = self.numbers(("beside", kind, route, path), ("rate", "slower"))
            if not 1e-3 <= found["rate"] <= MOST_FACTOR or not 1 <= found["slower"] <= MOST_FACTOR:
                raise KVPlanError(
                    f"beside.{kind}.{route}.{path} is {quoted(found)}; a rate is 0.001 to 1000, and slower is 1 to 1000"
                )
            made[path] = Beside(**found)
        return made
