"""An adapter for SGLang 0.5.23: kvplan moves HiCache's pages.

The engine still decides which pages move, and when. :func:`attach` attaches kvplan to a HiCache controller, and the
plugin attaches it to every controller. :class:`HostTransfers` moves pages without the engine.
"""

from kvplan.engines.sglang.hicache import WRITTEN_FOR, TransferEngine, attach
from kvplan.engines.sglang.host_transfers import HostTransfers

__all__ = ["WRITTEN_FOR", "HostTransfers", "TransferEngine", "attach"]
