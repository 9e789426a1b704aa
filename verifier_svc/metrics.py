"""What a verifier tells Prometheus, and the benchmarks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coppice.acceptance import Walk
from coppice.telemetry import exposition
from coppice.tree import DraftTree

if TYPE_CHECKING:
    from verifier_svc.engine import Engine

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6)
_MEAN_WEIGHT = 0.02


@dataclass(slots=True)
class Timings:
    """Seconds spent, summed over passes; read by the benchmarks."""

    passes: int = 0
    wait: float = 0.0  # for drafts and messages, with sessions running
    plan: float = 0.0
    verify: float = 0.0
    commit: float = 0.0  # sample, walk, tell


class VerifierMetrics:
    """One registry for one engine; every series carries the worker's name."""

    def __init__(self, worker: str) -> None:
        self.registry = CollectorRegistry()
        self._worker = worker
        self.queue_depth = self._gauge("queue_depth", "Sequences running and waiting")
        self._sessions = Gauge(
            "coppice_sessions", "Sessions", ["worker", "state"], registry=self.registry
        )
        self.guard_mode = self._gauge("guard_mode", "1 while the guard holds decoding plain")
        self._kv_slots = Gauge(
            "coppice_kv_slots", "Token slots", ["worker", "state"], registry=self.registry
        )
        self.node_budget = self._gauge("node_budget", "Nodes granted to the last tree")
        self.grants = self._counter("grants", "Times that a drafter was told what it may draft")
        self.granted_nodes = self._counter("granted_nodes", "Nodes granted by all of them")
        self.acceptance_rate = self._gauge(
            "speculative_acceptance_rate",
            "Accepted drafted tokens over the depth of the trees offered, running mean",
        )
        self.tokens_per_step = self._gauge(
            "speculative_tokens_per_step", "Tokens committed per verification, running mean"
        )
        self.calibration_error = self._gauge(
            "speculative_calibration_error",
            "Mean gap between predicted and observed acceptance of nodes",
        )
        self.accepted_length = self._histogram(
            "speculative_accepted_length", "Drafted tokens accepted per tree", tuple(range(13))
        )
        self.accepted_at = Counter(
            "coppice_speculative_accepted_tokens_per_position",
            "Accepted drafted tokens by depth",
            ["worker", "position"],
            registry=self.registry,
        )
        self.verify_latency = self._histogram(
            "verify_latency_seconds", "One forward pass of the target", _SECONDS
        )
        self.committed_tokens = self._counter("committed_tokens", "Tokens committed")
        self.stale_drafts = self._counter("stale_drafts", "Trees that came too late")
        self.malformed_drafts = self._counter("malformed_drafts", "Trees that broke the contract")
        self.preemptions = self._counter("preemptions", "Sessions whose slots were taken back")
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hit_tokens", "Tokens that were not computed again"
        )
        self._mean_rate: float | None = None
        self._mean_tokens: float | None = None

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"coppice_{name}", text, ["worker"], registry=self.registry)
        return gauge.labels(self._worker)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"coppice_{name}", text, ["worker"], registry=self.registry)
        return counter.labels(self._worker)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"coppice_{name}", text, ["worker"], registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._worker)

    def observe_step(self, tree: DraftTree, walked: Walk) -> None:
        self.committed_tokens.inc(len(walked.tokens))
        if not len(tree):
            return
        self.accepted_length.observe(walked.accepted)
        for position in range(1, walked.accepted + 1):
            self.accepted_at.labels(self._worker, str(position)).inc()
        self._mean_rate = _mean(self._mean_rate, walked.accepted / max(tree.depths()))
        self._mean_tokens = _mean(self._mean_tokens, len(walked.tokens))
        self.acceptance_rate.set(self._mean_rate)
        self.tokens_per_step.set(self._mean_tokens)

    def observe_state(self, engine: "Engine") -> None:
        sessions = engine.sessions.values()
        paused = sum(session.paused for session in sessions)
        waiting = sum(session.waiting for session in sessions) - paused
        running = len(sessions) - waiting - paused
        self.queue_depth.set(running + waiting)
        states = {"running": running, "waiting": waiting, "paused": paused}
        for state, number in states.items():
            self._sessions.labels(self._worker, state).set(number)
        self.guard_mode.set(engine.guard.closed)
        slots = engine.slots
        for state, number in (("used", slots.used), ("cached", slots.cached), ("free", slots.free)):
            self._kv_slots.labels(self._worker, state).set(number)

    def text(self) -> str:
        """All series in Prometheus' exposition format."""
        return exposition(self.registry)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _MEAN_WEIGHT * (value - mean)
