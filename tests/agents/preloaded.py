"""What the server of other processes has loaded before it forks them: kvplan, numba, and the compiled loops."""

from __future__ import annotations

from tests.agents.workers import pool

pool()
