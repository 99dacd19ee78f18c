"""An adapter for transformers: kvplan makes the transfers of CPU offloading in continuous batching.

The engine still decides which requests are offloaded, when they are restored, and which blocks they get. Source:
transformers 5.23.0, ``generation/continuous_batching/offloading_manager.py``; ``OffloadingManager`` is subclassed. It
is the same in 5.21 and 5.22.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

from kvplan.backends import transformers as backend
from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines import versions
from kvplan.engines.startup import prepare
from kvplan.engines.streams import current_stream
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.allocate import allocate
from kvplan.plan.copy_program import compile
from kvplan.ranks.groups import Groups

WRITTEN_FOR = versions.TRANSFORMERS.written_for  # the version of transformers whose members are used here
logger = logging.getLogger("kvplan.engines.transformers")
versions.check(versions.TRANSFORMERS)

Tables = dict[str, list[int]]  # block ids by attention type


def offload(manager: Any, *, cpu_offload_space: float | None = None, policy: Policy | None = None) -> Any:
    """Let kvplan move the blocks that continuous batching offloads to the CPU and restores.

    Call it between ``model.init_continuous_batching(...)`` and ``manager.start()``, and again after a ``stop()``. On a
    GPU, transfers are ordered with the engine's compute stream and never block the CPU. On a CPU, each transfer is
    finished when the engine's call returns; transformers itself cannot offload there.

    Args:
        manager: a ``ContinuousBatchingManager`` that has not been started.
        cpu_offload_space: GiB of host memory for offloaded requests; by default the value of the manager's
            ``ContinuousBatchingConfig``. The engine's safety threshold limits it.
        policy: policy of the executor; by default ``Policy(overlap="decode")``, since the model runs meanwhile.

    Returns:
        The new offloading manager of the engine. Its ``executor.stats()`` counts the transfers.

    Raises:
        KVPlanError: the manager runs, no space is given, or the space is less than one sector of the cache.
        LayoutError: ``kvplan.backends.transformers`` does not know the cache.
    """
    config = getattr(manager, "continuous_batching_config", None)
    if config is None or not hasattr(manager, "_create_batch_processor"):
        raise KVPlanError(
            f"manager is a {type(manager).__name__}; give a ContinuousBatchingManager of transformers {WRITTEN_FOR}"
        )
    if manager.is_running():
        raise KVPlanError("the manager runs already; call offload() before manager.start()")
    asked = config.cpu_offload_space
    space = asked if cpu_offload_space is None else cpu_offload_space
    if not space or space < 0:
        raise KVPlanError(
            f"cpu_offload_space is {space!r}; give a positive number of GiB of host memory, here or in the "
            "ContinuousBatchingConfig"
        )
    config.cpu_offload_space = 0.0  # so that the engine pins no pool of its own
    try:
        processor = manager._create_batch_processor()
    finally:
        config.cpu_offload_space = asked
    made = _manager_class()(processor, manager.distributed_helper, config, space, policy)
    processor.offloading_manager = made
    manager.batch_processor = processor
    return made


@cache
def _manager_class() -> Any:
    """Return the subclass of ``OffloadingManager``, made at the first call, which imports transformers."""
    from transformers.generation.continuous_batching.cache_allocators import CachePool
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    class KVPlanOffloading(OffloadingManager):  # type: ignore[misc]  # untyped, and not always there
        """The engine's offloading manager, with transfers by kvplan.

        Attributes:
            executor: the executor that moves the plans.
            pool: layout of the host memory, in sectors like those of the cache.
        """

        def __init__(
            self, processor: Any, distributed_helper: Any, config: Any, space: float, policy: Policy | None
        ) -> None:
            import torch

            cache, threshold = processor.cache, config.cpu_offload_space_safety_threshold
            super().__init__(
                cache=cache,
                scheduler=processor.scheduler,
                cpu_offload_space_gib=0.0,  # no pool of its own
                safety_threshold=threshold,
                compute_stream=processor.inputs_and_outputs.compute_stream,
                distributed_helper=distributed_helper,
            )
            sectors = torch.tensor(self._compute_num_cpu_sectors(space, threshold), dtype=torch.int32)
            self._num_cpu_sectors = int(distributed_helper.tp_all_reduce_min(sectors, on_cpu=True).item())
            if not self._num_cpu_sectors:
                raise KVPlanError(
                    f"cpu_offload_space of {space} GiB is too small for one sector of {cache.bytes_per_sector} bytes"
                )
            self._cpu_pool = CachePool(self._num_cpu_sectors, len(cache.cache_allocators), num_reserved_sectors=0)
            for allocator in cache.cache_allocators.values():
                self._cpu_pool.set_blocks_per_sector(allocator.index, allocator.blocks_per_sector)
            whole = KVLayout.from_tensors("block dim", cache.cache_tensor.view(-1, cache.bytes_per_sector))
            self.pool = allocate("block dim", like=whole, num_blocks=self._num_cpu_sectors)
            there = SimpleNamespace(cache_tensor=self.pool.tensors.view(-1), cache_allocators=cache.cache_allocators)
            pairs = [(backend.describe(cache, group=name), backend.describe(there, group=name)) for name in self._names]
            self._store = Groups([compile(gpu, host) for gpu, host in pairs])
            self._load = Groups([compile(host, gpu) for gpu, host in pairs])
            self.executor = Executor(str(cache.cache_tensor.device), policy or BESIDE_COMPUTE)
            prepare(self.executor, [*self._store.programs, *self._load.programs])

        @property
        def _names(self) -> list[str]:
            return list(self.cache.cache_allocators)

        def _offload_to_cpu(self, victims: Iterable[Any], victim_block_tables: dict[str, Tables]) -> set[str]:
            """Store the requests that fit, and return their ids. The engine computes other requests again."""
            taken: dict[str, tuple[Tables, Tables]] = {}
            states = []
            for state in victims:
                held = {name: blocks for name, blocks in victim_block_tables[state.request_id].items() if blocks}
                room = self._reserve_cpu_blocks({name: len(blocks) for name, blocks in held.items()}) if held else None
                if room is not None:
                    taken[state.request_id] = held, room
                    states.append(state)
            if not taken:
                return set()
            try:
                self._move(self._store, *zip(*taken.values(), strict=True))
            except KVPlanError:  # such as a path that needs pinned memory, and a pool that could not be pinned
                logger.exception("%d requests could not be stored; they are computed anew", len(taken))
                for _, room in taken.values():
                    self._give_back(room)
                return set()
            for state in states:
                self._request_id_to_cpu_blocks[state.request_id] = taken[state.request_id][1]
                state.is_cpu_offloaded = True
            return set(taken)

        def restore_scheduled_requests(self, requests_in_batch: Iterable[Any]) -> None:
            """Load the stored requests of a batch into their new blocks."""
            moves, states = [], []
            for future in requests_in_batch:
                if not future.state.is_cpu_offloaded:
                    continue
                request = future.state.request_id
                stored = self._request_id_to_cpu_blocks[request]
                tables = {name: each.block_table.get(request, []) for name, each in self.cache.cache_allocators.items()}
                both = {name: min(len(blocks), len(tables[name])) for name, blocks in stored.items()}
                moves.append((
                    {name: stored[name][:count] for name, count in both.items()},
                    {name: tables[name][:count] for name, count in both.items()},
                ))  # fmt: skip
                states.append(future)
            if not states:
                return
            self._move(self._load, *zip(*moves, strict=True))
            for future in states:  # a block is freed only after its load is submitted
                state = future.state
                self._give_back(self._request_id_to_cpu_blocks.pop(state.request_id))
                state.is_cpu_offloaded = False
                if self.cache.use_prefix_sharing:  # whole blocks are hashed again, so that lookups find them
                    for name, allocator in self.cache.cache_allocators.items():
                        whole = state.position_offset // allocator.tokens_per_page
                        if whole:
                            future.complete_blocks[name] = future.complete_blocks.get(name, 0) + whole

        def _give_back(self, room: Tables) -> None:
            pool: Any = self._cpu_pool
            for name, blocks in room.items():
                pool.free_blocks(self.cache.cache_allocators[name].index, blocks)

        def _move(self, groups: Groups, src: Iterable[Tables], dst: Iterable[Tables]) -> Transfer:
            """Submit one transfer for all requests and attention types, in the order of the compute stream."""
            sides = [[[block for each in tables for block in each.get(name, [])] for name in self._names]
                     for tables in (src, dst)]  # fmt: skip
            stream = self._compute_stream or current_stream(self.executor.device)
            transfer = self.executor.submit(groups.plan(*sides), after=stream)
            if stream is None:
                transfer.synchronize()
            else:  # the next computation may write blocks that this transfer reads, or read blocks that it writes
                transfer.wait(stream)
            return transfer

    return KVPlanOffloading
