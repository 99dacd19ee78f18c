"""The rows of a bench: figures, checks of the figures, and the rows that no other row beats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvplan.base.numbers import rate, rounded
from kvplan.cost.policy import ROUTES
from kvplan.errors import KVPlanError
from kvplan.measure.workload import Geometry

TOLERANCE = 0.03  # share above the ceiling that is accepted: two measurements of one link differ by it
REST = 0.1  # share of a transfer's bytes that whole blocks may leave out
IDLE = "idle"
SUFFIXES = (".png", ".svg")  # of plots
ON_DEVICE, ON_PEER = "device", "peer"  # the GPU on which compute runs: the measured GPU, or its peer
# In words, the order of the runs in the pool, and where the pool is.
HOST_WORDS = {"contiguous": "blocks contiguous", "scattered": "runs scattered"}
POOL_WORDS = {"load": "on the host", "store": "on the host", "push": "on the peer", "pull": "on the peer"}


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of one path or baseline with one geometry, or the reason why it has no figure.

    Attributes:
        direction, host, run_nbytes, runs, block_runs: see :class:`kvplan.measure.workload.Geometry`.
        path: name of a path or a baseline.
        beside: compute at the same time: ``"idle"`` (none), ``"decode"`` or ``"prefill"``.
        programs: Triton programs of the kernel path beside compute; None for its default, and for other paths.
        seconds: median seconds from the first to the last event on the GPU; on the CPU, of the copying; beside compute,
            the same as ``wall``.
        wall: median seconds from the call until the caller knows that all bytes have arrived.
        cpu: median seconds from the call until all work is issued; None beside compute.
        samples: number of transfers that were timed.
        gbps: 1e9 bytes per second, by ``seconds``; None if there is no figure, or it is broken.
        share: ``gbps`` divided by the ceiling; on the CPU, by the memcpy of as many bytes that took turns with it, each
            with what its own transfer before has left in the caches.
        slowdown: time of an iteration of compute beside it, over the time alone; None if "idle" or broken.
        verified: whether a comparison found that all bytes arrived.
        broken: why the figure is wrong, or "".
        beside_on: the GPU on which compute ran: ``"device"``, which ran the transfers, or ``"peer"``.
    """

    direction: str
    host: str
    run_nbytes: int
    runs: int
    block_runs: int
    path: str
    beside: str = IDLE
    programs: int | None = None
    seconds: float | None = None
    wall: float | None = None
    cpu: float | None = None
    samples: int = 0
    gbps: float | None = None
    share: float | None = None
    slowdown: float | None = None
    verified: bool = True
    broken: str = ""
    beside_on: str = ON_DEVICE

    @property
    def geometry(self) -> Geometry:
        """Return the route, the sizes and the pool's order."""
        return Geometry(self.direction, self.host, self.run_nbytes, self.runs, self.block_runs)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a transfer."""
        return self.run_nbytes * self.runs

    @property
    def case(self) -> str:
        """Return in words what is moved, and beside what.

        >>> Row("load", "contiguous", 8192, 1024, 64, "kernel", "decode").case
        'load, contiguous, 8 KiB x 1,024, beside decode'
        """
        words = f"{self.direction}, {self.host}, {rounded(self.run_nbytes)} x {self.runs:,}"
        return words if self.beside == IDLE else f"{words}, beside {where(self.beside, self.beside_on)}"

    @property
    def label(self) -> str:
        """Return the path, with its number of programs if the bench chose it.

        >>> Row("load", "contiguous", 8192, 64, 64, "kernel", "decode", programs=4).label
        'kernel, 4'
        """
        return f"{self.path}, {self.programs}" if self.programs and self.beside != IDLE else self.path

    def document(self) -> dict[str, Any]:
        """Return the row as a dict for JSON; :func:`row_of` reads it."""
        return {**asdict(self), "nbytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """GB/s of one large copy.

    Attributes:
        load, store, device, push, pull: GB/s by route; None if it was not measured.
        what: name of the ceilings: ``"link"``, ``"memcpy"``, or ``"memory"`` within one GPU.
        hard: whether no transfer can be faster. True for a link; False for a copy of a large array in one memory, since
            smaller transfers find their bytes in caches.
    """

    load: float | None = None
    store: float | None = None
    what: str = "link"
    hard: bool = True
    device: float | None = None
    push: float | None = None
    pull: float | None = None

    @property
    def measured(self) -> dict[str, float]:
        """Return GB/s by route, of the routes that were measured.

        >>> Ceilings(push=395.0, pull=394.0).measured
        {'push': 395.0, 'pull': 394.0}
        """
        return {route: gbps for route in ROUTES if (gbps := getattr(self, route)) is not None}

    def document(self) -> dict[str, Any]:
        """Return the ceilings as a dict for JSON, without routes between GPUs that were not measured."""
        return {"load": self.load, "store": self.store, "what": self.what, "hard": self.hard, **self.measured}


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement that was not made, and why."""

    what: str
    why: str


def row_of(document: Mapping[str, Any]) -> Row:
    """Read a row that :meth:`Row.document` wrote; ignore unknown keys.

    Raises:
        KVPlanError: a key that a row needs is missing.

    >>> row = Row("load", "contiguous", 8192, 64, 64, "kernel", gbps=50.1)
    >>> row_of(row.document()) == row
    True
    """
    known = {field.name: document[field.name] for field in fields(Row) if field.name in document}
    try:
        return Row(**known)
    except TypeError as error:
        raise KVPlanError(f"no row of a bench: {error}") from None


def figures(nbytes: int, seconds: float, ceilings: Ceilings, direction: str) -> dict[str, Any]:
    """Return ``gbps``, ``share`` and ``broken`` of a row.

    >>> figures(10**9, 0.02, Ceilings(55.0, 55.0), "load")["gbps"]
    50.0
    >>> figures(10**9, 0.018, Ceilings(50.0, 50.0), "load")["broken"]
    "55.6 GB/s is faster than the link's 50.0 GB/s"
    """
    gbps, ceiling = nbytes / seconds / 1e9, ceilings.measured[direction]
    if ceilings.hard and gbps > ceiling * (1 + TOLERANCE):
        broken = f"{rate(gbps)} is faster than the {ceilings.what}'s {rate(ceiling)}"
        return {"gbps": None, "share": None, "broken": broken}
    return {"gbps": gbps, "share": gbps / ceiling, "broken": ""}


def pareto(rows: Iterable[Row]) -> list[Row]:
    """Return the rows beside compute that no other row beats, the row that slows compute least first.

    A row beats another if it is as fast and slows compute less. Of equal rows, only the first is kept. Rows without
    both figures are left out.

    >>> def row(gbps, slowdown):
    ...     return Row("load", "contiguous", 8, 2, 2, "staged", "decode", gbps=gbps, slowdown=slowdown)
    >>> [one.gbps for one in pareto([row(50, 1.1), row(40, 1.2), row(30, 1.0), row(30, 1.05)])]
    [30, 50]
    """
    able = [(row.slowdown, -row.gbps, row) for row in rows if row.slowdown is not None and row.gbps is not None]
    front: list[Row] = []
    best = 0.0
    for _, negative, row in sorted(able, key=lambda figures: figures[:2]):
        if not front or -negative > best:
            front.append(row)
            best = -negative
    return front


def comparable(rows: Iterable[Row]) -> tuple[str, list[Row]]:
    """Return the rows without compute that one picture can show: those that move as many bytes, or have as many runs.

    Of all amounts, that of the most run sizes is taken; of several, the largest. Whole blocks may leave out a rest.

    Returns:
        The amount in words, and the rows in order of their run size. Rows without a figure are left out.

    >>> rows = [Row("load", "contiguous", size, runs, 2, "kernel", gbps=1.0) for size, runs in
    ...         ((512, 16), (512, 1024), (8192, 64), (8192, 128), (65536, 2))]
    >>> words, some = comparable(rows)
    >>> words, [(row.run_nbytes, row.runs) for row in some]
    ('moves 512 KiB', [(512, 1024), (8192, 64)])
    """
    able = sorted((row for row in rows if row.beside == IDLE and row.gbps is not None), key=lambda row: row.nbytes)
    amounts = {f"moves {rounded(most)}": [row for row in able if most * (1 - REST) <= row.nbytes <= most]
               for most in sorted({row.nbytes for row in able})}  # fmt: skip
    amounts |= {f"has {runs:,} runs": [row for row in able if row.runs == runs] for runs in {row.runs for row in able}}
    if not amounts:
        return "", []

    def rank(words: str) -> tuple[int, bool, int]:
        return len({row.run_nbytes for row in amounts[words]}), words.startswith("moves"), amounts[words][-1].nbytes

    words = max(amounts, key=rank)
    # Of a path's rows of one size, the largest counts.
    last = {(row.direction, row.host, row.path, row.run_nbytes): row for row in amounts[words]}
    return words, sorted(last.values(), key=lambda row: row.run_nbytes)


def pooled(direction: str, host: str) -> str:
    """Return the order of the pool in words, and where it is.

    >>> pooled("load", "contiguous"), pooled("pull", "scattered"), pooled("device", "contiguous")
    ('blocks contiguous on the host', 'runs scattered on the peer', 'blocks contiguous in the pool')
    """
    return f"{HOST_WORDS[host]} {POOL_WORDS.get(direction, 'in the pool')}" if host in HOST_WORDS else host


def where(beside: str, on: str) -> str:
    """Return a kind of compute in words, and its GPU if that is not the measured GPU.

    >>> where("decode", "device"), where("decode", "peer")
    ('decode', 'decode on the peer')
    """
    return f"{beside} on the peer" if on == ON_PEER else beside


def grouped(missing: Sequence[Missing]) -> dict[str, list[str]]:
    """Return the measurements that were not made, by reason."""
    found: dict[str, list[str]] = {}
    for one in missing:
        found.setdefault(one.why, []).append(one.what)
    return found
