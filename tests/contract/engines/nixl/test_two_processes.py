"""Transfers between two processes through NIXL's interface, by shared memory."""

from __future__ import annotations

import base64
import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvplan.engines.nixl import Agent
from tests.contract.engines.nixl.prefill_process import BLOCK, BLOCKS, pool
from tests.nixl import double as nixl
from tests.open_files import leaves_no_file, open_files
from tests.patience import PATIENCE, until

ROOT = Path(__file__).parents[4]


class Prefill:
    """The other process, and its pool as this one's agent knows it."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.engines.nixl.prefill_process", str(folder)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        metadata, address = self.process.stdout.readline().split()
        self.metadata, self.address = base64.b64decode(metadata), int(address)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def bytes(self):
        return np.frombuffer(base64.b64decode(self.ask("bytes")[0]), np.uint8).reshape(BLOCKS, BLOCK)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdin.close()
        self.process.stdout.close()


class Decode:
    """This process's agent, its pool, and lists of both pools."""

    def __init__(self, prefill):
        self.agent = Agent(agent=nixl.LoneAgent(prefill.folder, "decode"))
        self.pool = pool(1).numpy()
        self.registered = self.agent.register_memory([(self.pool.ctypes.data, self.pool.nbytes, 0, "")], "DRAM")
        self.meet(prefill, prefill.metadata)

    def meet(self, prefill, metadata):
        self.name = self.agent.add_remote_agent(metadata)
        self.lists = [
            self.agent.prep_xfer_dlist(name, np.array([[address, BLOCK, 0, BLOCK, BLOCKS]]), "DRAM")
            for name, address in (("", self.pool.ctypes.data), (self.name, prefill.address))
        ]

    def make(self, operation, here, there, note=b""):
        return self.agent.make_prepped_xfer(operation, self.lists[0], here, self.lists[1], there, note)

    def move(self, *order):
        handle = self.make(*order)
        self.agent.transfer(handle)
        until(lambda: self.agent.check_xfer_state(handle) == "DONE")
        self.agent.release_xfer_handle(handle)


@pytest.fixture
def prefill(tmp_path):
    made = Prefill(tmp_path)
    yield made
    made.kill()


@pytest.mark.slow
def test_random_transfers_move_every_byte_and_notify_in_order(prefill):
    decode, rng = Decode(prefill), np.random.default_rng(3)
    wanted, theirs = decode.pool.copy(), pool(2).numpy()
    for turn in range(60):
        count = int(rng.integers(1, BLOCKS))
        here, there = rng.permutation(BLOCKS)[:count], rng.permutation(BLOCKS)[:count]
        if turn % 2:
            decode.move("READ", here, there, b"%d" % turn)
            wanted[here] = theirs[there]
        else:
            decode.move("WRITE", here, there, b"%d" % turn)
            theirs[there] = wanted[here]
        np.testing.assert_array_equal(decode.pool, wanted)
    np.testing.assert_array_equal(prefill.bytes(), theirs)
    assert prefill.ask("notes") == [str(turn) for turn in range(60)]


@pytest.mark.slow
def test_memory_that_is_deregistered_is_moved_no_more(prefill):
    decode = Decode(prefill)
    decode.move("READ", [0], [1])
    prefill.ask("deregister")
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        decode.move("READ", [0], [1])
    metadata = base64.b64decode(prefill.ask("register")[0])
    stale = decode.lists
    decode.meet(prefill, metadata)
    decode.move("READ", [0], [2])
    np.testing.assert_array_equal(decode.pool[0], pool(2).numpy()[2])
    decode.lists = stale
    with pytest.raises(nixl.nixlRemoteDisconnectError):
        decode.move("READ", [0], [1])


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(6))
def test_a_process_that_is_killed_never_hangs_or_lies(moment, tmp_path):
    prefill = Prefill(tmp_path)
    try:
        decode = Decode(prefill)
        every = np.arange(BLOCKS)
        handles = [decode.make("READ", every, every) for _ in range(6)]
        told = []
        for k, handle in enumerate(handles):
            if k == moment:
                prefill.kill()
            try:
                decode.agent.transfer(handle)
                until(lambda handle=handle: decode.agent.check_xfer_state(handle) == "DONE")
            except (nixl.nixlRemoteDisconnectError, nixl.nixlNotFoundError) as error:
                told.append(error)
            else:
                np.testing.assert_array_equal(decode.pool, pool(2).numpy())
                assert k < moment
            decode.agent.release_xfer_handle(handle)
        assert len(told) == 6 - moment
    finally:
        prefill.kill()


@pytest.mark.slow
def test_nothing_is_left_of_an_agent(prefill):
    before = open_files()
    decode = Decode(prefill)
    decode.move("READ", [0], [1])
    decode.agent.remove_remote_agent(decode.name)
    decode.agent.deregister_memory(decode.registered)
    for held in decode.lists:
        decode.agent.release_dlist_handle(held)
    del decode, held
    gc.collect()
    leaves_no_file(before)
