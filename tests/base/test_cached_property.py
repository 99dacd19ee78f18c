"""Attributes that are computed once: no lock is held meanwhile, so that a forked child can compute them, too."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import select
import signal
import threading
import warnings

import numpy as np
import pytest

import kvplan
from kvplan.base.cached_property import cached_property


class Counted:
    def __init__(self):
        self.computed = 0

    @cached_property
    def value(self):
        """What it holds."""
        self.computed += 1
        return [self.computed]


def test_is_computed_once_and_kept_in_the_dict():
    one, other = Counted(), Counted()
    assert one.value is one.value
    assert one.computed == 1
    assert vars(one)["value"] == [1]
    assert "value" not in vars(other)


def test_can_be_taken_back_by_deleting_it():
    one = Counted()
    assert one.value == [1]
    del one.value
    assert one.value == [2]


def test_of_the_class_is_the_descriptor():
    assert Counted.value.func(Counted()) == [1]
    assert Counted.value.attrname == "value"
    assert Counted.value.__doc__ == "What it holds."


def test_two_threads_that_compute_at_once_get_one_value():
    both = threading.Barrier(2)

    class Slow:
        @cached_property
        def value(self):
            both.wait(10)  # a lock around the function would let only one thread come here
            return object()

    slow, got = Slow(), []
    threads = [threading.Thread(target=lambda: got.append(slow.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(got) == 2
    assert got[0] is got[1] is slow.value


@pytest.mark.slow
def test_kvplan_has_no_cached_property_with_a_lock():
    found = []
    for module in pkgutil.walk_packages(kvplan.__path__, "kvplan."):
        if module.name.endswith("__main__"):
            continue
        try:
            held = vars(importlib.import_module(module.name))
        except ImportError:  # an optional package is not here
            continue
        found += [
            f"{module.name}.{name}.{attribute}"
            for name, kind in held.items()
            if isinstance(kind, type)
            for attribute, value in vars(kind).items()
            if isinstance(value, functools.cached_property)
        ]
    assert not found


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
