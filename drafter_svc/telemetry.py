"""The drafter's metrics, in a Prometheus registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coppice.telemetry import LATENCY_BUCKETS_SECONDS, exposition


class DraftMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.latency = Histogram(
            "coppice_draft_latency_seconds",
            "Time to draft one batch of trees",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self._registry,
        )
        self.sessions = Gauge(
            "coppice_draft_sessions", "Sessions attached to the drafter", registry=self._registry
        )
        self.nodes = Counter(
            "coppice_drafted_nodes_total", "Nodes of all trees sent", registry=self._registry
        )

    def exposition(self) -> str:
        """All metrics in the Prometheus text format."""
        return exposition(self._registry)
