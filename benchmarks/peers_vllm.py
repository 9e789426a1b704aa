"""vLLM's OpenAI server on the same model, from an environment of its own."""

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import psutil

from benchmarks.closed_loop import REQUEST_SECONDS, Ask, Piece, Request
from coppice.errors import StartError
from coppice.models.placement import choose_device, choose_dtype, dtype_name
from coppice.settings import Settings

START_SECONDS = 600.0
STOP_SECONDS = 20.0
MOST_SESSIONS, LONGEST = 64, 4096
KV_GIGABYTES = 4
LAST_LINES = 3  # of its log, where it fails


@contextlib.asynccontextmanager
async def vllm_server(python: Path, model: Path, settings: Settings) -> AsyncGenerator[Ask, None]:
    """As long as the context, on all cores, without a prefix cache, in the type that ours would
    use. Raises StartError when it does not start."""
    dtype = choose_dtype(settings.model.dtype, choose_device(settings.model.device))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--dtype", dtype_name(dtype)),
            *("--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching"),
            *("--max-num-seqs", str(MOST_SESSIONS), "--max-model-len", str(LONGEST)),
            env={
                **os.environ,
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIGABYTES),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                timeout=REQUEST_SECONDS,
                limits=httpx.Limits(max_connections=None),
            ) as client:
                if not await _healthy(client, process):
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise StartError(f"vllm did not start: {' | '.join(lines[-LAST_LINES:])}")
                yield _asks(client, str(model))
        finally:
            await _end(process)


async def _healthy(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_SECONDS):
            while process.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health")).is_success:
                        return True
                await asyncio.sleep(0.5)
    return False


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends it with its own workers."""
    if process.returncode is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    if process.returncode is None:
        process.kill()
        await process.wait()


def _asks(client: httpx.AsyncClient, model: str) -> Ask:
    async def ask(request: Request) -> AsyncGenerator[Piece, None]:
        # Without a seed: with one, vllm-cpu 0.32 dies where it reads a prompt in parts ("CPU
        # Generator does not use offset"). Its answers are not compared.
        body = {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise StartError(f"vllm refused: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                piece = json.loads(data)
                if "choices" not in piece:  # a request that failed while it was answered
                    raise StartError(f"vllm: {data}")
                yield Piece(piece["choices"][0].get("token_ids") or ())

    return ask
