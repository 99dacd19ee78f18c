"""SGLang 0.5.23: kvplan moves what HiCache moves between a device pool and a host pool.

The engine still decides which pages leave and come back, and when. :func:`attach` puts kvplan into a HiCache
controller. The plugin does so for every controller. :class:`HostTransfers` moves pages without the engine.
"""

from kvplan.engines.sglang.hicache import WRITTEN_FOR, TransferEngine, attach
from kvplan.engines.sglang.host_transfers import HostTransfers

__all__ = ["WRITTEN_FOR", "HostTransfers", "TransferEngine", "attach"]
