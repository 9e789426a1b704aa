"""What a result was measured on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

from kernels import ops


def machine() -> dict[str, object]:
    """Processor, cores, versions."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    packages = ("coppice", "torch", "grpcio", "ray", "redis")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernels": ops.describe(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
