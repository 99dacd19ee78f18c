"""An adapter for SGLang 0.5.23: kvplan moves HiCache's pages between a device pool and a host pool.

The engine still decides which pages are stored and loaded, and when. :func:`attach` attaches kvplan to a HiCache
controller. The plugin attaches it to every controller. :class:`HostTransfers` moves pages without the engine.
"""

from kvplan.engines.sglang.hicache import WRITTEN_FOR, TransferEngine, attach
from kvplan.engines.sglang.host_transfers import HostTransfers

__all__ = ["WRITTEN_FOR", "HostTransfers", "TransferEngine", "attach"]
