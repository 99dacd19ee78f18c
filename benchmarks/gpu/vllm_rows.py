"""Rows of the jobs of vLLM's offloading: speeds against vLLM's, CPU time, and the limits of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

from benchmarks.gpu.required import speed_row
from benchmarks.gpu.sizes import spell
from benchmarks.gpu.vllm_jobs import Model, cpu_ms, job_ms, times_vllm
from benchmarks.record import Row

OURS, COPY = "kvplan", "one large copy"
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


def rows_alone(work: Work, peer: Peer, medians: Mapping[str, Sample], detail: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one kind of job alone, of medians by worker."""
    model, ours, other = work.model, medians[OURS], medians[peer.name]
    gbps = {name: work.nbytes / one.wall / 1e9 for name, one in medians.items()}
    kept = {"blocks": work.blocks, "layers": model.layers, "page_nbytes": model.page_nbytes, "nbytes": work.nbytes,
            "cpu_is": CPU, **detail}  # fmt: skip
    for name, one in (("ours_ms", ours), ("peer_ms", other)):
        kept[name] = {key: value * 1e3 for key, value in one._asdict().items()}
    beside = {peer.name: gbps[peer.name]} | ({COPY: work.link} if isfinite(work.link) else {})
    share = times_vllm(work.direction, model.page_nbytes) if peer.is_vllm else None
    yield speed_row(model.name, work.told(), gbps[OURS], beside, link=work.link, share=share, detail=kept)
    most = job_ms(model, work.blocks)
    if most is not None:
        yield Row(model.name, f"{work.told()}: in all", "ms", ours.wall * 1e3, {peer.name: other.wall * 1e3}, most,
                  f"{most:g} ms", detail=kept)  # fmt: skip
    yield Row(model.name, f"{work.told()}: CPU", "ms", ours.cpu * 1e3, {peer.name: other.cpu * 1e3}, cpu_ms(ours.wall),
              "0.1 ms + 3 % of the job", detail=kept)  # fmt: skip


def rows_beside(work: Work, peer: Peer, compute: str, found: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of one kind of job beside one kind of compute.

    Args:
        found: ``gbps``, ``slowdown`` and ``detail`` of ours, the peer and one large copy.
    """
    ours, others = found[OURS], {name: found[name] for name in (peer.name, COPY)}
    share = times_vllm(work.direction, work.model.page_nbytes, compute) if peer.is_vllm else None
    detail = {"blocks": work.blocks, "nbytes": work.nbytes, **ours.detail, "peer": others[peer.name].detail}
    broken = [one.detail["broken"] for one in found.values() if "broken" in one.detail]
    detail |= {"broken": broken[0]} if broken else {}
    yield speed_row(work.model.name, work.told(compute), ours.gbps, {name: one.gbps for name, one in others.items()},
                    link=work.link, share=share, detail=detail)  # fmt: skip
    yield Row(work.model.name, f"{work.told(compute)}: compute slower", "x", ours.slowdown,
              {name: one.slowdown for name, one in others.items()}, detail=detail)  # fmt: skip
