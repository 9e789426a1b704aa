"""The errors that cross a boundary, each with its one gRPC and one HTTP status."""

import grpc


class CoppiceError(Exception):
    """Base of all errors that a user or another service may see."""

    grpc_status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500


class InvalidArgument(CoppiceError):
    """A request that can never be served as it stands."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field} = {shown}: must be {allowed}")
        self.field = field


class NotFound(CoppiceError):
    """A model or session that is not here."""

    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class ResourceExhausted(CoppiceError):
    """Too much load at the moment; worth trying again later."""

    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class Unavailable(CoppiceError):
    """A worker is away; worth trying again."""

    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineExceeded(CoppiceError):
    """The client's own deadline passed before the answer ended."""

    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class FailedPrecondition(CoppiceError):
    """Two parts that do not fit each other, such as a head and a target."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 412


class MalformedDraft(CoppiceError):
    """A draft tree that breaks the contract. Costs that draft alone."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class StartError(CoppiceError):
    """The service cannot start; the message is one line that says what to do."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, where it says much; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
