"""Triton's metrics registry, as the Python backend reaches it: every call is a round trip to tritonserver."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from backend_lib.router.metrics import Family, Kind, Series


class TritonRegistry:
    """Shows metrics at Triton's /metrics, each with the labels `model` and `version` beside its own.

    Raises pb_utils.TritonModelException when the server was built without metrics; one that was told not to show them
    takes them all the same.
    """

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        self._families: list[Any] = []
        self._metrics: dict[Series, Any] = {}

    def add(self, family: Family) -> None:
        made = pb_utils.MetricFamily(
            name=family.name, description=family.help, kind=getattr(pb_utils.MetricFamily, family.kind.name)
        )
        self._families.append(made)
        buckets = {"buckets": list(family.buckets)} if family.kind is Kind.HISTOGRAM else {}
        for value in family.values:
            labels = self._labels | ({family.label: value} if family.label else {})
            self._metrics[Series(family.name, value)] = made.Metric(labels=labels, **buckets)

    def increment(self, series: Series, by: float) -> None:
        self._metrics[series].increment(by)

    def set(self, series: Series, number: float) -> None:
        self._metrics[series].set(number)

    def observe(self, series: Series, number: float) -> None:
        self._metrics[series].observe(number)

    def close(self) -> None:
        """Metrics go before their families: Triton refuses the other order."""
        self._metrics.clear()
        self._families.clear()
