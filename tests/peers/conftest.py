"""Another project's own code holds our addresses: collected only where it is installed, by `make test-peers`."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

PEERS = ("vllm", "lmcache", "sglang")
collect_ignore = [f"test_{peer}_peer.py" for peer in PEERS if not importlib.util.find_spec(peer)]
if "test_vllm_peer.py" in collect_ignore:
    collect_ignore += ["test_vllm_offloading.py", "test_vllm_connector.py",
                       "vllm_worker.py"]  # fmt: skip
if "test_lmcache_peer.py" in collect_ignore:
    collect_ignore += ["test_lmcache_connector.py", "test_nixl_channel.py"]

if "test_vllm_peer.py" not in collect_ignore:
    with warnings.catch_warnings():  # its imports use what torch deprecates
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
        import vllm.v1.attention.backends.b12x
        import vllm.v1.attention.backends.rocm_attn
        import vllm.v1.kv_offload.tiering.spec
        import vllm.v1.worker.utils  # noqa: F401


@pytest.fixture
def copies(monkeypatch):
    """Rows of (source, destination, bytes) that vLLM's worker copies."""
    from tests.peers.vllm_worker import noted_copies  # imports vLLM, which may not be installed

    return noted_copies(monkeypatch)
