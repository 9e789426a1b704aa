import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from coppice.models.heads.loading import shipped_head

pytestmark = pytest.mark.service

COPPICE = str(Path(sys.executable).with_name("coppice"))
FREE_PORTS = ("--port", "0", "--gateway-http-port", "0")
STOP_SECONDS = 10.0


@dataclass
class Service:
    """A `coppice` process that may write to one folder only."""

    process: subprocess.Popen[str]
    folder: Path
    family: set[psutil.Process] = field(default_factory=set)

    def line(self, stream: str, pattern: str) -> str:
        """The first line that matches."""
        lines = self.process.stdout if stream == "stdout" else self.process.stderr
        assert lines is not None
        seen: list[str] = []
        for line in lines:
            seen.append(line)
            if re.search(pattern, line):
                self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
                return line
        raise AssertionError(f"no line with {pattern!r} in {seen}")

    def signalled(self, number: int) -> tuple[int, float]:
        """Exit code and seconds after the signal to the whole group, as a terminal's Ctrl-C."""
        began = time.monotonic()
        os.killpg(self.process.pid, number)
        return self.process.wait(60), time.monotonic() - began

    def left_behind(self) -> list[object]:
        _, alive = psutil.wait_procs(self.family, timeout=1)
        return [*alive, *self.folder.iterdir()]


@contextlib.contextmanager
def coppice(*arguments: str) -> Iterator[Service]:
    # Short, as unix sockets lie below it.
    folder = Path(tempfile.mkdtemp())
    with subprocess.Popen(
        [COPPICE, *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Service(process, folder)
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
    shutil.rmtree(folder)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COPPICE, *arguments], capture_output=True, text=True, check=False)


def test_up_serves_until_sigterm_and_leaves_nothing_behind() -> None:
    with coppice("up", *FREE_PORTS) as service:
        ready = service.line("stdout", "^ready: ")
        found = re.search(r"gRPC at (127\.0\.0\.1:(\d+)), .*drafter eagle", ready)
        assert found is not None, ready
        address, port = found.groups()
        flags = ("--address", address, "--temperature", "0", "--max-tokens", "8")
        speculative = run("chat", "What is a tree?", "--stats", *flags)
        plain = run("chat", "What is a tree?", "--no-speculation", *flags)
        assert speculative.returncode == plain.returncode == 0, speculative.stderr
        assert speculative.stdout.strip()
        assert speculative.stdout == plain.stdout
        assert "8 tokens" in speculative.stderr
        code, seconds = service.signalled(signal.SIGTERM)
        assert code == 0
        assert seconds < STOP_SECONDS
        assert service.left_behind() == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_ctrl_c_while_starting_leaves_nothing_behind() -> None:
    with coppice("up", *FREE_PORTS) as service:
        service.line("stderr", "^loading ")
        code, seconds = service.signalled(signal.SIGINT)
        assert code == 128 + signal.SIGINT
        assert seconds < STOP_SECONDS
        assert service.left_behind() == []


def test_a_head_that_does_not_fit_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(shipped_head(), head)
    config = head / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 576', '"hidden_size": 64'))
    with coppice("up", *FREE_PORTS, "--speculation-head", str(head)) as service:
        error = service.line("stderr", "^error: ")
        assert "hidden_size is 64, the target's is 576" in error
        assert service.process.wait(STOP_SECONDS) == 2
        assert service.process.communicate() == ("", "")
        assert service.left_behind() == []


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    pulled = Path(run("pull").stdout.strip())
    model = tmp_path / "model"
    shutil.copytree(pulled, model)
    with (model / "model.safetensors").open("r+b") as weights:
        weights.truncate(1_000_000)
    with coppice("up", *FREE_PORTS, "--model", str(model)) as service:
        assert str(model / "model.safetensors") in service.line("stderr", "^error: ")
        assert service.process.wait(STOP_SECONDS) == 2
        assert service.process.communicate() == ("", "")


def test_a_taken_port_is_one_line_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("up", "--port", port)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port} ")
    assert result.stderr.count("\n") == 1


def test_no_redis_is_one_line() -> None:
    result = run("up", *FREE_PORTS, "--redis-url", "redis://127.0.0.1:1")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: no Redis at redis://127.0.0.1:1")
    assert "Traceback" not in result.stderr


def test_ranks_for_which_hosts_are_lacking_are_refused_in_one_line() -> None:
    spread = ("--tensor-parallel", "2", "--verifier-placement", "strict_spread")
    result = run("up", *FREE_PORTS, *spread)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "error: verifier.tensor_parallel = 2 with verifier.placement = strict_spread needs as many "
        "hosts, and Ray knows of 1; lower it, or choose another placement"
    )
    assert "Traceback" not in result.stderr


def test_the_demo_compares_speculative_with_plain_decoding() -> None:
    with coppice("demo") as service:
        last = service.line("stdout", "^speculative: ")
        assert re.fullmatch(
            r"speculative: [\d.]+ tokens/s, acceptance length [\d.]+ \| "
            r"plain: [\d.]+ tokens/s \| same tokens: yes, all \d+\n",
            last,
        )
        assert service.process.wait(STOP_SECONDS) == 0
        assert service.left_behind() == []
