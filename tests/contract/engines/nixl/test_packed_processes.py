"""Packed rows between two processes by real NIXL, through its own interface: bytes, notifications, and deaths."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.contract.engines.nixl.packed_rows import PLAIN, Near, checked
from tests.patience import PATIENCE

pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'kvplan[nixl]'")

pytestmark = pytest.mark.slow
WIRES = ("all", "tcp,self")  # values of UCX_TLS: shared memory, and a wire that runs in pieces


@pytest.fixture(params=WIRES)
def wire(request, monkeypatch):
    monkeypatch.setenv("UCX_TLS", request.param)


def near(**options):
    return Near(4000, 576, **options)


@pytest.mark.usefixtures("wire")
def test_every_byte_and_every_notification():
    made = near()
    try:
        checked(made, 8, 2000)
        handle = made.make("READ", *made.choose(2000))
        assert made.pool.agent.query_xfer_backend(handle) == "KVPLAN"
    finally:
        made.close()


@pytest.mark.parametrize(("mine", "theirs"), [(PLAIN, "always"), ("always", PLAIN)])
def test_one_end_without_packing_is_nixl_s(mine, theirs):
    made = near(mine=mine, theirs=theirs)
    try:
        checked(made, 4, 500)
        handle = made.make("READ", *made.choose(500))
        assert made.pool.agent.query_xfer_backend(handle) == "UCX"
    finally:
        made.close()


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_killed_peer_ends_its_transfers_with_an_error(operation):
    made = near()
    try:
        checked(made, 2, 500)
        handles = [made.make(operation, *made.choose(2000)) for _ in range(8)]
        agent, ends = made.pool.agent, []
        for k, handle in enumerate(handles):
            if k == 3:
                made.process.kill()
            try:
                agent.transfer(handle)
                until = time.monotonic() + PATIENCE
                while (state := agent.check_xfer_state(handle)) == "PROC":
                    assert time.monotonic() < until
            except Exception as error:  # NIXL's
                state = str(error)
            ends.append(state)
        assert ends[:3] == ["DONE"] * 3
        assert all("NIXL_ERR" in end for end in ends[4:]), ends
        assert ends[-1] != "DONE"
        if operation == "WRITE":
            np.testing.assert_array_equal(made.pool.memory, made.here)
    finally:
        made.close()
