import os
import signal
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import asyncio, subprocess, sys
from launcher.signals import run_stoppable

async def work():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("up", flush=True)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("stopping", flush=True)
        if sys.argv[1] == "sticks":
            child.wait()
        child.kill()
        if sys.argv[1] == "fails":
            raise
    return 0

sys.exit(run_stoppable(work))
"""


def started(kind: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE)
    expect(process, b"up\n")
    return process


def expect(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_the_regular_end_of_work_that_takes_it_so(number: signal.Signals) -> None:
    with started("ends") as process:
        process.send_signal(number)
        assert process.wait(5) == 0


def test_cancelled_work_exits_with_the_signals_code() -> None:
    with started("fails") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM


def test_a_second_signal_ends_a_stop_that_sticks_and_every_child() -> None:
    with started("sticks") as process:
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        expect(process, b"stopping\n")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        child.wait(5)
