"""An adapter for CPU offloading of vLLM 0.33: specs for ``kv_connector_extra_config``, and a connector.

=================================  =====================================================================================
``KVPlanOffloadingSpec``           replaces vLLM's ``CPUOffloadingSpec``
``KVPlanTieringOffloadingSpec``    replaces its ``TieringOffloadingSpec``, canonical pages included
``KVPlanOffloadingWorker``         the worker of both; scheduler, eviction, tiers and the shared region are vLLM's
``KVPlanOffloadingConnector``      vLLM's ``OffloadingConnector``, whose failed transfers do not end the engine, and
                                   whose loads can go layer by layer
=================================  =====================================================================================

The classes derive from vLLM's classes, so vLLM is imported at the first use of one of these names.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvplan.engines import versions
from kvplan.engines.vllm import connector, specs

policy_of = specs.policy_of
WRITTEN_FOR = versions.VLLM.written_for  # the version of vLLM whose members are used here

NAMES = (
    "KVPlanOffloadingConnector",
    "KVPlanOffloadingSpec",
    "KVPlanOffloadingWorker",
    "KVPlanTieringOffloadingSpec",
)
_OF_CONNECTOR = ("KVPlanOffloadingConnector", "ReportedJobs")  # which is pickled by name between processes


def __getattr__(name: str) -> Any:
    if name not in (*NAMES, *_OF_CONNECTOR):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(NAMES)}")
    import vllm

    versions.check(versions.VLLM, vllm.__version__)  # first: another version may not have what is imported next
    made = {each.__name__: each for each in (connector if name in _OF_CONNECTOR else specs).classes()}
    for key, each in made.items():  # vLLM's configuration and pickles find them in this package
        each.__module__, each.__qualname__ = __name__, key
        if key == "KVPlanOffloadingConnector":
            _register(key)
    return made[name]


def _register(name: str) -> None:
    """Let vLLM find a connector by its name only, as it does for the statistics of its ``MultiConnector``."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(name, __name__, name)
