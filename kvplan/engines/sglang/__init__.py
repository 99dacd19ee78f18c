"""An adapter for SGLang 0.5.23: kvplan moves HiCache's pages, and the bytes of staging between prefill and decode.

The engine still decides which pages move, and when. :func:`attach` attaches kvplan to a HiCache controller, and the
plugin attaches it to every controller. :class:`HostTransfers` moves pages without the engine. :class:`StagingSteps`
gathers to SGLang's staging ring and scatters from it.
"""

from kvplan.engines.sglang.hicache import WRITTEN_FOR, TransferEngine, attach
from kvplan.engines.sglang.host_transfers import HostTransfers
from kvplan.engines.sglang.staging_steps import StagingSteps

__all__ = ["WRITTEN_FOR", "HostTransfers", "StagingSteps", "TransferEngine", "attach"]
