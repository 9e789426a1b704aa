"""Hosts made of network namespaces, and a service spread over two of them.

Each host has an address of its own on one bridge, and a cable that can be pulled.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.redis_server import redis_executable

NETWORK = "10.213.77"
RAY_PORT, REDIS_PORT, GATEWAY_PORT = 6390, 6391, 50061
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nobody else is on the bridge
    "OMP_WAIT_POLICY": "PASSIVE",
    # Ray would move the actors of a host that is away for long; here it is to be back before.
    "RAY_health_check_failure_threshold": "40",
}
STOP_SECONDS = 20.0
SCRIPTS = Path(sys.executable).parent


def namespaces_fault() -> str | None:
    """Why no namespaces can be made here, or None."""
    if shutil.which("ip") is None:
        return "no `ip` command: install iproute2"
    try:
        with hosts(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}`: {error.stderr.strip()}: run as root"


@dataclass
class Host:
    name: str  # of the namespace
    address: str
    cable: str  # its end at the bridge
    processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def start(self, ready: str, *command: str) -> subprocess.Popen[str]:
        """A program that runs on it, once its output has a line that matches `ready`."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if re.search(ready, line):
                # Nobody else reads on, and a full pipe would stop it.
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return process
        raise RuntimeError(f"{command[0]} ended without {ready!r}: {''.join(seen)}")

    def cut(self) -> None:
        ip("link", "set", self.cable, "down")

    def join(self) -> None:
        ip("link", "set", self.cable, "up")

    def pids(self) -> list[int]:
        """Of all that runs on it."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def end(self) -> None:
        """Kills all that runs on it."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@dataclass(frozen=True, slots=True)
class HostedService:
    """The gateway, Redis and the head of Ray are on `head`; the workers on both."""

    head: Host
    other: Host
    address: str  # of the gateway
    redis_url: str


@contextlib.contextmanager
def service_on_hosts(
    *flags: str, cores: tuple[int, int] = (2, 2)
) -> Generator[HostedService, None, None]:
    """`coppice up` over two hosts: a verifier and a drafter on each, where `flags` do not say
    otherwise, such as one verifier whose ranks are spread. `cores` are those that Ray believes the
    hosts to have; of ranks that are spread the first one is where most are."""
    with hosts(2) as (head, other), tempfile.TemporaryDirectory() as folder:
        cluster = f"{head.address}:{RAY_PORT}"
        small = ("--object-store-memory=100000000", "--disable-usage-stats")
        ray = (str(SCRIPTS / "ray"), "start", "--block", *small, "--node-ip-address")
        first, second = (f"--num-cpus={each}" for each in cores)
        door = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        head.start("runtime started", *ray, head.address, first, *door, f"--temp-dir={folder}")
        other.start("runtime started", *ray, other.address, second, "--address", cluster)
        redis = ("--bind", head.address, "--port", str(REDIS_PORT), "--protected-mode", "no")
        storage = ("--save", "", "--dir", folder)
        head.start("[Rr]eady to accept", str(redis_executable()), *redis, *storage)
        url = f"redis://{head.address}:{REDIS_PORT}"
        up = head.start(
            "^ready: ",
            *(str(SCRIPTS / "coppice"), "up", "--verifiers", "2", "--drafters", "2"),
            *("--ray-address", cluster, "--redis-url", url),
            *("--host", head.address, "--port", str(GATEWAY_PORT), "--gateway-http-port", "0"),
            *flags,
        )
        try:
            yield HostedService(head, other, f"{head.address}:{GATEWAY_PORT}", url)
        finally:
            up.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(STOP_SECONDS)


@contextlib.contextmanager
def hosts(count: int) -> Generator[list[Host], None, None]:
    """Raises CalledProcessError where they cannot be made. The test itself is on the bridge."""
    tag = uuid.uuid4().hex[:6]
    bridge = f"br{tag}"
    made: list[Host] = []
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{NETWORK}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number in range(1, count + 1):
            host = Host(f"host{number}-{tag}", f"{NETWORK}.{number}", f"c{number}-{tag}")
            ip("netns", "add", host.name)
            made.append(host)
            peer = ("peer", "name", "eth0", "netns", host.name)
            ip("link", "add", host.cable, "master", bridge, "type", "veth", *peer)
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
            host.join()
        yield made
    finally:
        for host in made:
            host.end()
            ip("netns", "del", host.name)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
