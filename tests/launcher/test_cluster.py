"""Processes that are ended."""

import subprocess
import sys
import time

import psutil

from launcher.cluster import EXIT_SECONDS, kill

PARENT_THAT_DOES_NOT_ASK = """
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_dead_whose_parent_does_not_ask_after_them_are_not_waited_for() -> None:
    command = [sys.executable, "-c", PARENT_THAT_DOES_NOT_ASK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        started = time.monotonic()
        kill({child})
        assert time.monotonic() - started < EXIT_SECONDS / 2
        assert child.status() == psutil.STATUS_ZOMBIE
        parent.kill()
