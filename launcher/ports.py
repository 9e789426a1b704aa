"""Whether the ports of the gateway can be had."""

import socket

from coppice.errors import StartError
from coppice.settings import GatewaySettings


def door_ports(gateway: GatewaySettings) -> tuple[tuple[str, int], ...]:
    """Both ports with the flags that set them."""
    return ("--gateway-port", gateway.port), ("--gateway-http-port", gateway.http_port)


def check_ports(gateway: GatewaySettings) -> None:
    """Raises StartError for a port that cannot be had, before anything slow begins."""
    for flag, port in door_ports(gateway):
        fault = port_fault(gateway.host, port)
        if fault is not None:
            where = f"{gateway.host}:{port}"
            mend = f"stop what uses it or choose another with {flag}"
            raise StartError(f"cannot listen on {where} ({fault}): {mend}")


def port_fault(host: str, port: int) -> str | None:
    """Why nothing can listen there, or None."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None
