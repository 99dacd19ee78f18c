"""The transports of agents, and which of them a test runs over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.contract.peers.process import Process, written


@dataclass(frozen=True)
class Transport:
    """How bytes go: the transport of the agents, the memory of the caches, and options of each submit."""

    name: str
    memory: str
    options: dict[str, Any] = field(default_factory=dict)
    of: str = "Agent"

    def open(self, process: Process, name: str, cache: oracle.Cache) -> bytes:
        """Make an agent of another process, with a cache, and return its card."""
        return process.open(name, self.name, written(cache), self.memory, self.of)


TRANSPORTS = {
    "shm": Transport("shm", "shared"),
    "direct": Transport("nixl", "private", {"way": "direct"}),
    "packed": Transport("nixl", "private", {"way": "packed"}),
    "nixl_agent": Transport("nixl", "private", of="NixlAgent"),
    "cuda_ipc": Transport("cuda_ipc", "gpu"),
}


def _marks(transport: Transport) -> list[pytest.MarkDecorator]:
    if transport.name == "nixl":
        return [pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl")]
    return (
        [pytest.mark.gpu, pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU here")]
        if transport.memory == "gpu"
        else []
    )


def over(*names: str, xfail: Mapping[str, str] | None = None) -> pytest.MarkDecorator:
    """Run a test over these transports, and over those by which it is known to fail, with the reason."""
    broken = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in (xfail or {}).items()}
    return pytest.mark.parametrize(
        "transport",
        [
            pytest.param(TRANSPORTS[name], marks=[*_marks(TRANSPORTS[name]), *marks], id=name)
            for name, *marks in [*((name,) for name in names), *broken.items()]
        ],
    )


every = over(*TRANSPORTS)
agents = over("shm", "direct", "packed", "cuda_ipc")
