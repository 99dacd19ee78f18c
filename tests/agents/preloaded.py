"""Load kvplan, numba and the compiled loops into the server that forks the other processes."""

from __future__ import annotations

from tests.agents.workers import pool

pool()
