"""The boundary of the public service: what cannot be parsed and what is raised become statuses."""

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from coppice.errors import CoppiceError, DeadlineExceeded
from gateway.metrics import GatewayMetrics
from gateway.parsing import unparsable

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # not generic at run time

Context = grpc.aio.ServicerContext[Any, Any]
Parse = Callable[[bytes], Any]
Method = Callable[[Any, Context], Any]


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of one service; those of others (health, reflection) pass untouched."""

    def __init__(self, service: ServiceDescriptor, metrics: GatewayMetrics) -> None:
        self._inputs: dict[str, Descriptor] = {
            f"/{service.full_name}/{method.name}": method.input_type for method in service.methods
        }
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        expected = self._inputs.get(handler_call_details.method)
        if handler is None or expected is None:
            return handler
        parse = _tolerant(expected, cast("Parse", handler.request_deserializer))
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(cast("Method", handler.unary_stream)),
                parse,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._single(cast("Method", handler.unary_unary)), parse, handler.response_serializer
        )

    def _streaming(self, method: Method) -> Any:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            async with (
                self._boundary(request, context),
                aclosing(method(request, context)) as parts,
            ):
                async for part in parts:
                    yield part

        return answer

    def _single(self, method: Method) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            async with self._boundary(request, context):
                return await method(request, context)

        return answer

    def _boundary(self, request: Any, context: Context) -> AbstractAsyncContextManager[None]:
        return _boundary(request, context, self._metrics)


@asynccontextmanager
async def _boundary(
    request: Any, context: Context, metrics: GatewayMetrics
) -> AsyncGenerator[None]:
    status, message = grpc.StatusCode.CANCELLED, ""
    try:
        if isinstance(request, CoppiceError):
            raise request
        yield
        status = grpc.StatusCode.OK
    except CoppiceError as error:
        status, message = error.grpc_status, str(error)
    except Exception:
        logger.exception("a request failed by a defect")
        status, message = grpc.StatusCode.INTERNAL, "internal error; the gateway's log has more"
    finally:
        remaining = cast("float | None", context.time_remaining())
        if status is grpc.StatusCode.CANCELLED and remaining is not None and remaining <= 0:
            status = DeadlineExceeded.grpc_status
        metrics.requests.labels(status.name).inc()
    if status is not grpc.StatusCode.OK:
        await context.abort(status, message)


def _tolerant(expected: Descriptor, parse: Parse) -> Parse:
    """Parses, or returns the error, since grpc would turn a raised one into INTERNAL."""

    def tolerant(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            return unparsable(expected, raw)

    return tolerant
