"""Two agents of one process that know each other through NIXL only, on a double of it."""

from __future__ import annotations

from kvplan import Agent
from tests.nixl import double
from tests.patience import until


class KnownAgents:
    """The network of two agents, ``me`` and ``you``, which a subclass makes."""

    me: Agent
    you: Agent

    def __init__(self) -> None:
        self.network = double.Network()

    def close(self) -> None:
        """Close both; NIXL then holds nothing."""
        self.me.close()
        self.you.close()
        self.network.check_released()


def heard(agent, count=1):
    """Wait for so many notes of an agent, and return them."""
    found = []
    until(lambda: found.extend(agent.notes()) or len(found) >= count)
    return found
