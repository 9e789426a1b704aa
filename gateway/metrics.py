"""What the gateway itself measures, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coppice.telemetry import LATENCY_BUCKETS_SECONDS


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "coppice_requests",
            "Requests that ended, by gRPC status code.",
            ["code"],
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "coppice_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "coppice_inter_token_latency_seconds",
            "Time between two tokens of an answer; a step's time is shared by its tokens.",
            buckets=LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.sessions = Gauge(
            "coppice_sessions",
            "Sessions of this gateway: waiting for the first token, or streaming.",
            ["state"],
            registry=self.registry,
        )
        self.registered_sessions = Gauge(
            "coppice_registered_sessions",
            "Running sessions of all gateways that the session store knows of.",
            registry=self.registry,
        )
        self.redis_errors = Counter(
            "coppice_redis_errors",
            "Calls to Redis (session store, registry) that failed.",
            registry=self.registry,
        )
        self.workers = Gauge(
            "coppice_workers",
            "Workers that this gateway can use: verifiers that it reaches, drafters that it knows.",
            ["kind"],
            registry=self.registry,
        )
        self.recoveries = Counter(
            "coppice_session_recoveries",
            "Running sessions that had to be opened anew: their verifier was lost, or drained.",
            ["cause"],
            registry=self.registry,
        )
        for state in ("waiting", "streaming"):
            self.sessions.labels(state)
        for cause in ("lost", "drained"):
            self.recoveries.labels(cause)
