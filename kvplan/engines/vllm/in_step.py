"""The scheduler's decision for each hit of the host: load in this step by layer, or in the next one, or asynchronously.

Source: vLLM 0.33.0, ``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` (``_reserve_sync_load``).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvplan.errors import KVPlanError

LOADS_IN_STEP = "load_by_layer", "sync_load_budget_bytes"  # keys of kv_connector_extra_config
STALL_SECONDS = 0.005  # least stall that is allowed, unless the user gives another
MOST_WAITS = 16  # hits that wait, since each costs the scheduler a lookup; and steps for which a hit waits
UNBOUNDED = 1 << 62  # bytes
SLOW = 20e9  # bytes per second, until a load was measured: PCIe 4 x16
LATEST = 0.25  # weight of the latest measurement


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
        KVPlanError: ``load_by_layer`` is not a bool, or ``load_stall_ms`` is not a finite number of at least 0.

    >>> layer_options_of({"load_by_layer": True, "sync_load_budget_bytes": 1 << 30})
    LayerOptions(stall_seconds=None, most_bytes=1073741824)
    >>> layer_options_of({"load_by_layer": "yes"})
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: kv_connector_extra_config has 'load_by_layer': 'yes'; give true or false
    """
    wanted, stall = extra_config.get("load_by_layer", False), extra_config.get("load_stall_ms")
    if not isinstance(wanted, bool):
        raise KVPlanError(f"kv_connector_extra_config has 'load_by_layer': {wanted!r}; give true or false")
    if not wanted:
        return None
    number = isinstance(stall, int | float) and not isinstance(stall, bool)
    if stall is not None and not (number and 0 <= stall < math.inf):
        raise KVPlanError(f"kv_connector_extra_config has 'load_stall_ms': {stall!r}; give finite milliseconds of at "
                          "least 0")  # fmt: skip
    most = str(extra_config.get("sync_load_budget_bytes", UNBOUNDED))  # vLLM's own key: an int, or one as text
    if not most.isdecimal():
        raise KVPlanError(f"kv_connector_extra_config has 'sync_load_budget_bytes': {most}; give bytes, at least 0")
    return LayerOptions(None if stall is None else stall * 1e-3, int(most))


class Average:
    """A moving average of a rate: sums in which older measurements count less and less.

    >>> rate = Average()
    >>> rate.add(2.0, 1.0)
    >>> rate.add(4.0, 1.0)
    >>> rate.value, Average().value
    (3.142857142857143, 0.0)
    """

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def add(self, above: float, below: float) -> None:
        """Add a measurement: so much above the line of the fraction, and so much below it."""
        self._above, self._below = ((1 - LATEST) * old + new for old, new in
                                    ((self._above, above), (self._below, below)))  # fmt: skip

    @property
    def value(self) -> float:
        """The average; 0 before the first measurement."""
        return self._above / self._below if self._below else 0.0


class StepTimes:
    """The seconds of the engine's steps, from the times at which the scheduler makes them and hears of their end.

    A step that only decodes tells the time of a step without tokens; of another step, what is longer is its tokens'. A
    step counts from the end of the one before, if the scheduler had made it by then. Steps with loads do not count.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, int, bool]] = deque()
        self._last_end = 0.0
        self._step, self._token = Average(), Average()

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without new tokens; 0 before one was measured."""
        return self._step.value

    def expected(self, tokens: int) -> float:
        """Return the expected seconds of a step with so many new tokens."""
        return self._step.value + self._token.value * tokens

    def begin(self, tokens: int, *, counts: bool) -> None:
        """Note a new step, and its new tokens; 0 for one that only decodes."""
        self._steps.append((self._clock(), tokens, counts))

    def end(self) -> None:
        """Note the end of the oldest step."""
        if not self._steps:
            return
        began, tokens, counts = self._steps.popleft()
        now = self._clock()
        seconds, self._last_end = now - max(began, self._last_end), now
        if counts and tokens:
            self._token.add(max(seconds - self._step.value, 0.0), tokens)
        elif counts:
            self._step.add(seconds, 1)


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
        decoded: most tokens of a request in a step that only decodes.
        times: the seconds of steps.

    Attributes:
        running: the requests of the last step.

    >>> budget = StepBudget(LayerOptions(None, UNBOUNDED), most_tokens=2048)
    >>> budget.of("a", new_tokens=512) == UNBOUNDED  # no other request runs
    True
    >>> budget.ran({"b": 1})
    >>> budget.of("a", new_tokens=512)  # nothing was measured: 5 ms of loads, at 20 GB/s
    100000000
    >>> budget.decide("a", new_tokens=512, nbytes=90_000_000, taken=True)
    >>> budget.decide("c", new_tokens=512, nbytes=90_000_000, taken=False)
    >>> budget.waits("c")  # it fits into the next step
    True
    """

    def __init__(
        self, options: LayerOptions, most_tokens: int, decoded: int = 1, times: StepTimes | None = None
    ) -> None:
        self._options, self._most_tokens, self._decoded = options, most_tokens, decoded
        self._times = times or StepTimes()
        self._rate = Average()
        self.running: set[str] = set()
        self._taken: dict[str, int] = {}  # requests of this step that load in it, and their new tokens
        self._waiting: dict[str, int] = {}  # hits of this step that wait for the next one, and for how many steps
        self._before: dict[str, int] = {}  # those of the last step

    def of(self, request: str, new_tokens: int) -> int:
        """Return the bytes that all loads of this step may have together, if this request is one of them."""
        return self._bytes({**self._taken, request: new_tokens}, alone=self.running <= {request})

    def _bytes(self, loads: Mapping[str, int], *, alone: bool) -> int:
        if len(loads) == 1 and alone:
            return self._options.most_bytes
        seconds = self._times.expected(min(sum(loads.values()), self._most_tokens))
        stall = self._options.stall_seconds
        if stall is None:
            stall = max(STALL_SECONDS, self._times.step_seconds) if len(loads) == 1 else STALL_SECONDS
        return round(min((self._rate.value or SLOW) * (seconds + stall), self._options.most_bytes))

    def decide(self, request: str, new_tokens: int, nbytes: int, *, taken: bool) -> None:
        """Note whether this step loads a hit. If not, the hit waits, if the next step can load it beside others.

        Args:
            request: its id.
            new_tokens: tokens that it computes.
            nbytes: bytes of its load.
            taken: whether this step loads it.
        """
        if taken:
            self._taken[request] = new_tokens
        elif self._taken and nbytes <= self._bytes({request: new_tokens}, alone=False):
            self._wait(request)

    def waits(self, request: str) -> bool:
        """Return whether a hit waits for the next step."""
        return request in self._waiting

    def waits_again(self, request: str) -> bool:
        """Return whether a hit waits once more, without a lookup: hits that came before it already wait."""
        if self._waiting and request in self._before:
            self._wait(request)
        return self.waits(request)

    def _wait(self, request: str) -> None:
        steps = self._before.get(request, 0) + 1
        if steps <= MOST_WAITS and len(self._waiting) < MOST_WAITS:
            self._waiting[request] = steps

    def ran(self, counts: Mapping[str, int]) -> None:
        """End the decisions for a step, in which these requests compute so many tokens each."""
        decodes = max(counts.values(), default=0) <= self._decoded
        self._times.begin(0 if decodes else sum(counts.values()), counts=bool(counts) and not self._taken)
        self.running = set(counts)
        self._taken = {}
        self._before, self._waiting = self._waiting, {}

    def ended(self, nbytes: int = 0, seconds: float = 0.0) -> None:
        """Note the end of the oldest step, and the loads of which the workers reported."""
        self._times.end()
        if nbytes and seconds:
            self._rate.add(nbytes, seconds)


def bound_loads(scheduler: Any, budget: StepBudget) -> None:
    """Make vLLM's ``OffloadingConnectorScheduler`` ask the budget for each hit."""
    reserve = scheduler._reserve_sync_load

    def reserve_within_budget(status: Any, computed: int, hit: int | None) -> bool:
        if not hit:
            return bool(reserve(status, computed, hit))
        new_tokens, request = status.req.num_tokens - computed - hit, status.req.request_id
        known = scheduler._req_status
        budget.running = {name for name in budget.running if name in known and not known[name].req.is_finished()}
        # The model writes new tokens into the last block before the hook of the layer. A load of the same block would
        # overwrite them.
        whole = not any((computed + hit) % group.tokens_per_block for group in scheduler.config.kv_group_configs)
        allowed = budget.of(request, new_tokens) if whole else 0
        scheduler.config = scheduler.config._replace(sync_load_budget_bytes=allowed)
        taken = bool(reserve(status, computed, hit))
        if taken or (allowed and new_tokens > 0):
            budget.decide(request, new_tokens, hit * scheduler.config.kv_bytes_per_token, taken=taken)
        return taken

    scheduler._reserve_sync_load = reserve_within_budget
