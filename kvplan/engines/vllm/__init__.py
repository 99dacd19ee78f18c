"""CPU offloading of vLLM 0.33 by kvplan: the specs that ``kv_connector_extra_config`` names, and a connector.

=================================  =====================================================================================
``KVPlanOffloadingSpec``           replaces vLLM's ``CPUOffloadingSpec``
``KVPlanTieringOffloadingSpec``    replaces its ``TieringOffloadingSpec``, canonical pages included
``KVPlanOffloadingWorker``         the worker of both; scheduler, eviction, tiers and the shared region are vLLM's
``KVPlanOffloadingConnector``      vLLM's ``OffloadingConnector``, whose failed transfers do not end the engine
=================================  =====================================================================================

The classes derive from vLLM's, so vLLM is imported when one of them is first asked for.
"""

from __future__ import annotations

from typing import Any

from kvplan.engines.vllm import connector, specs

policy_of = specs.policy_of

_MADE_BY = {
    "KVPlanOffloadingConnector": connector.classes,
    "KVPlanOffloadingSpec": specs.classes,
    "KVPlanOffloadingWorker": specs.classes,
    "KVPlanTieringOffloadingSpec": specs.classes,
    "ReportedJobs": connector.classes,  # what the connector's workers tell its scheduler, by name
}


def __getattr__(name: str) -> Any:
    if name not in _MADE_BY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MADE_BY)}")
    classes = {made.__name__: made for made in _MADE_BY[name]()}
    for key, made in classes.items():  # pickles and vLLM's configuration name them as this package's
        made.__module__, made.__qualname__ = __name__, key
    return classes[name]
