"""A verifier as one object: model, engine thread and gRPC server, started and stopped together."""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice import __version__
from coppice.models.config import DecoderConfig
from coppice.models.decoder import Decoder
from coppice.models.heads.loading import feature_layers, shipped_head
from coppice.models.loading import target_hash
from coppice.models.placement import dtype_name, fingerprint
from coppice.settings import Settings, SpeculationSettings, VerifierSettings
from coppice.tokenizer import Tokenizer
from coppice.tree import MAX_ROWS
from kernels import ops
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_svc.engine import Engine
from verifier_svc.engine_calls import on_engine
from verifier_svc.memory import fraction_of, free_bytes, pool_slots, slot_bytes
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.ranks import LOOPBACK, Ranks
from verifier_svc.runner import Runner
from verifier_svc.server import VerifierServicer
from verifier_svc.target import Target, threads_of
from verifier_svc.tensor_parallel import LeadingRunner
from verifier_svc.warm_up import warm_up

SERVICE = verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]

log = logging.getLogger(__name__)


class VerifierService:
    """Owns everything that a verifier holds. `start`, then `stop`."""

    def __init__(
        self, settings: Settings, name: str = "verifier-0", ranks_host: str = LOOPBACK
    ) -> None:
        """Loads the model, or the first rank's part of it, which others find at `ranks_host`.
        Raises StartError with one line when that fails."""
        verifier = settings.verifier
        ops.set_threads(threads_of(verifier, 0))
        target = Target.of(settings)
        self.ranks: Ranks | None = None  # to be joined before `start`
        if verifier.tensor_parallel > 1:
            self.ranks = Ranks(0, verifier.tensor_parallel, target.device, host=ranks_host)
        runner = _runner(target, settings, self.ranks)
        model = runner.model
        self.metrics = VerifierMetrics(name)
        self.engine = Engine(runner, settings, self.metrics)
        self.info = common_pb2.ModelInfo(
            model=settings.model.served_name or target.path.name,
            target_hash=target_hash(target.path),
            vocab_size=model.config.vocab_size,
            hidden_size=model.config.hidden_size,
            # A session alone in the pool always fits: its tokens and the rows of one tree.
            max_context=min(model.config.max_context, runner.slots - MAX_ROWS),
            dtype=dtype_name(target.dtype),
            eos_token_ids=model.config.eos_token_ids,
            numerics_fingerprint=fingerprint(
                target.dtype, target.device, target.quantize, verifier.tensor_parallel
            ),
            max_rows=MAX_ROWS,
            kv_slots=runner.slots,
            version=__version__,
        )
        tokenizer = Tokenizer.load(target.path)
        self._servicer = VerifierServicer(
            self.engine, model, tokenizer, self.info, self._set_not_serving
        )
        # What was loaded stays: the collector need not look through it again and again.
        gc.freeze()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._server: grpc.aio.Server | None = None
        self._thread: threading.Thread | None = None

    async def start(
        self, host: str = "127.0.0.1", on_crash: Callable[[], None] | None = None
    ) -> str:
        """Serves; returns "host:port". `on_crash` is called when the engine's loop fails."""
        warm_up(self.engine)
        self._server = grpc.aio.server(options=_OPTIONS)
        verifier_pb2_grpc.add_VerifierServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._thread = threading.Thread(target=self._run, args=(on_crash,), name="engine")
        self._thread.start()
        return f"{host}:{port}"

    async def sessions(self) -> int:
        """How many it has, running and waiting. Raises Unavailable when the engine is stuck."""
        return await on_engine(self.engine, lambda: len(self.engine.sessions))

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Drains for `grace_seconds`, then frees everything."""
        if self._server is None or self._thread is None:
            return
        if self._thread.is_alive():
            await self._servicer.drain(grace_seconds)
        self.engine.stop()
        await asyncio.to_thread(self._thread.join, 10.0)
        if not self._thread.is_alive():
            self.engine.runner.close()
        await self._server.stop(0.5)
        self._server = self._thread = None

    def _run(self, on_crash: Callable[[], None] | None) -> None:
        try:
            self.engine.run()
        except Exception:
            log.exception("the engine failed")
            if on_crash is not None:
                on_crash()

    async def _set_not_serving(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_health(
        self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType
    ) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)


def _runner(target: Target, settings: Settings, ranks: Ranks | None) -> Runner:
    if ranks is None:
        model = target.load()
        layers = _feature_layers(settings.speculation, model.config)
        return Runner(model, _slots(model, layers, settings.verifier), layers)
    shard = target.load_shard(ranks)
    layers = _feature_layers(settings.speculation, shard.config)
    return LeadingRunner(shard, _slots(shard, layers, settings.verifier), layers)


def _slots(model: Decoder, layers: tuple[int, ...], verifier: VerifierSettings) -> int:
    """Of the pool. Raises StartError when it does not fit beside the target."""
    # On a CPU the ranks of a host share its memory; each GPU has its own, for its rank's part.
    shared = model.device.type == "cpu" and verifier.placement != "strict_spread"
    own = model.config if shared else model.own
    features = model.config.hidden_size * max(1, len(layers))
    each = slot_bytes(own, features, model.dtype)
    fraction = fraction_of(verifier, model.device)
    return pool_slots(verifier, each, free_bytes(model.device), fraction)


def _feature_layers(speculation: SpeculationSettings, target: DecoderConfig) -> tuple[int, ...]:
    """The layers whose inputs the drafters of these settings read; none: the final feature."""
    if speculation.drafter != "eagle":
        return ()
    return feature_layers(speculation.head or shipped_head(), target)
