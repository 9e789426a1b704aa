import socket
from collections.abc import Iterator

import pytest

from coppice.errors import StartError
from coppice.settings import GatewaySettings
from launcher.ports import check_ports, port_fault


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_a_taken_port_is_named_with_its_flag(taken: int) -> None:
    gateway = GatewaySettings(port=0, http_port=taken)
    with pytest.raises(StartError, match=f"127.0.0.1:{taken} .*--gateway-http-port"):
        check_ports(gateway)


def test_any_free_port_can_be_had() -> None:
    check_ports(GatewaySettings(port=0, http_port=0))


def test_a_port_that_was_just_given_up_can_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
    assert port_fault("127.0.0.1", port) is None


def test_an_address_of_another_machine_cannot_be_had() -> None:
    assert port_fault("203.0.113.1", 0) is not None
