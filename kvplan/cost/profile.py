"""Device profiles: measured costs of each path for one GPU, driver and link, and their form as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvplan.base.integers import optional_integer
from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.cost.policy import BESIDE_KERNELS, IDLE_KERNELS, OVERLAPS
from kvplan.errors import KVPlanError, LayoutError

SCHEMA, VERSION = "kvplan.profile", 1
HOWS = ("calibrated", "shipped", "default")
DIRECTIONS = ("load", "store")

# The terms of each path. cost/model.py counts them in a plan; a profile has their costs in nanoseconds.
TERMS: dict[str, tuple[str, ...]] = {
    "kernel": ("fixed", "run", "byte"),
    "copy_engine": ("fixed", "small_copy", "small_byte", "large_copy", "large_byte"),
    "copy_engine_2d": ("fixed", "call", "row", "byte"),
    "staged": ("fixed", "run", "small_extent", "small_byte", "large_extent", "large_byte"),
}
Costs = Mapping[str, float]
MOST_FACTOR = 1e3
MOST = 1e15  # the largest number in a profile, so that sums of products stay finite


@dataclass(frozen=True)
class PathCosts:
    """Costs of the terms of one path and direction, in nanoseconds; see :data:`TERMS`.

    Attributes:
        seconds: costs in the time from the first to the last event on the GPU.
        wall: costs in the time from the call of submit until the caller knows the end.
        cpu: costs in the time from the call of submit until a thread has issued all work.
        program: like ``seconds``, for the kernel path with one Triton program; empty for other paths.
    """

    seconds: Costs
    wall: Costs
    cpu: Costs
    program: Costs = field(default_factory=dict)


@dataclass(frozen=True)
class Beside:
    """The effect of a path and compute on each other if both run at the same time.

    Attributes:
        rate: bandwidth of the path beside compute, divided by its bandwidth alone.
        slower: time of an iteration of compute beside the path, divided by its time alone.
    """

    rate: float
    slower: float


@dataclass(frozen=True)
class DeviceProfile:
    """The measured costs of one kind of GPU and link, which the cost model reads.

    Attributes:
        gpu: name of the GPU.
        driver: version of the driver.
        generation, width: generation and lanes of the PCIe link; None if not known.
        how: ``"calibrated"`` on this machine, ``"shipped"`` with kvplan, or ``"default"``: measured nowhere.
        made: version of kvplan and date: ``"kvplan 0.1.0, 2026-11-21"``.
        multiprocessors: number of SMs.
        ceilings: GB/s of one large copy by the copy engine (``"load"``, ``"store"``), of a copy by SMs (``"sm_load"``,
            ``"sm_store"``), and of a copy within the GPU's memory (``"memory"``).
        costs: costs by direction and path.
        beside: effects of compute by kind of compute (``"decode"``, ``"prefill"``), direction and path.
        note: a warning to the user, or "".
        calibrations: number of calibrations that were averaged.
        guessed: names of costs that were not measured, such as ``"store staged"`` or ``"decode load kernel"``.
        programs: Triton programs of the kernel path when it was measured, by direction.

    >>> default().how, sorted(default().costs["load"])
    ('default', ['copy_engine', 'copy_engine_2d', 'kernel', 'staged'])
    """

    gpu: str
    driver: str
    generation: int | None
    width: int | None
    how: str
    made: str
    multiprocessors: int
    ceilings: Mapping[str, float]
    costs: Mapping[str, Mapping[str, PathCosts]]
    beside: Mapping[str, Mapping[str, Mapping[str, Beside]]]
    note: str = ""
    calibrations: int = 0
    guessed: tuple[str, ...] = ()
    programs: Mapping[str, int] = field(default_factory=lambda: {way: IDLE_KERNELS[way].programs for way in DIRECTIONS})

    def to_json(self) -> str:
        """Return the profile as JSON, the text of its file."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **_rounded(asdict(self))}, indent=1) + "\n"

    @property
    def link(self) -> str:
        """Return the link in words.

        >>> default().link
        'a link not known'
        """
        if self.generation is None or self.width is None:
            return "a link not known"
        return f"PCIe {self.generation} x{self.width}"


def from_json(text: str) -> DeviceProfile:
    """Read a profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a wrong value, which the message names.

    >>> from_json(default().to_json()) == default()
    True
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
    reader = _Reader(document)
    return DeviceProfile(
        gpu=reader.text("gpu"),
        driver=reader.text("driver"),
        generation=reader.whole("generation"),
        width=reader.whole("width"),
        how=reader.one_of("how", HOWS),
        made=reader.text("made"),
        multiprocessors=reader.whole("multiprocessors") or 0,
        ceilings=reader.numbers(("ceilings",), ("load", "store", "sm_load", "sm_store", "memory")),
        costs={way: reader.costs(way) for way in DIRECTIONS},
        beside={kind: {way: reader.beside(kind, way) for way in DIRECTIONS} for kind in OVERLAPS[1:]},
        note=reader.text("note"),
        calibrations=reader.whole("calibrations") or 0,
        guessed=reader.texts("guessed"),
        programs=reader.programs("programs"),
    )


class _Reader:
    """A reader that checks each value of a profile's JSON document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

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

    def numbers(self, place: tuple[str, ...], names: tuple[str, ...]) -> dict[str, float]:
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

    def programs(self, name: str) -> dict[str, int]:
        """Read Triton programs by direction. Profiles of kvplan 0.1.0 lack them: they used BESIDE_KERNELS."""
        if name not in self._document:
            return {way: BESIDE_KERNELS[way].programs for way in DIRECTIONS}
        found = {way: int(count) for way, count in self.numbers((name,), DIRECTIONS).items()}
        if min(found.values()) < 1:
            raise KVPlanError(f"{name} is {found}; a kernel has at least one program")
        return found

    def costs(self, way: str) -> dict[str, PathCosts]:
        made = {}
        for path, terms in TERMS.items():
            place = ("costs", way, path)
            seconds, wall, cpu = (self.numbers((*place, target), terms) for target in ("seconds", "wall", "cpu"))
            program = self.numbers((*place, "program"), terms if path == "kernel" else ())
            made[path] = PathCosts(seconds, wall, cpu, program)
        return made

    def beside(self, kind: str, way: str) -> dict[str, Beside]:
        made = {}
        for path in TERMS:
            found = self.numbers(("beside", kind, way, path), ("rate", "slower"))
            if not 1e-3 <= found["rate"] <= MOST_FACTOR or not 1 <= found["slower"] <= MOST_FACTOR:
                raise KVPlanError(
                    f"beside.{kind}.{way}.{path} is {quoted(found)}; a rate is 0.001 to 1000, and slower is 1 to 1000"
                )
            made[path] = Beside(**found)
        return made


def _rounded(value: Any) -> Any:
    """Round numbers to five digits, since no measurement is more precise."""
    if isinstance(value, dict):
        return {name: _rounded(held) for name, held in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def default() -> DeviceProfile:
    """Return a conservative guess: PCIe 4, and a driver whose small copies take long.

    With it, the kernel moves small runs, the copy engine large runs, and the staged path runs of middle size. The
    costs are rounded from measurements of an H100 and an A30.
    """
    ceilings = {"load": 24.0, "store": 24.0, "sm_load": 22.0, "sm_store": 22.0, "memory": 1000.0}
    byte, sm_byte = 0.042, 0.046
    seconds: dict[str, dict[str, float]] = {
        "kernel": {"fixed": 15e3, "run": 1.0, "byte": sm_byte},
        "copy_engine": {"fixed": 10e3, "small_copy": 1500.0, "small_byte": byte, "large_copy": 500.0,
                        "large_byte": byte},
        "copy_engine_2d": {"fixed": 25e3, "call": 3000.0, "row": 100.0, "byte": byte},
        "staged": {"fixed": 40e3, "run": 0.5, "small_extent": 1500.0, "small_byte": byte,
                   "large_extent": 500.0, "large_byte": byte},
    }  # fmt: skip
    before = {"kernel": 50e3, "copy_engine": 70e3, "copy_engine_2d": 110e3, "staged": 100e3}
    costs = {
        path: PathCosts(
            terms,
            terms | {"fixed": terms["fixed"] + before[path]},
            terms | {"fixed": before[path]},
            {"fixed": 15e3, "run": 4.0, "byte": 0.138} if path == "kernel" else {},
        )
        for path, terms in seconds.items()
    }
    beside = {
        "kernel": Beside(0.7, 1.08), "copy_engine": Beside(0.95, 1.04), "copy_engine_2d": Beside(0.95, 1.02),
        "staged": Beside(0.9, 1.06),
    }  # fmt: skip
    return DeviceProfile(
        gpu="", driver="", generation=None, width=None, how="default", made="kvplan, measured nowhere",
        multiprocessors=108, ceilings=ceilings, costs=dict.fromkeys(DIRECTIONS, costs),
        beside={kind: dict.fromkeys(DIRECTIONS, beside) for kind in OVERLAPS[1:]},
        note="a guess that was measured nowhere: run `kvplan calibrate`",
    )  # fmt: skip
