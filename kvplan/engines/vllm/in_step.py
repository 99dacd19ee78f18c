"""The scheduler's decision for each hit of the host: load in this step by layer, or in the next one, or asynchronously.

Source: vLLM 0.33.0, ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` (``_reserve_sync_load``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kvplan.engines.vllm.step_time import Pace
from kvplan.errors import KVPlanError

LOADS_IN_STEP = "load_by_layer", "sync_load_budget_bytes"  # keys of kv_connector_extra_config
STALL_SECONDS = 0.005  # least stall that is allowed, unless the user gives another
MOST_PUT_OFF = 16  # hits; each costs the scheduler a lookup, and later ones load asynchronously
UNBOUNDED = 1 << 62  # bytes
UNKNOWN = Pace(0.0, 0.0, 20e9)  # until a worker reports its pace: no compute hides loads, and PCIe 4 x16


class LayerOptions(NamedTuple):
    """The keys of ``kv_connector_extra_config`` about loads by layer.

    Attributes:
        stall_seconds: seconds that a step beside other requests may be longer because of loads; None for 5 ms, or the
            time of a further step if that is longer.
        most_bytes: most bytes that a step loads.
    """

    stall_seconds: float | None
    most_bytes: int


def layer_options_of(extra_config: Mapping[str, Any]) -> LayerOptions | None:
    """Return the options of loads by layer; None if ``load_by_layer`` is not given or false.

    Raises:
        KVPlanError: ``load_by_layer`` is not a bool, ``load_stall_ms`` is not a finite number of at least 0, or
            ``sync_load_budget_bytes`` is not an int of at least 0.

    >>> layer_options_of({"load_by_layer": True, "sync_load_budget_bytes": 1 << 30})
    LayerOptions(stall_seconds=None, most_bytes=1073741824)
    >>> layer_options_of({"load_by_layer": "yes"})
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: kv_connector_extra_config has 'load_by_layer': 'yes'; give true or false
    """
    wanted = extra_config.get("load_by_layer", False)
    if not isinstance(wanted, bool):
        raise _wrong("load_by_layer", wanted, "true or false")
    if not wanted:
        return None  # vLLM reads its own key, and takes more types
    stall = extra_config.get("load_stall_ms")
    if stall is not None and (
        isinstance(stall, bool) or not isinstance(stall, int | float) or not 0 <= stall < math.inf
    ):
        raise _wrong("load_stall_ms", stall, "finite milliseconds of at least 0")
    most = extra_config.get("sync_load_budget_bytes", UNBOUNDED)
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise _wrong("sync_load_budget_bytes", most, "bytes, as an int of at least 0")
    return LayerOptions(None if stall is None else stall * 1e-3, most)


def _wrong(key: str, given: Any, right: str) -> KVPlanError:
    return KVPlanError(f"kv_connector_extra_config has {key!r}: {given!r}; give {right}")


class StepBudget:
    """The bytes that a step may load for the requests that it finds.

    Beside other requests, the compute of the found requests' new tokens must hide the loads, but for a stall. A request
    that is left for a later step costs the others that step's time, however few tokens it has. So the first hit of a
    step may stall it as long, unless the user gives a bound. Alone, a load in the step is always the fastest way to the
    first token.

    If several hits wait, a step takes as many as it hides, and the others wait for the next step. Each step then loads
    while it computes, and no hit needs a further step of its own. As asynchronous loads, they would share the link with
    the loads that a step waits for, and need such steps.

    Args:
        options: the user's options.
        most_tokens: most tokens of a step.

    >>> budget = StepBudget(LayerOptions(None, UNBOUNDED), most_tokens=2048)
    >>> budget.of("a", new_tokens=512) == UNBOUNDED  # no other request runs
    True
    >>> budget.ran({"b"})
    >>> budget.of("a", new_tokens=512)  # no pace is known: 5 ms of loads
    100000000
    >>> budget.learn(Pace(0.004, 1e-5, 5e10))
    >>> budget.of("a", new_tokens=100)  # 4 + 1 + 5 ms of loads
    500000000
    >>> budget.learn(Pace(0.020, 1e-5, 5e10))
    >>> budget.of("a", new_tokens=100)  # 20 + 1 + 20 ms of loads
    2050000000
    >>> budget.take("a", new_tokens=100)
    >>> budget.of("c", new_tokens=100)  # 20 + 2 + 5 ms of loads, for both
    1350000000
    >>> budget.leave("c", new_tokens=100, nbytes=1000000000)
    >>> budget.waits("c")  # it fits into the next step
    True
    """

    def __init__(self, options: LayerOptions, most_tokens: int) -> None:
        self._options = options
        self._most_tokens = most_tokens
        self._pace: Pace | None = None
        self._running: set[str] = set()
        self._found: dict[str, int] = {}  # requests of this step that load in it, and their new tokens
        self._put_off: set[str] = set()  # hits of this step that wait for the next one
        self._before: set[str] = set()  # those of the last step
        self._stuck = False  # whether vLLM did not run a hit that the last step had taken
        self._several = False  # whether other connectors load hits, too

    def of(self, request: str, new_tokens: int) -> int:
        """Return the bytes that all loads of this step may have together, if this request is one of them."""
        return self._bytes({**self._found, request: new_tokens}, alone=self._running <= {request})

    def _bytes(self, found: Mapping[str, int], *, alone: bool) -> int:
        if len(found) == 1 and alone:
            return self._options.most_bytes
        tokens = min(sum(found.values()), self._most_tokens)
        pace = self._pace or UNKNOWN
        stall = self._options.stall_seconds
        if stall is None:
            stall = max(STALL_SECONDS, pace.step_seconds) if len(found) == 1 else STALL_SECONDS
        return round(min(pace.bytes_per_second * (pace.seconds(tokens) + stall), self._options.most_bytes))

    def leave(self, request: str, new_tokens: int, nbytes: int) -> None:
        """Let a hit that this step does not load wait for the next step, if that one can load it beside others.

        Args:
            request: its id.
            new_tokens: tokens that it computes.
            nbytes: bytes of its load.
        """
        if (
            self._found
            and not (self._stuck or self._several)
            and nbytes <= self._bytes({request: new_tokens}, alone=False)
        ):
            self._note(request)

    def waits(self, request: str) -> bool:
        """Return whether a hit waits for the next step."""
        return request in self._put_off

    def waits_again(self, request: str) -> bool:
        """Return whether a hit waits once more, without a lookup: hits that came before it already wait."""
        if self._put_off and request in self._before:
            self._note(request)
        return self.waits(request)

    def _note(self, request: str) -> None:
        if len(self._put_off) < MOST_PUT_OFF:
            self._put_off.add(request)

    def take(self, request: str, new_tokens: int) -> None:
        """Note that a request loads in this step."""
        self._found[request] = new_tokens

    def allocated(self, request: str, external_tokens: int) -> None:
        """Note the blocks that a request has got, and how many of its tokens this connector loads.

        If it loads none of a hit that it has found, then vLLM's ``MultiConnector`` lets another connector load them.
        From then on nothing waits for a step: another connector may hold the bytes of what waits, too.
        """
        if not external_tokens and self._found.pop(request, None) is not None:
            self._several = True

    def learn(self, pace: Pace | None) -> None:
        """Note the pace that the workers report."""
        self._pace = pace or self._pace

    def finished(self, request: str) -> None:
        """Note that a request has ended."""
        self._running.discard(request)

    def ran(self, requests: Collection[str]) -> None:
        """End the step, in which these requests ran.

        vLLM may leave out a hit that the budget has taken, for example while an encoder's output is on its way. Nothing
        waits behind such a hit in the next step, since it may be taken and left out again.
        """
        self._running = set(requests)
        self._stuck = not self._found.keys() <= self._running
        self._found = {}
        self._before, self._put_off = self._put_off, set()


def bound_loads(scheduler: Any, budget: StepBudget) -> None:
    """Make vLLM's ``OffloadingConnectorScheduler`` ask the budget for each hit."""
    reserve = scheduler._reserve_sync_load

    def reserve_within_budget(status: Any, computed: int, hit: int | None) -> bool:
        if hit:
            new_tokens = status.req.num_tokens - computed - hit
            allowed = budget.of(status.req.request_id, new_tokens)
            if any((computed + hit) % group.tokens_per_block for group in scheduler.config.kv_group_configs):
                # The model writes new tokens into the last block before the hook of the layer. A load of the same
                # block would overwrite them.
                allowed = 0
            scheduler.config = scheduler.config._replace(sync_load_budget_bytes=allowed)
        taken = bool(reserve(status, computed, hit))
        if taken:
            budget.take(status.req.request_id, new_tokens)
        elif hit and allowed and new_tokens > 0:
            budget.leave(status.req.request_id, new_tokens, hit * scheduler.config.kv_bytes_per_token)
        return taken

    scheduler._reserve_sync_load = reserve_within_budget
