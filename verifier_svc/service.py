"""A verifier as one object: model, engine thread and gRPC server, started and stopped together."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice import __version__
from coppice.models.config import DecoderConfig
from coppice.models.heads.loading import feature_layers, shipped_head
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target, target_hash
from coppice.models.placement import (
    choose_device,
    choose_dtype,
    choose_quantization,
    dtype_name,
    fingerprint,
)
from coppice.settings import Settings, SpeculationSettings
from coppice.tokenizer import Tokenizer
from coppice.tree import MAX_ROWS, DraftTree
from kernels import ops
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Rows, Runner
from verifier_svc.server import VerifierServicer

SERVICE = verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
_WARM_UP_PASSES = 3

log = logging.getLogger(__name__)


class VerifierService:
    """Owns everything that a verifier holds. `start`, then `stop`."""

    def __init__(self, settings: Settings, name: str = "verifier-0") -> None:
        """Loads the model. Raises StartError with one line when that fails."""
        ops.set_threads(settings.verifier.threads)
        path = resolve_model(settings.model.path, settings.cache_dir)
        device = choose_device(settings.model.device)
        dtype = choose_dtype(settings.model.dtype, device)
        quantize = choose_quantization(settings.model.quantization, dtype, device)
        model = load_target(path, dtype, device, settings.model.max_context, quantize)
        self.metrics = VerifierMetrics(name)
        layers = _feature_layers(settings.speculation, model.config)
        runner = Runner(model, settings.verifier.kv_slots, layers)
        self.engine = Engine(runner, settings, self.metrics)
        self.info = common_pb2.ModelInfo(
            model=settings.model.served_name or path.name,
            target_hash=target_hash(path),
            vocab_size=model.config.vocab_size,
            hidden_size=model.config.hidden_size,
            # A session alone in the pool always fits: its tokens and the rows of one tree.
            max_context=min(model.config.max_context, settings.verifier.kv_slots - MAX_ROWS),
            dtype=dtype_name(dtype),
            eos_token_ids=model.config.eos_token_ids,
            numerics_fingerprint=fingerprint(dtype, device, quantize),
            max_rows=MAX_ROWS,
            kv_slots=settings.verifier.kv_slots,
            version=__version__,
        )
        tokenizer = Tokenizer.load(path)
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
        _warm_up(self.engine)
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

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Drains for `grace_seconds`, then frees everything."""
        if self._server is None or self._thread is None:
            return
        if self._thread.is_alive():
            await self._servicer.drain(grace_seconds)
        self.engine.stop()
        await asyncio.to_thread(self._thread.join, 10.0)
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


def _feature_layers(speculation: SpeculationSettings, target: DecoderConfig) -> tuple[int, ...]:
    """The layers whose inputs the drafters of these settings read; none: the final feature."""
    if speculation.drafter != "eagle":
        return ()
    return feature_layers(speculation.head or shipped_head(), target)


def _warm_up(engine: Engine) -> None:
    """Measures passes of trees, one or several, before anything is served."""
    verifier = engine.settings.verifier
    rows = 1
    while rows <= min(max(MAX_ROWS, verifier.row_budget), verifier.kv_slots):
        starts = range(0, rows, MAX_ROWS)
        trees = [_chain(start, min(MAX_ROWS, rows - start)) for start in starts]
        seconds: list[float] = []
        for _ in range(_WARM_UP_PASSES):
            started = time.monotonic()
            engine.runner.run(trees)
            seconds.append(time.monotonic() - started)
        engine.budget.observe_step(rows, min(seconds))
        rows *= 2


def _chain(slot: int, rows: int) -> Rows:
    """A chain at the start of a context, in slots from `slot` on."""
    chain = DraftTree(tuple(range(rows - 1)), tuple(range(rows - 1)), (0.0,) * (rows - 1))
    return Rows([0] * rows, range(rows), range(slot, slot + rows), [], chain.masks(), rows)
