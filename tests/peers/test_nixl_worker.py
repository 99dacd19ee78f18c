"""vLLM 0.33.0's own NixlConnector worker, with kvplan's agent and with NIXL's by the same script.

Both must move the same bytes, notify the same requests, and tell failures in the same way.
"""

from __future__ import annotations

import base64
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from kvplan.engines.nixl import Agent
from tests.patience import PATIENCE, until

nixl_api = pytest.importorskip("nixl._api", reason="NIXL is not installed: pip install nixl")
pytestmark = pytest.mark.peers

from tests.peers import nixl_worker  # noqa: E402  # after the checks that vLLM and NIXL are installed

AGENTS = {"nixl": nixl_api.nixl_agent, "kvplan": Agent}


class Prefill:
    """A prefill worker in a process of its own."""

    def __init__(self, kind):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.peers.nixl_worker", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.payload = base64.b64decode(self._line("READY"))

    def _line(self, word):
        for line in self.process.stdout:  # NIXL and vLLM print lines of their own
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"the prefill worker ended before {word}")

    def ask(self, command, word):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line(word)

    def end(self):
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def pair(decode, prefill, patch):
    there = Prefill(prefill)
    try:
        here, caches = nixl_worker.worker("decode", AGENTS[decode], patch)
        try:
            yield here, caches, there, nixl_worker.meet(here, there.payload)
        finally:
            here.shutdown()
    finally:
        there.end()


def expected(name):
    """What the prefill worker's cache of a layer holds."""
    return nixl_worker.contents("prefill")[name]


def received(here, requests):
    done = set()
    until(lambda: done.update(here.get_finished()[1]) or done >= set(requests))
    return done


@pytest.mark.parametrize("prefill", AGENTS)
@pytest.mark.parametrize("decode", AGENTS)
def test_blocks_are_pulled_and_requests_notified(decode, prefill, monkeypatch, caplog):
    caplog.set_level("INFO", "kvplan.engines.nixl")
    with pair(decode, prefill, monkeypatch.setattr) as (here, caches, there, engine):
        before = {name: cache.clone() for name, cache in caches.items()}
        there.ask("serve one two", "SERVED")
        nixl_worker.pull(here, "one", engine, [3, 1, 7], [0, 5, 9])
        nixl_worker.pull(here, "two", engine, [2], [11])
        assert received(here, ["one", "two"]) == {"one", "two"}
        until(lambda: there.ask("sent", "SENT").split() == ["p-one", "p-two"])
        for name, cache in caches.items():
            wanted = before[name]
            wanted[[3, 1, 7, 2]] = expected(name)[[0, 5, 9, 11]]
            assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))
        stats = here.get_kv_connector_stats().data
        assert stats["bytes_transferred"] == [n * len(caches) * cache[0].nbytes for n in (3, 1)]
        assert stats["num_failed_transfers"] == []
        assert ("kvplan takes over transfers with" in caplog.text) == (decode == prefill == "kvplan")


@pytest.mark.parametrize("kind", AGENTS)
def test_a_dead_prefill_worker_fails_the_request(kind, monkeypatch):
    with pair(kind, kind, monkeypatch.setattr) as (here, _, there, engine):
        there.ask("serve one two", "SERVED")
        nixl_worker.pull(here, "one", engine, [3], [0])
        assert received(here, ["one"]) == {"one"}
        assert here.get_block_ids_with_load_errors() == set()
        there.end()
        nixl_worker.pull(here, "two", engine, [4, 5], [1, 2])
        assert received(here, ["two"]) == {"two"}
        assert here.get_block_ids_with_load_errors() == {4, 5}
        assert len(here.get_kv_connector_stats().data["num_failed_transfers"]) == 1
        assert all(map(here.nixl_wrapper.check_remote_metadata, here._remote_agents[engine].values()))
