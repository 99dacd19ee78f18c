"""Rows of the jobs of vLLM's offloading: speeds against vLLM's, CPU time, and the limits of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

from benchmarks.gpu.required import TOLERANCE, speed_row
from benchmarks.gpu.sizes import spell
from benchmarks.gpu.vllm_jobs import Model, cpu_ms, job_ms, times_vllm
from benchmarks.record import Row

OURS, COPY = "kvplan", "one large copy"
BLHNC = "BLHNC"  # the layout that VLLM_KV_CACHE_LAYOUT names
CPU = "the submit call, the call of get_finished that reports the job, and CPU time of all other threads meanwhile"


class Sample(NamedTuple):
    """One job: seconds in all, of the submit call, and of CPU time in all and of other threads than the caller's."""

    wall: float
    call: float
    cpu: float
    others: float


class Peer(NamedTuple):
    """The worker that kvplan's is compared with.

    Attributes:
        name: of it.
        is_vllm: whether it is vLLM: else no limit of times vLLM is held.
    """

    name: str
    is_vllm: bool


class Work(NamedTuple):
    """A kind of job: blocks of a model, ``"load"`` or ``"store"``, and the GB/s of one large copy."""

    model: Model
    direction: str
    blocks: int
    link: float

    @property
    def nbytes(self) -> int:
        """Bytes of a job."""
        return self.model.nbytes(self.blocks)

    def told(self, compute: str = "") -> str:
        """In words."""
        beside = f" beside {compute}" if compute else ""
        return f"{self.direction}{beside}, {self.blocks:,} x {spell(self.model.page_nbytes)}, {spell(self.nbytes)}"


def packed(name: str) -> str:
    """Return the name of a worker over caches in the layout BLHNC, where all layers of a block lie in one piece.

    >>> packed("kvplan"), layouts_of("kvplan", {"kvplan": 50.0, "kvplan, BLHNC": 54.0, "another": 60.0})
    ('kvplan, BLHNC', {'kvplan': 50.0, 'kvplan, BLHNC': 54.0})
    """
    return f"{name}, {BLHNC}"


def layouts_of(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of one worker, over each layout of the caches that was measured."""
    return {one: found[one] for one in (name, packed(name)) if one in found}


def best_baseline(row: Mapping[str, Any], baseline: str) -> tuple[str, float]:
    """Return name and figure of a recorded row's baseline, or of the same baseline over BLHNC if that is better.

    >>> best_baseline({"unit": "GB/s", "beside": {"vLLM": 37.0, "vLLM, BLHNC": 49.0, "one large copy": 55.0}}, "vLLM")
    ('vLLM, BLHNC', 49.0)
    """
    found = {name: value for name, value in layouts_of(baseline, row["beside"]).items() if value}
    choose = max if row["unit"] == "GB/s" else min
    best = choose(found, key=found.__getitem__, default=baseline)
    return best, found.get(best, 0.0)


def best_row(work: Work, peer: Peer, gbps: Mapping[str, float], compute: str = "") -> Iterator[Row]:
    """Row of ours over the peer's, each in its best layout, if both were measured and no figure is impossible."""
    ours, others = layouts_of(OURS, gbps), layouts_of(peer.name, gbps)
    impossible = any(value > TOLERANCE * work.link for value in (*ours.values(), *others.values()))
    if len(ours) < 2 or len(others) < 2 or impossible:
        return
    first, best = max(ours, key=ours.__getitem__), max(others, key=others.__getitem__)
    detail = {"ours": first, "best": best, "blocks": work.blocks, "nbytes": work.nbytes, "gbps": dict(gbps),
              "times": {name: value / others[best] for name, value in ours.items()}}  # fmt: skip
    yield Row(work.model.name, f"{work.told(compute)}: over the best of {peer.name}", "x", ours[first] / others[best],
              more_is_better=True, detail=detail)  # fmt: skip


def rows_alone(work: Work, peer: Peer, medians: Mapping[str, Sample], detail: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one kind of job alone, of medians by worker: of each layout that was measured, and of the best."""
    model, link = work.model, work.link
    gbps = {name: work.nbytes / one.wall / 1e9 for name, one in medians.items()}
    others = layouts_of(peer.name, medians)
    kept = {"blocks": work.blocks, "layers": model.layers, "page_nbytes": model.page_nbytes, "nbytes": work.nbytes,
            "cpu_is": CPU, **detail}  # fmt: skip
    beside = layouts_of(peer.name, gbps) | ({COPY: link} if isfinite(link) else {})
    for name, ours in layouts_of(OURS, medians).items():
        default, told = name == OURS, work.told() if name == OURS else packed(work.told())
        other = others[peer.name] if default else others[packed(peer.name)]
        mine = kept | {
            side: {key: value * 1e3 for key, value in one._asdict().items()}
            for side, one in (("ours_ms", ours), ("peer_ms", other))
        }
        share = times_vllm(work.direction, model.page_nbytes) if default and peer.is_vllm else None
        yield speed_row(model.name, told, gbps[name], beside, link=link, share=share, detail=mine)
        most = job_ms(model, work.blocks) if default else None
        if most is not None:
            yield Row(model.name, f"{told}: in all", "ms", ours.wall * 1e3, _ms(others, "wall"), most, f"{most:g} ms",
                      detail=mine)  # fmt: skip
        most = cpu_ms(ours.wall) if default else None
        yield Row(model.name, f"{told}: CPU", "ms", ours.cpu * 1e3, _ms(others, "cpu"), most,
                  "0.1 ms + 3 % of the job" if default else "", detail=mine)  # fmt: skip
    yield from best_row(work, peer, gbps)


def _ms(found: Mapping[str, Sample], what: str) -> dict[str, float]:
    return {name: getattr(one, what) * 1e3 for name, one in found.items()}


def rows_beside(work: Work, peer: Peer, compute: str, found: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one kind of job beside one kind of compute: of each layout that was measured, and of the best.

    Args:
        found: ``gbps``, ``slowdown`` and ``detail`` of ours and the peer, by layout, and of one large copy.
    """
    others = {**layouts_of(peer.name, found), COPY: found[COPY]}
    broken = [one.detail["broken"] for one in found.values() if "broken" in one.detail]
    for name, ours in layouts_of(OURS, found).items():
        default, told = name == OURS, work.told(compute) if name == OURS else packed(work.told(compute))
        share = times_vllm(work.direction, work.model.page_nbytes, compute) if default and peer.is_vllm else None
        other = others[peer.name] if default else others[packed(peer.name)]
        detail = {"blocks": work.blocks, "nbytes": work.nbytes, **ours.detail, "peer": other.detail}
        detail |= {"broken": broken[0]} if broken else {}
        yield speed_row(work.model.name, told, ours.gbps, {one: made.gbps for one, made in others.items()},
                        link=work.link, share=share, detail=detail)  # fmt: skip
        yield Row(work.model.name, f"{told}: compute slower", "x", ours.slowdown,
                  {one: made.slowdown for one, made in others.items()}, detail=detail)  # fmt: skip
    if not broken:
        yield from best_row(work, peer, {name: one.gbps for name, one in found.items()}, compute)
