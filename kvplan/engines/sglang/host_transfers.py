"""Transfers of pages between a device pool of SGLang and its host pool.

Source: SGLang 0.5.23, ``srt/mem_cache/pool_host/`` (``HostKVCache``), by duck type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvplan.backends import sglang as backend
from kvplan.base.values import integer, integers
from kvplan.engines.shared import blocks_of, first_stray, prepare, slot_array
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile


class HostTransfers:
    """An object that moves pages between a device pool and its host pool, in any of HiCache's host layouts.

    Indices are the engine's token slots, in whole pages, one host slot for each device slot. It compiles one program
    per direction, and another for each set of layers that is loaded alone.

    Args:
        device_pool: a device pool of the engine that ``kvplan.backends.sglang.describe`` accepts.
        host_pool: the host pool that was built for it. A device pool with index keys has two; give either.
        executor: the executor that moves the plans; its device must be the device pool's device.

    Attributes:
        device, host: layouts of the two pools.
        page_size: token slots per page.
        layers: global number of each layer, in the order of the pools.

    Raises:
        LayoutError: a pool is unknown, the host pool was built for another device pool, or their layers or parts
            differ. Or slots or layers are split over ranks (decode context parallelism, layer sharding).
        IncompatibleLayoutsError: heads or content differ.

    >>> from types import SimpleNamespace
    >>> import kvplan, numpy as np
    >>> k, v = ([np.full((12, 2, 8), 7, np.float16) for layer in range(3)] for _ in "kv")
    >>> device = SimpleNamespace(size=8, page_size=4, k_buffer=k, v_buffer=v)
    >>> host = SimpleNamespace(layout="page_first", page_size=4, head_num=2, layer_num=3,
    ...                        kv_buffer=np.zeros((2, 20, 3, 2, 8), np.float16))
    >>> with kvplan.Executor() as executor:
    ...     transfers = HostTransfers(device, host, executor)
    ...     transfers.backup([12, 13, 14, 15], [4, 5, 6, 7]).synchronize()
    >>> host.kv_buffer[:, 12:16].min(), host.kv_buffer[:, :12].max()
    (np.float16(7.0), np.float16(0.0))
    """

    def __init__(self, device_pool: Any, host_pool: Any, executor: Executor) -> None:
        kinds = f"{type(host_pool).__name__} beside {type(device_pool).__name__}"
        _refuse(device_pool, host_pool, kinds)
        whole = backend.describe(device_pool)
        parts = backend.describe(host_pool).parts
        # Index keys have their own host pool. If the host lacked any other part, that part would be lost.
        self.device = whole.slice(parts=[part for part in whole.parts if (part == "index") == (parts == ("index",))])
        held = getattr(host_pool, "layer_num", len(self.device.layers))
        if held != len(self.device.layers):
            raise LayoutError(
                f"{kinds} holds {held} layers, the device pool {len(self.device.layers)}; layers of a draft model, "
                "packed into the same host pool, are not described"
            )
        self.host = backend.describe(host_pool, layers=self.device.layers)
        self.page_size = integer("page_size of the device pool", device_pool.page_size, least=1)
        if self.page_size != integer("page_size of the host pool", host_pool.page_size, least=1):
            raise LayoutError(f"{kinds} has pages of {host_pool.page_size} tokens, the device pool of {self.page_size}")
        if self.device.heads != self.host.heads or self.device.block_nbytes != self.host.block_nbytes:
            raise LayoutError(f"{kinds} has pages of {self.host.block_nbytes} bytes, the device pool of "
                              f"{self.device.block_nbytes}; heads or their content differ")  # fmt: skip
        numbers = integers("model_layer_ids", getattr(device_pool, "model_layer_ids", ()))
        self.layers = numbers if len(numbers) >= len(self.device.layers) else self.device.layers
        self.executor = executor
        self._store = compile(self.device, self.host)
        self._load = compile(self.host, self.device)
        prepare(executor, [self._store])
        prepare(executor, [self._load], by_layer=True)
        self._of_layers: dict[tuple[int, ...], CopyProgram] = {self.device.layers: self._load}

    def backup(self, host_indices: Any, device_indices: Any, *, after: Any = None) -> Transfer:
        """Store all layers of device pages in host pages.

        Args:
            host_indices: token slots of the host pool: int sequence, numpy array, or torch tensor on any device. A
                tensor on a GPU is copied to the CPU first, which waits for the work that computes it.
            device_indices: token slots of the device pool, in the same order.
            after: the stream that computes the pages; see :meth:`kvplan.Executor.submit`.

        Raises:
            BlockIndexError: the lists differ in length, are not whole pages, or reach past the pool.
            OverlapError: a host page is given twice.
        """
        host, device = self._pages(host_indices, device_indices)
        return self.executor.submit(self._store.plan(device, host), after=after)

    def load(self, host_indices: Any, device_indices: Any, layer: Any = None, *, after: Any = None) -> Transfer:
        """Load host pages into device pages, layer by layer; see :meth:`wait_layer`.

        Args:
            host_indices, device_indices: as in :meth:`backup`.
            layer: number of a layer within the pools, from 0, like the engine's ``layer_id``; or several numbers; or
                None for all layers.
            after: the stream whose present work must end before the device pages are written.

        Raises:
            BlockIndexError: as in :meth:`backup`.
            LayoutError: the pools lack the layer.
            OverlapError: a device page is given twice.
        """
        host, device = self._pages(host_indices, device_indices)
        return self.executor.submit(self._loading(layer).plan(host, device), after=after, by_layer=True)

    def wait_layer(self, transfer: Transfer, layer: int, stream: Any = None) -> None:
        """Make later work on a stream wait for one layer of a load.

        Args:
            transfer: the transfer that :meth:`load` returned.
            layer: number of the layer within the pools, from 0.
            stream: the stream that waits; by default torch's current stream.

        Raises:
            LayoutError: the load does not move the layer.
            TransferError: the transfer failed.
        """
        transfer.wait_layer(self._number(layer), stream)

    def moves(self, layer: int) -> bool:
        """Return whether the pools have a layer, by its number within the pools, from 0."""
        place = integer("layer", layer)
        return 0 <= place < len(self.layers) and self.layers[place] in self.device.layers

    def _loading(self, layer: Any) -> CopyProgram:
        if layer is None:
            return self._load
        wanted = layer if isinstance(layer, Iterable) else (layer,)
        numbers = tuple(sorted(self._number(one) for one in wanted))
        if numbers not in self._of_layers:
            self._of_layers[numbers] = compile(self.host.slice(layers=numbers), self.device.slice(layers=numbers))
        return self._of_layers[numbers]

    def _number(self, layer: Any) -> int:
        right = f"the pools hold layers 0 to {len(self.layers) - 1}, counted within the pools"
        place = integer("layer", layer, right=right)
        if not self.moves(place):
            raise LayoutError(f"layer is {place}; {right}")
        return self.layers[place]

    def _pages(self, host_indices: Any, device_indices: Any) -> tuple[Int64Array, Int64Array]:
        host, device = slot_array(host_indices, "host_indices"), slot_array(device_indices, "device_indices")
        if host.size != device.size:
            raise BlockIndexError(f"host_indices names {host.size} slots and device_indices {device.size}; give one "
                                  "host slot for each device slot")  # fmt: skip
        return self._of_pages(host, "host_indices"), self._of_pages(device, "device_indices")

    def _of_pages(self, slots: Int64Array, name: str) -> Int64Array:
        pages = blocks_of(slots, self.page_size)
        if pages is not None:
            return pages
        at = first_stray(slots, self.page_size)
        if at is None:
            raise BlockIndexError(f"{name} names {slots.size} slots; give whole pages of {self.page_size}")
        raise BlockIndexError(f"{name}[{at}] is {int(slots[at])}, in the middle of another page; give whole pages of "
                              f"{self.page_size} slots")  # fmt: skip


def _refuse(device_pool: Any, host_pool: Any, kinds: str) -> None:
    """Raise an error for pools whose buffers can be described, but whose slots would be moved wrongly."""
    if getattr(host_pool, "dcp_size", 1) != 1:
        raise LayoutError(
            f"{kinds}: each slot is held by one of {host_pool.dcp_size} ranks (decode context parallelism)"
        )
    if getattr(host_pool, "shared_allocation_domain", None) is not None:
        raise LayoutError(f"{kinds}: the host pool moves what it holds (a shared allocation domain)")
    if getattr(device_pool, "layer_shard_enabled", False):
        raise LayoutError(f"{kinds}: each rank holds some of the layers (layer sharding)")
    for captured, own in (("device_k_buffers", "k_buffer"), ("device_v_buffers", "v_buffer"),
                          ("device_kv_buffers", "kv_buffer")):  # fmt: skip
        theirs, ours = getattr(host_pool, captured, None), getattr(device_pool, own, None)
        if theirs is None:
            continue
        addresses = [tensor.data_ptr() for tensor in ours or ()]
        if [tensor.data_ptr() for tensor in theirs[: len(addresses)]] != addresses:  # tensors of a draft model follow
            raise LayoutError(f"{kinds}: the host pool was built beside another device pool; its {captured} are not "
                              f"this one's {own}")  # fmt: skip
