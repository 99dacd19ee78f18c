"""Prometheus metrics of executors. Values are collected at each scrape, at no cost to transfers."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from kvplan.errors import KVPlanError
from kvplan.execute.stats import BUCKETS, ExecutorStats, FlowStats

Source = Callable[[], ExecutorStats | None]

log = logging.getLogger("kvplan.metrics")

FLOWS: dict[str, tuple[str, Callable[[FlowStats], float]]] = {
    "kvplan_transfers": ("Transfers that succeeded.", lambda flow: flow.transfers),
    "kvplan_bytes": ("Bytes moved.", lambda flow: flow.nbytes),
    "kvplan_descriptors": ("Contiguous copies issued.", lambda flow: flow.descriptors),
    "kvplan_launches": ("Calls that issued them.", lambda flow: flow.launches),
}
SUMS: dict[str, tuple[str, Callable[[ExecutorStats], float]]] = {
    "kvplan_errors": ("Transfers that failed.", lambda stats: stats.failed),
    "kvplan_cancelled": ("Transfers cancelled before they began.", lambda stats: stats.cancelled),
    "kvplan_predictions": ("Transfers whose time was predicted.", lambda stats: stats.predicted),
}
SECONDS = "kvplan_transfer_seconds", "Seconds of copying a transfer, without queueing."
IN_FLIGHT = "kvplan_in_flight", "Transfers submitted and not yet ended."
ERROR = "kvplan_prediction_error_ratio", "Mean error of predicted times: 0.1 means a tenth too high or too low."


class Collector:
    """A collector of executors' metrics, for ``prometheus_client.REGISTRY.register``.

    Args:
        sources: from the name of each executor to a function that returns its stats, such as ``executor.stats``. The
            function may also return the last stats that another process sent, or None. The name becomes the label
            ``executor``. The collector does not keep an executor alive; after garbage collection, the executor has no
            metrics. If a source raises, the error is logged, and the executor has no metrics in that scrape.

    Raises:
        KVPlanError: ``sources`` is not a mapping, a source is not callable, or prometheus-client is not installed.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise KVPlanError(f"metrics need prometheus-client: pip install prometheus-client ({error})") from error
        if not isinstance(sources, Mapping):
            raise KVPlanError(
                f"sources is a {type(sources).__name__}; give a mapping, such as {{'cpu': executor.stats}}"
            )
        self._core = core
        self._sources: dict[str, Callable[[], Source | None]] = {}
        for name, source in sources.items():
            if not callable(source):
                raise KVPlanError(f"source {name!r} is a {type(source).__name__}; give executor.stats, not called")
            self._sources[str(name)] = (
                weakref.WeakMethod(source) if inspect.ismethod(source) else partial(_same, source)
            )

    def describe(self) -> list[Any]:
        """Return the metrics without values, so that registering calls no source."""
        return list(self._families().values())

    def collect(self) -> Iterator[Any]:
        """Yield all metrics with their current values."""
        families = self._families()
        for name, kept in self._sources.items():
            stats = _asked(name, kept())
            if stats is not None:
                self._add(families, name, stats)
        yield from families.values()

    def _families(self) -> dict[str, Any]:
        core, labels = self._core, ("executor", "path", "direction")
        made: dict[str, Any] = {}
        for name, (text, _) in FLOWS.items():
            made[name] = core.CounterMetricFamily(name, text, labels=labels)
        made[SECONDS[0]] = core.HistogramMetricFamily(*SECONDS, labels=labels)
        for name, (text, _) in SUMS.items():
            made[name] = core.CounterMetricFamily(name, text, labels=labels[:1])
        for name, text in (IN_FLIGHT, ERROR):
            made[name] = core.GaugeMetricFamily(name, text, labels=labels[:1])
        return made

    def _add(self, families: dict[str, Any], executor: str, stats: ExecutorStats) -> None:
        for (path, direction), flow in sorted(stats.flows.items()):
            labels = (executor, path, direction)
            for name, (_, value) in FLOWS.items():
                families[name].add_metric(labels, value(flow))
            families[SECONDS[0]].add_metric(labels, buckets_of(flow), flow.seconds)
        for name, (_, total) in SUMS.items():
            families[name].add_metric((executor,), total(stats))
        families[IN_FLIGHT[0]].add_metric((executor,), stats.in_flight)
        if stats.prediction_error is not None:
            families[ERROR[0]].add_metric((executor,), stats.prediction_error)


def buckets_of(flow: FlowStats) -> list[tuple[str, float]]:
    """Return the cumulative buckets of Prometheus; each counts the transfers that took at most its bound in seconds.

    >>> buckets_of(FlowStats(transfers=3, within=(2, 0, 1)))[:3]
    [('1e-05', 2), ('2.5e-05', 2), ('5e-05', 3)]
    """
    bounds = [*map(str, BUCKETS), "+Inf"]
    counts = [*flow.within, *[0] * (len(bounds) - len(flow.within))]
    return list(zip(bounds, accumulate(counts), strict=True))


def _asked(name: str, source: Source | None) -> ExecutorStats | None:
    """Return the stats of a source, or None. An error in one source must not make the whole scrape fail."""
    try:
        return None if source is None else source()
    except Exception:
        log.warning("no metrics of executor %r", name, exc_info=True)
        return None


def _same(source: Source) -> Source:
    return source
