"""Prometheus metrics of executors. Values are collected at each scrape, at no cost to transfers."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from kvplan.errors import KVPlanError
from kvplan.execute.stats import BUCKETS, ExecutorStats, PathStats

Source = Callable[[], ExecutorStats | None]

log = logging.getLogger("kvplan.metrics")

# Each metric: name, kind, labels, the field of FlowStats or of ExecutorStats with its value, and description.
FLOW, EXECUTOR = ("executor", "path", "direction"), ("executor",)
METRICS = (
    ("kvplan_transfers", "Counter", FLOW, "transfers", "Transfers that succeeded."),
    ("kvplan_bytes", "Counter", FLOW, "nbytes", "Bytes moved."),
    ("kvplan_descriptors", "Counter", FLOW, "descriptors", "Contiguous copies issued."),
    ("kvplan_launches", "Counter", FLOW, "launches", "Calls that issued them."),
    ("kvplan_transfer_seconds", "Histogram", FLOW, "within", "Seconds of copying a transfer, without queueing."),
    ("kvplan_errors", "Counter", EXECUTOR, "failed", "Transfers that failed."),
    ("kvplan_cancelled", "Counter", EXECUTOR, "cancelled", "Transfers cancelled before they began."),
    ("kvplan_predictions", "Counter", EXECUTOR, "predicted", "Transfers whose time was predicted."),
    ("kvplan_in_flight", "Gauge", EXECUTOR, "in_flight", "Transfers submitted and not yet ended."),
    ("kvplan_prediction_error_ratio", "Gauge", EXECUTOR, "prediction_error",
     "Mean error of predicted times: 0.1 means a tenth too high or too low."),
)  # fmt: skip


class Collector:
    """A collector of executors' metrics, for ``prometheus_client.REGISTRY.register``.

    Args:
        sources: from the name of each executor to a function that returns its stats, such as ``executor.stats``. The
            function may also return the last stats that another process sent, or None. The name becomes the label
            ``executor``. The collector does not keep an executor alive; after garbage collection, the executor has no
            metrics. If a source raises, the error is logged, and the executor has no metrics in that scrape.

    Raises:
        KVPlanError: ``sources`` is not a mapping to functions, or prometheus-client is not installed.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise KVPlanError(f"metrics need prometheus-client: pip install prometheus-client ({error})") from error
        if not isinstance(sources, Mapping) or not all(map(callable, sources.values())):
            raise KVPlanError(f"sources is {sources!r}; give functions by name, such as {{'cpu': executor.stats}}")
        self._core: Any = core
        self._sources = {
            str(name): weakref.WeakMethod(source) if inspect.ismethod(source) else lambda source=source: source
            for name, source in sources.items()
        }

    def describe(self) -> list[Any]:
        """Return the metrics without values, so that registering calls no source."""
        return list(self._families([]))

    def collect(self) -> Iterator[Any]:
        """Yield all metrics with their current values."""
        rows: list[tuple[tuple[str, ...], PathStats]] = []
        for name, kept in self._sources.items():
            try:
                source = kept()
                stats = None if source is None else source()
            except Exception:
                log.warning("no metrics of executor %r", name, exc_info=True)
                continue
            if stats is not None:
                rows += [((name,), stats), *(((name, *flow), stats.flows[flow]) for flow in sorted(stats.flows))]
        yield from self._families(rows)

    def _families(self, rows: Sequence[tuple[tuple[str, ...], PathStats]]) -> Iterator[Any]:
        for name, kind, labels, field, text in METRICS:
            family = getattr(self._core, f"{kind}MetricFamily")(name, text, labels=labels)
            for values, sums in rows:
                value = getattr(sums, field) if len(values) == len(labels) else None
                if kind == "Histogram" and value is not None:
                    family.add_metric(values, _cumulative(value), sums.seconds)
                elif value is not None:
                    family.add_metric(values, value)
            yield family


def _cumulative(within: Sequence[int]) -> list[tuple[str, int]]:
    """Return the buckets of Prometheus; each counts the transfers that took at most its bound in seconds.

    >>> _cumulative((2, 0, 1))[:3]
    [('1e-05', 2), ('2.5e-05', 2), ('5e-05', 3)]
    """
    bounds = [*map(str, BUCKETS), "+Inf"]
    return list(zip(bounds, accumulate([*within, *[0] * (len(bounds) - len(within))]), strict=True))
