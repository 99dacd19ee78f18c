"""An adapter for transformers: kvplan makes the transfers of CPU offloading in continuous batching.

The engine still decides which requests are offloaded, when they are restored, and which blocks they get. Source:
transformers 5.23.0, ``generation/continuous_batching/offloading_manager.py``; ``OffloadingManager`` is subclassed. It
is the same in 5.21 and 5.22.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvplan.backends import transformers as backend
from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines import versions
from kvplan.engines.shared import current_stream, prepare
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
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    cls: Any = type("KVPlanOffloading", (Offloading, OffloadingManager), {})
    processor.offloading_manager = cls(processor, manager.distributed_helper, config, space, policy)
    manager.batch_processor = processor
    return processor.offloading_manager


class Offloading:
    """What the engine's ``OffloadingManager`` does otherwise: its transfers are kvplan's.

    Attributes:
        executor: the executor that moves the plans.
        pool: layout of the host memory, in sectors like those of the cache.
    """

    _reserve_cpu_blocks: Any  # these are the engine's
    _compute_num_cpu_sectors: Any
    _request_id_to_cpu_blocks: Any
    _compute_stream: Any

    def __init__(
        self, processor: Any, distributed_helper: Any, config: Any, space: float, policy: Policy | None
    ) -> None:
        import torch
        from transformers.generation.continuous_batching.cache_allocators import CachePool

        cache, threshold = processor.cache, config.cpu_offload_space_safety_threshold
        super().__init__(  # type: ignore[call-arg]  # of OffloadingManager
            cache=cache,
            scheduler=processor.scheduler,
            cpu_offload_space_gib=0.0,  # no pool of its own
            safety_threshold=threshold,
            compute_stream=processor.inputs_and_outputs.compute_stream,
            distributed_helper=distributed_helper,
        )
        self.cache = cache
        self._allocators = cache.cache_allocators  # by attention type
        sectors = torch.tensor(self._compute_num_cpu_sectors(space, threshold), dtype=torch.int32)
        self._num_cpu_sectors = int(distributed_helper.tp_all_reduce_min(sectors, on_cpu=True).item())
        if not self._num_cpu_sectors:
            raise KVPlanError(
                f"cpu_offload_space of {space} GiB is too small for one sector of {cache.bytes_per_sector} bytes"
            )
        self._cpu_pool: Any = CachePool(self._num_cpu_sectors, len(self._allocators), num_reserved_sectors=0)
        for allocator in self._allocators.values():
            self._cpu_pool.set_blocks_per_sector(allocator.index, allocator.blocks_per_sector)
        whole = KVLayout.from_tensors("block dim", cache.cache_tensor.view(-1, cache.bytes_per_sector))
        self.pool = allocate("block dim", like=whole, num_blocks=self._num_cpu_sectors)
        there = SimpleNamespace(cache_tensor=self.pool.tensors.view(-1), cache_allocators=self._allocators)
        pairs = [[backend.describe(side, group=name) for side in (cache, there)] for name in self._allocators]
        self._store = Groups([compile(gpu, host) for gpu, host in pairs])
        self._load = Groups([compile(host, gpu) for gpu, host in pairs])
        self.executor = Executor(str(cache.cache_tensor.device), policy or BESIDE_COMPUTE)
        prepare(self.executor, [*self._store.programs, *self._load.programs])

    def _offload_to_cpu(self, victims: Iterable[Any], victim_block_tables: dict[str, Tables]) -> set[str]:
        """Store the requests that fit, and return their ids. The engine computes other requests again."""
        taken: list[tuple[Any, Tables, Tables]] = []  # the state of a request, its blocks, and those of the host
        for state in victims:
            blocks = {name: ids for name, ids in victim_block_tables[state.request_id].items() if ids}
            room = self._reserve_cpu_blocks({name: len(ids) for name, ids in blocks.items()}) if blocks else None
            if room is not None:
                taken.append((state, blocks, room))
        if not taken:
            return set()
        try:
            self._move(self._store, [(blocks, room) for _, blocks, room in taken])
        except KVPlanError:  # such as a path that needs pinned memory, and a pool that could not be pinned
            logger.exception("%d requests could not be stored; they are computed anew", len(taken))
            for _, _, room in taken:
                self._give_back(room)
            return set()
        for state, _, room in taken:
            self._request_id_to_cpu_blocks[state.request_id] = room
            state.is_cpu_offloaded = True
        return {state.request_id for state, *_ in taken}

    def restore_scheduled_requests(self, requests_in_batch: Iterable[Any]) -> None:
        """Load the stored requests of a batch into their new blocks."""
        futures = [future for future in requests_in_batch if future.state.is_cpu_offloaded]
        moves = []
        for future in futures:
            request = future.state.request_id
            stored = self._request_id_to_cpu_blocks[request]
            tables = {name: self._allocators[name].block_table.get(request, []) for name in stored}
            counts = {name: min(len(ids), len(tables[name])) for name, ids in stored.items()}
            moves.append(tuple({name: ids[name][:n] for name, n in counts.items()} for ids in (stored, tables)))
        if moves:
            self._move(self._load, moves)
        for future in futures:  # a block is freed only after its load is submitted
            state = future.state
            self._give_back(self._request_id_to_cpu_blocks.pop(state.request_id))
            state.is_cpu_offloaded = False
            if self.cache.use_prefix_sharing:  # whole blocks are hashed again, so that lookups find them
                for name, allocator in self._allocators.items():
                    whole = state.position_offset // allocator.tokens_per_page
                    if whole:
                        future.complete_blocks[name] = future.complete_blocks.get(name, 0) + whole

    def _give_back(self, room: Tables) -> None:
        for name, blocks in room.items():
            self._cpu_pool.free_blocks(self._allocators[name].index, blocks)

    def _move(self, groups: Groups, moves: Iterable[tuple[Tables, ...]]) -> Transfer:
        """Submit one transfer for all requests and attention types, in the order of the compute stream.

        Args:
            groups: the programs of each attention type.
            moves: for each request, its blocks in the source, and in the destination.
        """
        sides = [[[block for each in tables for block in each.get(name, [])] for name in self._allocators]
                 for tables in zip(*moves, strict=True)]  # fmt: skip
        stream = self._compute_stream or current_stream(self.executor.device)
        transfer = self.executor.submit(groups.plan(*sides), after=stream)
        if stream is None:
            transfer.synchronize()
        else:  # the next computation may write blocks that this transfer reads, or read blocks that it writes
            transfer.wait(stream)
        return transfer
