"""SGLang: what HiCache moves between a device pool and a host pool, moved by kvplan.

Source: SGLang 0.5.23, ``srt/mem_cache/l2_transfer.py`` (``L2Transfer``, ``L2TransferEngine``),
``srt/managers/cache_controller.py`` (``HiCacheController``) and ``srt/mem_cache/pool_host/`` (``HostKVCache``), all by
duck type: nothing of the engine is imported. Which pages leave and come back, and when, stays the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from kvplan.backends import sglang as backend
from kvplan.base.integers import integer, integers
from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.slots import blocks_of, first_stray, slot_array
from kvplan.engines.startup import prepare
from kvplan.engines.streams import current_stream
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile  # noqa: A004

WRITTEN_FOR = "0.5.23"  # the version of SGLang whose members are used here
logger = logging.getLogger(__name__)


class HostTransfers:
    """Moves pages between a device pool and the host pool beside it; in each of the host's layouts.

    Indices are the engine's: token slots, in whole pages, one of the host for each of the device. A program is compiled
    once a direction, and once more for each set of layers that is asked for alone.

    Args:
        device_pool: a device pool of the engine, as ``kvplan.backends.sglang.describe`` takes it.
        host_pool: the host pool that was built beside it. Of a device pool with index keys, either of its two.
        executor: what moves; of the device that holds the device pool.

    Attributes:
        device, host: the two layouts.
        page_size: token slots a page.
        layers: global number of every layer, at the place where the pools have it.

    Raises:
        LayoutError: a pool that is not described, that was built beside another one, that holds other layers or
            parts, or whose slots are dealt over ranks (decode context parallelism, sharded layers).
        IncompatibleLayoutsError: heads or content that differ.

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
        parts = _host_parts(host_pool)
        # Index keys have a host pool of their own; any other part that the host lacks would be lost.
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
        """Store pages of the device into pages of the host, all layers.

        Args:
            host_indices: token slots of the host pool; int sequence, numpy array, or torch tensor on any device. One
                on a GPU is copied to the CPU first, which waits for whatever makes it.
            device_indices: token slots of the device pool, in the same order.
            after: as of :meth:`kvplan.Executor.submit`: the stream that computes the pages.

        Raises:
            BlockIndexError: lists of different lengths, that are no whole pages, or past the pool.
            OverlapError: a page of the host named twice.
        """
        host, device = self._pages(host_indices, device_indices)
        return self.executor.submit(self._store.plan(device, host), after=after)

    def load(self, host_indices: Any, device_indices: Any, layer: Any = None, *, after: Any = None) -> Transfer:
        """Load pages of the host into pages of the device, layer by layer (:meth:`wait_layer`).

        Args:
            host_indices, device_indices: as of :meth:`backup`.
            layer: number of one layer within the pools, from 0, as the engine's ``layer_id``; or several; or all.
            after: the stream after whose work so far the device's pages may be written.

        Raises:
            BlockIndexError: as of :meth:`backup`.
            LayoutError: a layer that the pools have not.
            OverlapError: a page of the device named twice.
        """
        host, device = self._pages(host_indices, device_indices)
        return self.executor.submit(self._loading(layer).plan(host, device), after=after, by_layer=True)

    def wait_layer(self, transfer: Transfer, layer: int, stream: Any = None) -> None:
        """Order what follows on a stream after one layer of a load.

        Args:
            transfer: what :meth:`load` returned.
            layer: its number within the pools, from 0.
            stream: by default torch's current stream.

        Raises:
            LayoutError: a layer that the load does not move.
            TransferError: the transfer failed.
        """
        transfer.wait_layer(self._number(layer), stream)

    def moves(self, layer: int) -> bool:
        """Whether the pools hold a layer, by its number within them, from 0."""
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
        right = f"the pools hold layers 0 to {len(self.layers) - 1}, by their places"
        place = integer("layer", layer, right=right)
        if not self.moves(place):
            raise LayoutError(f"layer is {place}; {right}")
        return self.layers[place]

    def _pages(self, host_indices: Any, device_indices: Any) -> tuple[Int64Array, Int64Array]:
        host, device = slot_array(host_indices, "host_indices"), slot_array(device_indices, "device_indices")
        if host.size != device.size:
            raise BlockIndexError(f"host_indices names {host.size} slots and device_indices {device.size}; give one of "
                                  "the host for each of the device")  # fmt: skip
        return self._of_pages(host, "host_indices"), self._of_pages(device, "device_indices")

    def _of_pages(self, slots: Int64Array, name: str) -> Int64Array:
        pages = blocks_of(slots, self.page_size)
        if pages is not None:
            return pages
        at = first_stray(slots, self.page_size)
        if at is None:
            raise BlockIndexError(f"{name} names {slots.size} slots; pages have {self.page_size}, and are moved whole")
        raise BlockIndexError(f"{name}[{at}] is {int(slots[at])}, in the middle of another page; pages have "
                              f"{self.page_size} slots, and are moved whole")  # fmt: skip

    def __repr__(self) -> str:
        return f"HostTransfers({self.device!r}, {self.host!r})"


def _refuse(device_pool: Any, host_pool: Any, kinds: str) -> None:
    """Refuse, by name, what would be moved wrongly though its buffers can be described."""
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
        if [tensor.data_ptr() for tensor in theirs[: len(addresses)]] != addresses:  # those of a draft model follow
            raise LayoutError(f"{kinds}: the host pool was built beside another device pool; its {captured} are not "
                              f"this one's {own}")  # fmt: skip


def _host_parts(host_pool: Any) -> tuple[str, ...]:
    return backend.describe(host_pool).parts


def attach(controller: Any, *, policy: Policy | None = None) -> TransferEngine:
    """Let kvplan make the transfers of a HiCache controller, between the GPU and the host.

    Call it once the controller is built and before it moves anything. The controller's queues, decisions, events and
    fences stay as they are, also those of the storage behind the host pool. Pools that kvplan does not know, such as
    states of linear attention, go on as before, which is logged once.

    Run the engine with ``--hicache-io-backend direct``, which keeps indices on the CPU. With ``kernel`` they are copied
    back, and the scheduler waits for what computes them.

    Args:
        controller: a ``HiCacheController``, or one of its kinds.
        policy: how the executor moves; by default ``Policy(overlap="decode")``, since the model runs beside it.

    Returns:
        What took the place of ``controller.l2_transfer_engine``; its ``executor`` counts
        (``executor.stats()``), and ``detach()`` gives the engine's own back.

    Raises:
        KVPlanError: what is no controller, one that has kvplan already, or one with transfers in flight.
    """
    own = getattr(controller, "l2_transfer_engine", None)
    if isinstance(own, TransferEngine):
        raise KVPlanError("kvplan is attached to this controller already")
    if not hasattr(own, "submit_host_to_device"):
        raise KVPlanError(
            f"controller is a {type(controller).__name__}; give a HiCacheController of SGLang {WRITTEN_FOR}"
        )
    if controller.has_inflight_device_transfers():
        raise KVPlanError("the controller has transfers in flight; attach before it moves anything")
    engine = TransferEngine(own, Executor(controller.device, policy or BESIDE_COMPUTE))
    pools = getattr(controller, "mem_pool_host", None), getattr(controller, "mem_pool_device", None)
    if None not in pools:
        engine.transfers_of(*pools)  # now, so that no request waits for what is compiled
    engine._controller = controller
    controller.l2_transfer_engine = engine
    return engine


class TransferEngine:
    """Stands before the engine's ``L2TransferEngine``: its streams and events, kvplan's copies.

    Every transfer of a pair of pools that kvplan knows is handed on with a host pool that copies by kvplan. All else of
    the engine's is handed on as it is.

    Args:
        own: the engine's.
        executor: what moves.

    Attributes:
        executor: what moves.
    """

    def __init__(self, own: Any, executor: Executor) -> None:
        self.executor = executor
        self._own = own
        self._controller: Any = None
        self._pairs: dict[tuple[int, int], tuple[Any, Any, HostTransfers | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def submit_device_to_host(self, transfers: Sequence[Any]) -> Any:
        """As the engine's; returns its completion."""
        return self._own.submit_device_to_host([self._taken(transfer, None) for transfer in transfers])

    def submit_host_to_device(self, transfers: Sequence[Any], *, transfer_layer_id_max: int, **more: Any) -> Any:
        """As the engine's; returns its completion."""
        taken = [self._taken(transfer, transfer_layer_id_max) for transfer in transfers]
        return self._own.submit_host_to_device(taken, transfer_layer_id_max=transfer_layer_id_max, **more)

    def detach(self) -> None:
        """Give the controller its own engine back, when what was submitted has ended; close the executor."""
        if self._controller is not None:
            self._controller.l2_transfer_engine = self._own
        self.executor.close()

    def transfers_of(self, host_pool: Any, device_pool: Any) -> HostTransfers | None:
        """What moves between two pools; None where they are left to the engine."""
        key = id(host_pool), id(device_pool)
        if key not in self._pairs:
            try:
                found = HostTransfers(device_pool, host_pool, self.executor)
            except KVPlanError as error:
                logger.warning("left to SGLang's own transfers: %s", error)
                found = None
            self._pairs[key] = host_pool, device_pool, found
        return self._pairs[key][2]

    def _taken(self, transfer: Any, layers: int | None) -> Any:
        """The transfer with kvplan's host pool, and its indices on the CPU; as it is where it is not ours."""
        pair = None if transfer.is_draft else self.transfers_of(transfer.host_pool, transfer.device_pool)
        if pair is None:
            return transfer
        # In the caller's stream, as the engine does it for its own "direct" copies: in the stream of transfers the CPU
        # would wait for all that those are fenced by.
        host, device = transfer.host_indices.cpu(), transfer.device_indices.cpu()
        named: Iterable[Any] = range(layers or 0)
        if transfer.layer_mapper is not None:
            named = [transfer.layer_mapper(layer) for layer in named]
        wanted = tuple(sorted({layer for layer in named if layer is not None and pair.moves(layer)}))
        return transfer._replace(
            host_pool=_HostPool(transfer.host_pool, pair, wanted), host_indices=host, device_indices=device
        )


class _HostPool:
    """A host pool of one submission: the engine's, but for the copies.

    The engine asks for them in its transfer stream, all layers to store, or one layer after the other to load. The
    first layer that is asked for submits the load of all; every one of them is then waited for.
    """

    def __init__(self, own: Any, pair: HostTransfers, wanted: tuple[int, ...]) -> None:
        self._own, self._pair, self._wanted = own, pair, wanted
        self._load: Transfer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
    ) -> None:
        del device_pool, io_backend
        stream = current_stream(self._pair.device)
        self._pair.backup(host_indices, device_indices, after=stream).wait(stream)

    def load_to_device_per_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **more: Any
    ) -> None:
        del device_pool, io_backend, more
        if layer_id not in self._wanted or not len(host_indices):
            return
        stream = current_stream(self._pair.device)
        if self._load is None:
            self._load = self._pair.load(host_indices, device_indices, self._wanted, after=stream)
        self._pair.wait_layer(self._load, layer_id, stream)
