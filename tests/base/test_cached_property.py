"""Attributes that are computed once: a forked child can compute them, too."""

from __future__ import annotations

import os
import select
import signal
import threading
import warnings

import numpy as np
import pytest

import kvplan


def cache():
    return kvplan.KVLayout.from_tensors("block dim", np.zeros((8, 64), np.uint8))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_forked_while_a_thread_computes_one_compiles(monkeypatch):
    inside, go = threading.Event(), threading.Event()
    real = kvplan.KVLayout.geometry.func

    def slow(self):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go.wait(60)
        return real(self)

    monkeypatch.setattr(kvplan.KVLayout.__dict__["geometry"], "func", slow)
    thread = threading.Thread(target=lambda: kvplan.compile(cache(), cache()))
    thread.start()
    try:
        assert inside.wait(60)
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: a fork beside threads
            child = os.fork()
        if child == 0:
            kvplan.compile(cache(), cache())
            os.write(write, b"compiled")
            os._exit(0)
        os.close(write)
        ready, _, _ = select.select([read], [], [], 60)  # a bound on a hang, not on speed
        told = os.read(read, 8) if ready else b"hangs"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        assert told == b"compiled"
    finally:
        go.set()
        thread.join(60)
