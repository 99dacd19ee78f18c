"""Moves that break a cache in a known way, and what is left without a component."""

from __future__ import annotations

import ctypes

import numpy as np

from kvplan.plan.loops_numpy import Descriptors
from kvplan.verification import verify as verification


class Wrong:
    """An executor that copies a plan's descriptors after something was done to them; on the CPU, at once."""

    def __init__(self, spoil):
        self.spoil = spoil

    def submit(self, plan):
        for src, dst, size in zip(*(column.tolist() for column in self.spoil(plan.descriptors())), strict=True):
            ctypes.memmove(dst, src, size)
        return self

    def result(self):
        return self

    def synchronize(self):
        pass


def without(number):
    return lambda made: Descriptors(*(np.delete(column, number) for column in made))


def exchanged(made):
    """The first two copies of one size go each to the other's place."""
    dst = made.dst.copy()
    dst[[0, 1]] = dst[[1, 0]]
    return Descriptors(made.src, dst, made.size)


class Failing(Wrong):
    def __init__(self, where):
        super().__init__(lambda made: made)
        self.where = where

    def submit(self, plan):
        if self.where == "submit":
            raise RuntimeError("no")
        return super().submit(plan)

    def result(self):
        raise RuntimeError("no")


def spoiled(monkeypatch, spoil):
    """A host path that does something to each plan's copies."""

    class Spoiled(Wrong):
        def __init__(self, device):
            assert device == "cpu"
            super().__init__(spoil)

        def close(self):
            pass

    monkeypatch.setattr(verification, "Executor", Spoiled)
