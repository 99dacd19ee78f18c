"""Normal exits without close: what was submitted is finished, or its loss is an error on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import kvplan
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
numbers = count()
BLOCKS, NBYTES = 64, 1 << 18

PROCESS = """
import multiprocessing, os, sys, threading, time
import numpy as np
import kvplan

source = np.full((64, 1 << 18), 7, np.uint8)
layout = kvplan.KVLayout.from_tensors("block dim", source)
kept = []

def work(name, what):
    ids, after = range(64), threading.Event() if "waits" in what else None
    if "agent" in what:
        agent = kvplan.Agent("visitor", {}, transports=("shm",))
        peer = agent.meet(bytes.fromhex(name))
        peer.submit(kvplan.compile(layout, peer.layouts["kv"]).plan(ids, ids), after=after, note=b"moved")
        kept.append(agent)
    else:
        pool = kvplan.allocate("block dim", like=layout, shared=name)
        executor = kvplan.Executor()
        executor.submit(kvplan.compile(layout, pool).plan(ids, ids), after=after)
        kept.append(executor)
    print(time.monotonic(), flush=True)
    if "leaves" in what:
        sys.exit(3)

if __name__ == "__main__":
    method, name, what = sys.argv[1:]
    if method == "alone":
        work(name, what)
    else:
        child = multiprocessing.get_context(method).Process(target=work, args=(name, what))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.fixture
def pool():
    name = f"kvplan-exits-{os.getpid()}-{next(numbers)}"
    like = kvplan.KVLayout.from_tensors("block dim", np.zeros((BLOCKS, NBYTES), np.uint8))
    return name, kvplan.allocate("block dim", like=like, shared=name)


def ended(tmp_path, method: str, name: str, what: str) -> tuple[int, str]:
    """Exit code and stderr of a process that submits, and ends in the time that is promised."""
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", script, method, name, what],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert time.monotonic() - float(done.stdout) < 30
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["alone", "fork", "forkserver", "spawn"])
def test_an_executor_s_transfers_are_finished(tmp_path, pool, method):
    name, shared = pool
    what = "executor leaves" if method == "fork" else "executor"
    assert ended(tmp_path, method, name, what) == (3 if method == "fork" else 0, "")
    assert (shared.tensors == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["alone", "fork", "forkserver", "spawn"])
def test_an_agent_s_transfers_and_notes_arrive(tmp_path, pool, method):
    _, shared = pool
    with kvplan.Agent("owner", {"kv": shared}, transports=("shm",)) as owner:
        assert ended(tmp_path, method, owner.card().hex(), "agent") == (0, "")
        until, notes = time.monotonic() + PATIENCE, []
        while not notes and time.monotonic() < until:
            notes = owner.notes()
        assert notes == [("visitor", b"moved")]
    assert (shared.tensors == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["alone", "fork"])
@pytest.mark.parametrize("what", ["executor", "agent"])
def test_what_never_comes_is_given_up_with_an_error(tmp_path, pool, method, what):
    name, shared = pool
    with kvplan.Agent("owner", {"kv": shared}, transports=("shm",)) as owner:
        _, said = ended(tmp_path, method, owner.card().hex() if what == "agent" else name, f"{what} waits")
    assert "at exit, 1 transfers were given up" in said
    assert ("1 transfers with 'owner' are in flight" in said) == (what == "agent")
    assert not shared.tensors.any()
