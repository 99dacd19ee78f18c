"""CPU offloading of vLLM 0.33 by kvplan: the specs that ``kv_connector_extra_config`` names, and a connector.

=================================  =====================================================================================
``KVPlanOffloadingSpec``           in the place of vLLM's ``CPUOffloadingSpec``
``KVPlanTieringOffloadingSpec``    in the place of its ``TieringOffloadingSpec``, canonical pages included
``KVPlanOffloadingWorker``         the worker of both; scheduler, eviction, tiers and the shared region are vLLM's
``KVPlanOffloadingConnector``      vLLM's ``OffloadingConnector``, for which a failed transfer is no end of the engine
=================================  =====================================================================================

Source: vLLM 0.33.0, ``v1/kv_offload/cpu/spec.py``, ``v1/kv_offload/tiering/spec.py``, ``v1/kv_offload/factory.py``,
``distributed/kv_transfer/kv_connector/v1/offloading_connector.py``. vLLM is imported when a name is first asked for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.vllm.pages import canonical_nbytes
from kvplan.engines.vllm.worker import Worker
from kvplan.errors import PathError

NAMES = (
    "KVPlanOffloadingConnector",
    "KVPlanOffloadingSpec",
    "KVPlanOffloadingWorker",
    "KVPlanTieringOffloadingSpec",
)


def __getattr__(name: str) -> Any:
    """The classes by name: they derive from vLLM's, which are imported here."""
    if name == "KVPlanOffloadingConnector":
        from kvplan.engines.vllm import connector as vllm_connector

        return vllm_connector.KVPlanOffloadingConnector
    if name in NAMES:
        return next(made for made in _classes() if made.__name__ == name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(NAMES)}")


def policy_of(extra_config: Mapping[str, Any]) -> Policy:
    """What ``kv_connector_extra_config`` asks of the executor, under ``"kvplan"``: fields of :class:`kvplan.Policy`.

    Raises:
        PathError: what is no field, or a value that is none.

    >>> policy_of({"cpu_bytes_to_use": 1 << 30}).overlap
    'decode'
    >>> policy_of({"kvplan": {"path": "staged", "staging_bytes": 1 << 27}}).path
    'staged'
    """
    given = extra_config.get("kvplan", {})
    known = [field.name for field in fields(Policy)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise PathError(
            f"kv_connector_extra_config has 'kvplan': {given!r}; give a mapping with fields of kvplan.Policy: "
            f"{', '.join(known)}"
        )
    return Policy(**{"overlap": BESIDE_COMPUTE.overlap, **given})


@functools.cache
def _classes() -> tuple[type[Any], ...]:
    import torch
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.cpu.spec import _REGION_SEGMENTS, CPUOffloadingSpec, _all_workers_barrier
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    class KVPlanOffloadingWorker(Worker, OffloadingWorker):  # type: ignore[misc]
        """vLLM's ``CPUOffloadingWorker``, with its arguments, on a kvplan executor.

        Args:
            kv_caches: the canonical caches.
            blocks_per_chunk: blocks of the device in a chunk of the host.
            num_cpu_chunks: chunks of a pool of its own, where there is no region.
            mmap_region: the shared region; its owner from here on, if nothing is raised.
            canonical_layout: whether the region holds canonical pages.
            policy: of the executor.
        """

        def __init__(
            self,
            kv_caches: Any,
            blocks_per_chunk: int,
            num_cpu_chunks: int,
            mmap_region: Any = None,
            canonical_layout: bool = False,
            policy: Policy | None = None,
        ) -> None:
            device_rows = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
            on_device = device_rows[0].device.type != "cpu"
            if canonical_layout:
                pages = canonical_nbytes(kv_caches.group_data_refs, len(device_rows))
            else:
                pages = [rows.shape[1] for rows in device_rows]
            sizes = [page * blocks_per_chunk for page in pages]
            if mmap_region is None:
                pool = torch.zeros((num_cpu_chunks, sum(sizes)), dtype=torch.int8, pin_memory=on_device)
                ends = itertools.accumulate(sizes)
                host_rows = [pool[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
            else:
                if on_device:
                    # All of it, not only this worker's slots: an executor asks for stretches, and takes memory that is
                    # not pinned between two slots for pageable; and each slot would be a registration, and a seam.
                    pin_mmap_region(mmap_region)
                make = (
                    mmap_region.create_next_canonical_view if canonical_layout else mmap_region.create_next_worker_view
                )
                host_rows = [make(size) for size in sizes]
            super().__init__(
                kv_caches.group_data_refs, device_rows, host_rows, blocks_per_chunk, canonical=canonical_layout,
                policy=policy, result=TransferResult, release=None if mmap_region is None else mmap_region.cleanup,
            )  # fmt: skip

    def worker_of(spec: Any, kv_caches: Any, region: Any, *, canonical: bool) -> Any:
        """The worker of a region, which is given back where the worker cannot be made."""
        try:
            return KVPlanOffloadingWorker(
                kv_caches, spec.blocks_per_chunk, spec.num_chunks, region, canonical_layout=canonical,
                policy=policy_of(spec.extra_config),
            )  # fmt: skip
        except Exception:
            if region is not None:
                region.cleanup()
            raise

    class KVPlanOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
        """vLLM's ``CPUOffloadingSpec`` with kvplan's worker."""

        def create_worker(self, kv_caches: Any) -> Any:
            """A worker over the shared region, or over a pool of its own where the platform has none."""
            region = None
            if self._uses_shared_region() and self.num_chunks > 0:
                parallel = self.config.parallel
                region = SharedOffloadRegion(
                    engine_id=self.config.engine_id,
                    num_chunks=self.num_chunks,
                    rank=0 if self.replicated_layout else parallel.rank,
                    kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                    cpu_page_size=self.cpu_page_size_per_worker,
                    barrier=_all_workers_barrier,
                    num_segments=_REGION_SEGMENTS,
                    populate_shard=(parallel.rank, parallel.world_size) if self.replicated_layout else None,
                )
            return worker_of(self, kv_caches, region, canonical=False)

    class KVPlanTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
        """vLLM's ``TieringOffloadingSpec`` with kvplan's worker."""

        def create_worker(self, kv_caches: Any) -> Any:
            """A worker over the region that the tiers read and write."""
            canonical = self.config.canonical_layout
            if canonical:
                self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            return worker_of(self, kv_caches, region, canonical=canonical)

    made = KVPlanOffloadingWorker, KVPlanOffloadingSpec, KVPlanTieringOffloadingSpec
    for each in made:
        each.__qualname__ = each.__name__  # as the module has them
    return made
