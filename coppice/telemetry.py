"""Metrics and logs in the one form that all services share. Imports no torch."""

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LATENCY_BUCKETS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def exposition(registry: CollectorRegistry) -> str:
    """All metrics of `registry` in the Prometheus text format."""
    return generate_latest(registry).decode()


def merge_expositions(by_worker: Mapping[str, str]) -> str:
    """One valid exposition from those of several processes.

    Every metric has its HELP and TYPE once, and every sample a label `worker` (left away for the
    name ""), so two workers never offer the same series. A metric that a later worker declares
    with another type is left out there.
    """
    merged: dict[str, Metric] = {}
    for worker, text in by_worker.items():
        for family in text_string_to_metric_families(text):
            known = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            if known.type != family.type:
                continue
            for sample in family.samples:
                labels = {"worker": worker, **sample.labels} if worker else dict(sample.labels)
                known.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Collected(tuple(merged.values())))
    return exposition(registry)


class _Collected(Collector):
    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what is passed as `extra` becomes fields of their own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._standard = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {
            name: value for name, value in record.__dict__.items() if name not in self._standard
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure_logging(service: str, level: str) -> None:
    """Sends this process's logs to stderr as JSON lines. To be called once, by an entry point."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
