"""Predict the time of a transfer between two layouts, by the cost model, from the program of one unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvplan.cost import model
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.cost.statistics import facts_of
from kvplan.program.program import Program


class Price(NamedTuple):
    """The predicted cost of an order.

    Attributes:
        seconds: time of all routes together.
        routes: for each route, the path that the cost model takes, and its time and pieces.
    """

    seconds: float
    routes: Mapping[str, Candidate]


@dataclass(frozen=True)
class Pricing:
    """How orders are priced: a transfer of some tokens by each route, whose blocks lie in no order.

    Attributes:
        profile: profile of the device.
        routes: routes of the transfers: ``"load"``, ``"store"``, or both, or ``"device"``.
        tokens: tokens of one transfer; a state counts as one unit.
        policy: limits of the paths, and the compute that runs at the same time.
    """

    profile: DeviceProfile
    routes: tuple[str, ...]
    tokens: int
    policy: Policy

    def of(self, programs: Mapping[str, Program]) -> Price:
        """Return the price of an order from its program of each route.

        >>> from kvplan import KVLayout, compile
        >>> from kvplan.cost.profile import default
        >>> spec = {"sizes": {"layer": 32, "block": 64, "token": 16, "dim": 4096}}
        >>> host, gpu = (KVLayout.from_spec(spec | {"notation": n, "device": on}) for n, on in
        ...              (("block layer token dim", "cpu"), ("layer: block token dim", "cuda:0")))
        >>> price = Pricing(default(), ("load",), 4096, Policy()).of({"load": compile(host, gpu).program})
        >>> price.routes["load"].path
        'staged'
        """
        taken = {route: self.ranked(route, program)[0] for route, program in programs.items()}
        return Price(sum(one.score for one in taken.values()), taken)

    def ranked(self, route: str, program: Program) -> tuple[Candidate, ...]:
        """Return every path for a route, the one that is taken first."""
        counts = [(facts_of(group, route), self._units(program)) for group in program.groups]
        refused, most = {}, self.policy.staging_bytes
        if most is not None and any(facts.granule_nbytes > most for facts, _ in counts):
            refused["staged"] = "a block is larger than the ring"
        return tuple(model.candidates(counts, route, self.profile, self.policy, refused))

    def _units(self, program: Program) -> int:
        return 1 if program.opaque else max(-(-self.tokens // program.unit_tokens), 1)
