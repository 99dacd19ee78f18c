"""Executors of the CPU in a process of their own, and the pair of caches they move."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np

import kvplan
from kvplan import KVLayout
from tests.patience import PATIENCE


def pair(num_blocks=16, dim=64, seed=0):
    src = np.random.default_rng(seed).integers(0, 256, (num_blocks, 4, dim), np.uint8)
    dst = np.zeros_like(src)
    program = kvplan.compile(*(KVLayout.from_tensors("block token dim", t) for t in (src, dst)))
    return src, dst, program


class Broken:
    def synchronize(self):
        raise OSError("the stream is gone")


def python(code, *arguments, warnings="error", **environment):
    command = [sys.executable, "-W", warnings, "-c", textwrap.dedent(code), *arguments]
    env = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env)
    return done.returncode, done.stdout, done.stderr


EXITS = """
import atexit, sys, threading, time
import numpy as np

def check():
    print("at exit", bool((dst == src).all()))

atexit.register(check)
import kvplan
from kvplan.execute import backend
from kvplan.execute import host
src = np.random.default_rng(0).integers(0, 256, (64, 1 << 20), np.uint8)
dst = np.zeros_like(src)
program = kvplan.compile(*(kvplan.KVLayout.from_tensors("block dim", t) for t in (src, dst)))
executor = kvplan.Executor(policy=kvplan.Policy(threads=int(sys.argv[1])))
"""
