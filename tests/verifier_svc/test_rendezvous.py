"""Where ranks listen, and through which network interface they exchange."""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coppice.errors import StartError
from coppice.settings import VerifierSettings
from verifier_svc import ranks
from verifier_svc.followers import Seat, check_alike, meeting_address
from verifier_svc.ranks import Ranks, interface_of, use_interface_of

CPU = torch.device("cpu")
NOBODYS = "192.0.2.1"  # kept free for documentation (RFC 5737)
ASK_FOR_ADDRESS = 0x8915  # SIOCGIFADDR
SEAT = Seat("node", "10.0.0.1", "1.0", "abc", "cpu/tp2")


@pytest.fixture(autouse=True)
def _no_choice_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")  # to be taken back, whatever the test sets
        monkeypatch.delenv(variable)


def addresses() -> Iterator[tuple[str, str]]:
    """Interfaces and their addresses, by the kernel."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, ASK_FOR_ADDRESS, request)
                yield name, socket.inet_ntoa(answer[20:24])


def test_the_interface_is_the_one_that_has_the_address() -> None:
    found = dict(addresses())
    assert found["lo"] == "127.0.0.1"
    assert {name: interface_of(address) for name, address in found.items()} == {n: n for n in found}


def test_an_address_that_no_interface_has_is_named() -> None:
    with pytest.raises(StartError, match=f"has the address {NOBODYS} .*GLOO_SOCKET_IFNAME"):
        Ranks(0, 2, CPU, host=NOBODYS)


def test_gloo_and_nccl_take_the_interface_and_no_other_of_a_like_name() -> None:
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


def test_an_interface_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0,ib1"


def test_with_both_chosen_no_address_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface_of(NOBODYS)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_ranks_of_one_host_meet_where_no_other_host_reaches_them() -> None:
    assert meeting_address(VerifierSettings(tensor_parallel=2)) == "127.0.0.1"


def test_the_first_rank_listens_at_its_own_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    first = Ranks(0, 2, CPU, host="127.0.0.2")
    host, port = first.open()
    assert host == "127.0.0.2"
    socket.create_connection((host, port), timeout=5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)


def test_the_first_rank_does_not_wait_for_ever_for_one_that_never_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "JOIN_SECONDS", 0.2)
    first = Ranks(0, 2, CPU)
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        first.join(first.open())


def test_a_follower_does_not_wait_for_ever_for_a_first_rank_that_fell_silent() -> None:
    script = """
import socket, torch
from verifier_svc import followers
from verifier_svc.ranks import Ranks
followers.JOIN_SECONDS = 0.5
silent = socket.create_server(("127.0.0.1", 0))  # the kernel accepts, and nobody answers
followers.join_in_time(Ranks(1, 2, torch.device("cpu")), silent.getsockname())
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    ended = subprocess.run(
        command, cwd=root, check=False, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


def test_ranks_of_one_kind_are_taken_wherever_they_are() -> None:
    check_alike(SEAT, [SEAT, replace(SEAT, node="other", address="10.0.0.2")])


@pytest.mark.parametrize("what", ["version", "target_hash", "numerics"])
def test_a_rank_that_differs_from_the_first_is_refused_with_both_sides_named(what: str) -> None:
    other = replace(SEAT, address="10.0.0.2", **{what: "another"})
    complaint = f"^rank 2 at 10.0.0.2 has {what} another, the first one at 10.0.0.1 "
    with pytest.raises(StartError, match=complaint + getattr(SEAT, what)):
        check_alike(SEAT, [SEAT, other])
