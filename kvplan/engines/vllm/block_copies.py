"""The copies of vLLM's ``SimpleCPUOffloadConnector``: lists of blocks between regions of a GPU and a host pool.

Source: vLLM 0.31.0 to 0.33.0, ``v1/simple_kv_offload/copy_backend.py`` (``DmaCopyBackend``), ``worker.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.startup import prepare
from kvplan.engines.vllm.pages import check_bytes
from kvplan.errors import LayoutError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.allocate import allocate
from kvplan.plan.copy_program import CopyProgram, compile  # noqa: A004


class Ending(NamedTuple):
    """The end of a transfer with the members of an event that vLLM asks for."""

    transfer: Transfer

    def query(self) -> bool:
        """Return whether the transfer has ended.

        Raises:
            TransferError: it has failed. vLLM's connector knows no failed copies, so its engine ends.
        """
        if not self.transfer.done():
            return False
        self.transfer.result()
        return True

    def synchronize(self) -> None:
        """Wait until the transfer has ended; raise TransferError if it has failed."""
        self.transfer.synchronize()


class BlockCopies:
    """A host pool of whole blocks, and the copies between it and regions of a device.

    A block of the pool is one piece that holds the block's bytes of all regions, one region after another. So the
    pool's side of a copy is large, whatever the layout of the engine's cache.

    Args:
        regions: torch tensors of single bytes, ``(blocks, bytes of a block)``; there may be gaps between the rows.
        host_blocks: number of blocks of the pool.
        policy: policy of the executors; by default ``Policy(overlap="decode")``, since the model runs meanwhile.

    Attributes:
        host_rows: for each region, its part of the pool: ``(host_blocks, bytes of a block)``.

    Raises:
        LayoutError: there are no regions, or one does not have the form given above.
        PathError: no path can be used on the device, or the policy's path cannot.

    >>> import torch
    >>> regions = [torch.arange(8 * 64, dtype=torch.int16).view(torch.int8).view(8, 128) for layer in range(3)]
    >>> copies, events = BlockCopies(regions, host_blocks=4), []
    >>> copies.launch_copy([5, 6], [3, 0], is_store=True, event_idx=0, events_list=events)
    >>> events[0][1].synchronize()
    >>> events[0][0], events[0][1].query(), bool((copies.host_rows[2][3] == regions[2][5]).all())
    (0, True, True)
    >>> copies.shutdown()
    """

    def __init__(self, regions: Sequence[Any], host_blocks: int, policy: Policy | None = None) -> None:
        if not regions:
            raise LayoutError("there are no regions; give a tensor of (blocks, bytes) for each")
        for number, region in enumerate(regions):
            check_bytes(f"region {number}", region)
        ends = list(accumulate(region.shape[1] for region in regions))
        page = KVLayout.from_tensors("block dim", regions[0].new_zeros((1, ends[-1]), device="cpu"))
        self._pool = allocate("block dim", like=page, num_blocks=host_blocks)
        rows = self._pool.tensors
        self.host_rows = [rows[:, end - region.shape[1] : end] for region, end in zip(regions, ends, strict=True)]
        device, host = _layout(regions), _layout(self.host_rows)
        self._store, self._load = compile(device, host), compile(host, device)
        # Stores and loads have an executor each, as they have a stream each in vLLM.
        name, policy = str(regions[0].device), BESIDE_COMPUTE if policy is None else policy
        self._storing, self._loading = Executor(name, policy), Executor(name, policy)
        prepare(self._storing, [self._store])
        prepare(self._loading, [self._load])

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Begin to copy blocks, and return at once; vLLM's worker calls this.

        Args:
            src_blocks: numbers of the blocks to read.
            dst_blocks: as many numbers of blocks to write.
            is_store: whether the blocks go from the device to the pool.
            event_idx: vLLM's number of the copy.
            events_list: where the copy's end is appended, as ``(event_idx, end)``.
            wait_event: an event or a stream that the copy waits for.

        Raises:
            PlanError: the numbers do not fit.
            TransferError: the copies are shut down.
        """
        program, executor = (self._store, self._storing) if is_store else (self._load, self._loading)
        transfer = executor.submit(program.plan(src_blocks, dst_blocks), after=wait_event)
        events_list.append((event_idx, Ending(transfer)))

    @property
    def programs(self) -> tuple[CopyProgram, CopyProgram]:
        """The programs of stores and of loads."""
        return self._store, self._load

    def shutdown(self) -> None:
        """Wait for the copies, and give threads and memory of the GPU back."""
        self._storing.close()
        self._loading.close()


def _layout(regions: Sequence[Any]) -> KVLayout:
    """Describe the rows of regions; regions whose blocks have different sizes are different parts."""
    alike: dict[int, dict[int, Any]] = {}
    for number, region in enumerate(regions):
        alike.setdefault(region.shape[1], {})[number] = region
    made = [
        KVLayout.from_tensors("layer: block dim", list(some.values()), layers=list(some), part=f"bytes_{size}")
        for size, some in alike.items()
    ]
    return made[0] if len(made) == 1 else KVLayout.merge(made)
