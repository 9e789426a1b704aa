"""Grammars are tried before they are taken, in a process of their own: what takes too much time or
memory ends that process and nothing else."""

import asyncio
import hashlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict

from coppice.errors import ResourceExhausted
from coppice.grammar import refusal
from coppice.request import StructuredOutput
from coppice.tokenizer import Tokenizer
from gateway.grammar_process import COMPILE_SECONDS, MEMORY_BYTES
from protos import common_pb2

# With those that came before, and the start of the process.
WAIT_SECONDS = 30.0
MAX_REMEMBERED = 1024
_TOO_SLOW = f"it takes more than {COMPILE_SECONDS:g} s"
_TOO_LARGE = f"it takes more than {MEMORY_BYTES >> 20} MB of memory"


class GrammarTrial:
    """`check`, as often as wanted, then `close`."""

    def __init__(self, tokenizer: Tokenizer, model: common_pb2.ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._one_by_one = asyncio.Lock()
        self._process: Process | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # by the grammar's hash

    async def check(self, output: StructuredOutput) -> None:
        """Raises InvalidArgument with the reason when the grammar cannot be compiled within the
        limits, ResourceExhausted when that could not be found out in time."""
        request = output.model_dump_json(exclude_none=True).encode()
        key = hashlib.sha256(request).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    verdict = await self._tried(request)
            except TimeoutError:
                message = "too many grammars at once, or too slow a machine; try again in 1 s"
                raise ResourceExhausted(message) from None
            if verdict != _TOO_LARGE:  # a process may also be killed for no fault of the grammar
                self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_REMEMBERED:
                self._verdicts.popitem(last=False)
        if verdict:
            raise refusal(output, verdict)

    async def close(self) -> None:
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _tried(self, request: bytes) -> str:
        """Why the grammar cannot be compiled; empty if it can."""
        async with self._one_by_one:
            try:
                process = self._process
                if process is None or process.returncode is not None:
                    process = await self._start()
                answer = await _asked(process, request)
                status = 0 if answer else await process.wait()  # a limit, of which it has died
            except BaseException:
                self._kill()  # or the next one would get this one's answer
                raise
        if answer:
            return json.loads(answer)
        return _TOO_SLOW if status == -signal.SIGPROF else _TOO_LARGE

    async def _start(self) -> Process:
        module = "gateway.grammar_process"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is for the gateway alone
        )
        self._process = process
        setup = {
            "tokenizer": self._tokenizer.to_json(),
            "vocab_size": self._model.vocab_size,
            "eos_token_ids": list(self._model.eos_token_ids),
        }
        if not await _asked(process, json.dumps(setup).encode()):
            raise RuntimeError(f"{module} did not start")
        return process


async def _asked(process: Process, line: bytes) -> bytes:
    """The answer to a line; empty when the process is dead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline()
    except ConnectionError:
        return b""
