"""A process may fork at any time, also while a thread compiles: the child can make executors of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

CHILD_SECONDS = 240  # after which the child counts as hanging

PROCESS = """
import os, signal, sys, threading, time
import numpy as np
import kvplan

src = np.ones((8, 64), np.uint8)
dst = np.zeros_like(src)
program = kvplan.compile(*(kvplan.KVLayout.from_tensors("block dim", each) for each in (src, dst)))
executor = kvplan.Executor()
threading.Thread(target=executor.prepare).start()
time.sleep(float(sys.argv[1]))
never = executor.submit(program.plan([], []), after=threading.Event())
child = os.fork()
if not child:
    signal.alarm(int(sys.argv[2]))
    with kvplan.Executor() as own:
        try:
            own.submit(program.plan([], []), after=never).synchronize()
        except kvplan.TransferError as error:
            assert "fork" in str(error)
        own.submit(program.plan(range(8), range(8))).synchronize()
    os._exit(0 if (dst == src).all() else 1)
never.cancel()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["0.1", "1"])
def test_a_child_forked_while_loops_are_compiled_moves_bytes(tmp_path, seconds):
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(tmp_path)}  # an empty cache
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROCESS, seconds, str(CHILD_SECONDS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert done.stderr.count("executors do not survive a fork") == len(done.stderr.splitlines()) == 1
