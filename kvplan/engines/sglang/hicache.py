"""An adapter for SGLang's HiCache: kvplan makes its transfers; with ``KVPLAN_SGLANG``, in each of SGLang's processes.

Source: SGLang 0.5.23, ``srt/mem_cache/l2_transfer.py`` (``L2Transfer``, ``L2TransferEngine``) and
``srt/managers/cache_controller.py`` (``HiCacheController``), by duck type: nothing of the engine is imported
but ``srt/plugins`` (entry points of ``sglang.srt.plugins``, ``HookRegistry``), by the plugin.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines import versions
from kvplan.engines.plugins import asked_policy, show_lines
from kvplan.engines.sglang.host_transfers import HostTransfers
from kvplan.engines.shared import current_stream
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer

WRITTEN_FOR = versions.SGLANG.written_for  # the version of SGLang whose members are used here
logger = logging.getLogger("kvplan.engines.sglang")
VARIABLE = "KVPLAN_SGLANG"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController.__init__"


def attach(controller: Any, *, policy: Policy | None = None) -> TransferEngine:
    """Let kvplan make the transfers of a HiCache controller, between the GPU and the host.

    Call it when the controller is built and has moved nothing. The controller's queues, decisions, events and fences
    do not change, nor does the storage behind the host pool. The engine itself moves pools that kvplan does not know,
    such as states of linear attention; this is logged once.

    Run the engine with ``--hicache-io-backend direct``, which keeps indices on the CPU. With ``kernel``, indices are
    copied from the GPU, and the scheduler waits for the work that computes them.

    Args:
        controller: a ``HiCacheController`` or a subclass.
        policy: policy of the executor; by default ``Policy(overlap="decode")``, since the model runs meanwhile.

    Returns:
        The object that replaces ``controller.l2_transfer_engine``. Its ``executor.stats()`` counts transfers, and its
        ``detach()`` restores the engine's own object.

    Raises:
        KVPlanError: ``controller`` is not a controller, is attached already, or has transfers in flight.
    """
    versions.check(versions.SGLANG)  # not at import: the plugin of an engine without kvplan imports this, too
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
    for host_pool, device_pool in _pools_of(controller):
        engine.transfers_of(host_pool, device_pool)  # now, so that no request waits for the compilers
    engine._controller = controller
    controller.l2_transfer_engine = engine
    return engine


def _pools_of(controller: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of pools of a controller; a group of host pools knows the device pool of each."""
    host = getattr(controller, "mem_pool_host", None)
    entries = getattr(host, "entries", None)
    if entries is not None:
        pairs = [(entry.host_pool, entry.device_pool) for entry in entries]
    else:
        pairs = [(host, getattr(controller, "mem_pool_device", None))]
    return [pair for pair in pairs if None not in pair]


class TransferEngine:
    """A wrapper of the engine's ``L2TransferEngine``: it keeps the engine's streams and events, and copies by kvplan.

    If kvplan knows both pools of a transfer, the engine gets it with a host pool that copies by kvplan. The engine gets
    all other transfers unchanged.

    Args:
        own: the engine's own ``L2TransferEngine``.
        executor: the executor that moves the plans.

    Attributes:
        executor: the executor that moves the plans.
    """

    def __init__(self, own: Any, executor: Executor) -> None:
        self.executor = executor
        self._own = own
        self._controller: Any = None
        self._pairs: dict[tuple[int, int], tuple[Any, Any, HostTransfers | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def submit_device_to_host(self, transfers: Sequence[Any]) -> Any:
        """Submit as the engine does, and return its completion."""
        return self._own.submit_device_to_host([self._taken(transfer, None) for transfer in transfers])

    def submit_host_to_device(self, transfers: Sequence[Any], *, transfer_layer_id_max: int, **more: Any) -> Any:
        """Submit as the engine does, and return its completion."""
        taken = [self._taken(transfer, transfer_layer_id_max) for transfer in transfers]
        return self._own.submit_host_to_device(taken, transfer_layer_id_max=transfer_layer_id_max, **more)

    def detach(self) -> None:
        """Restore the controller's own engine, finish all transfers, and close the executor."""
        if self._controller is not None:
            self._controller.l2_transfer_engine = self._own
        self.executor.close()

    def transfers_of(self, host_pool: Any, device_pool: Any) -> HostTransfers | None:
        """Return the object that copies between two pools, or None if kvplan leaves the pools to the engine."""
        key = id(host_pool), id(device_pool)
        if key not in self._pairs:
            found = None
            try:
                found = HostTransfers(device_pool, host_pool, self.executor)
                kinds = type(host_pool).__name__, type(device_pool).__name__
                logger.info("kvplan moves the pages of %s and %s: %s", *kinds, found.host)
            except KVPlanError as error:
                logger.warning("left to SGLang's own transfers: %s", error)
            self._pairs[key] = host_pool, device_pool, found
        return self._pairs[key][2]

    def _taken(self, transfer: Any, layers: int | None) -> Any:
        """Return the engine's transfer with kvplan's host pool and indices on the CPU.

        If kvplan does not know the pools, return it unchanged.
        """
        pair = None if transfer.is_draft else self.transfers_of(transfer.host_pool, transfer.device_pool)
        if pair is None:
            return transfer
        # Copy indices in the caller's stream, as the engine does for its own "direct" copies. In the transfer stream,
        # the CPU would also wait for all work that the transfers wait for.
        host, device = transfer.host_indices.cpu(), transfer.device_indices.cpu()
        named: Iterable[Any] = range(layers or 0)
        if transfer.layer_mapper is not None:
            named = [transfer.layer_mapper(layer) for layer in named]
        wanted = tuple(sorted({layer for layer in named if layer is not None and pair.moves(layer)}))
        return transfer._replace(
            host_pool=_HostPool(transfer.host_pool, pair, wanted), host_indices=host, device_indices=device
        )


class _HostPool:
    """The engine's host pool during one submission, with kvplan's copies.

    The engine calls it in its transfer stream: once to store all layers, or once per layer to load. The first call
    submits the load of all layers. Each call makes the stream wait for its layer.
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
        stream = current_stream(self._pair.device.device)
        self._pair.backup(host_indices, device_indices, after=stream).wait(stream)

    def load_to_device_per_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **more: Any
    ) -> None:
        del device_pool, io_backend, more
        if layer_id not in self._wanted or not len(host_indices):
            return
        stream = current_stream(self._pair.device.device)
        if self._load is None:
            self._load = self._pair.load(host_indices, device_indices, self._wanted, after=stream)
        self._pair.wait_layer(self._load, layer_id, stream)


def plugin() -> None:
    """Attach kvplan to each HiCache controller when it is built. SGLang calls this in each of its processes.

    With ``KVPLAN_SGLANG=auto``, the cost model chooses the path; the name of a path selects that path. ``0`` or an
    empty value leaves the engine unchanged.

    Raises:
        KVPlanError: the variable has another value.
    """
    policy = asked_policy(VARIABLE)
    if policy is None:
        return
    show_lines(logger)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def built(_result: Any, controller: Any, *_given: Any, **_more: Any) -> None:
        attach(controller, policy=policy)

    HookRegistry.register(CONTROLLER, built, HookType.AFTER)
