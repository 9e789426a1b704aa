"""Clients that do all that clients do, and compare what they hear with plain answers."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import grpc

from benchmarks.hostile import HostileDrafter
from protos import common_pb2, inference_pb2, inference_pb2_grpc

DEADLINE_SECONDS = 120.0  # of a request: one that takes longer hangs
PROMPT_TOKENS, ANSWER_TOKENS = 300, 96  # at most
SPECULATIVE, ATTACKED = 0.8, 0.25  # shares
ACTIONS = {"answer": 10, "cancel": 3, "disconnect": 2, "bad parameters": 2, "oversize prompt": 1}

Question = inference_pb2.GenerateRequest
Responses = "grpc.aio.UnaryStreamCall[Question, inference_pb2.GenerateResponse]"


def make_questions(count: int, tokens: Sequence[int], random: Random) -> list[Question]:
    """Of random lengths and parameters; prompts are parts of `tokens`, and begin alike by twos."""
    questions: list[Question] = []
    start = 0
    for number in range(count):
        if number % 2 == 0:
            start = random.randrange(len(tokens) - PROMPT_TOKENS)
        sampling = common_pb2.SamplingParams(
            temperature=random.choice((0.0, 0.0, 0.7, 1.2)),
            top_k=random.choice((0, 0, 40)),
            top_p=random.choice((1.0, 0.9)),
            min_p=random.choice((0.0, 0.05)),
            repetition_penalty=random.choice((1.0, 1.0, 1.1)),
            seed=random.getrandbits(64),
        )
        stopping = common_pb2.StoppingParams(
            max_tokens=random.randint(4, ANSWER_TOKENS), ignore_eos=random.random() < 0.5
        )
        ids = tokens[start : start + random.randint(2, PROMPT_TOKENS)]
        questions.append(
            Question(token_ids=common_pb2.TokenIds(ids=ids), sampling=sampling, stopping=stopping)
        )
    return questions


@dataclass(slots=True)
class Reply:
    """An answer, or how far it came."""

    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    finish: int = common_pb2.FINISH_REASON_UNSPECIFIED

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        self.tokens += response.token_ids
        self.text += response.text
        self.finish = response.finish_reason

    def begins(self, whole: "Reply") -> bool:
        """Whether it is the beginning of `whole`, or all of it where it has ended."""
        if self.finish:
            return self == whole
        return whole.tokens[: len(self.tokens)] == self.tokens and whole.text.startswith(self.text)


async def plain_answers(channel: grpc.aio.Channel, questions: Sequence[Question]) -> list[Reply]:
    """Without speculation, one after the other."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    replies: list[Reply] = []
    for question in questions:
        replies.append(Reply())
        async for response in stub.Generate(_asked(question, False), timeout=DEADLINE_SECONDS):
            replies[-1].take(response)
    return replies


def _asked(question: Question, speculation: bool) -> Question:
    asked = Question(speculation=speculation)
    asked.MergeFrom(question)
    return asked


class Client:
    """Does one thing after the other until its time is over."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        hostile: HostileDrafter,
        questions: Sequence[Question],
        answers: Sequence[Reply],
        random: Random,
    ) -> None:
        """`answers` are the plain ones to the questions."""
        self.actions: Counter[str] = Counter()
        self.violations: list[str] = []
        self._address = address
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._hostile = hostile
        self._questions = questions
        self._answers = answers
        self._random = random

    async def ask_until(self, until: float) -> None:
        """Until a time of time.monotonic."""
        while time.monotonic() < until:
            (action,) = self._random.choices(list(ACTIONS), list(ACTIONS.values()))
            self.actions[action] += 1
            try:
                match action:
                    case "answer":
                        await self._answer(self._stub, None)
                    case "cancel":
                        await self._answer(self._stub, self._random.randint(1, 20))
                    case "disconnect":
                        await self._disconnect()
                    case "bad parameters":
                        await self._refused(self._random.choice(BAD_QUESTIONS))
                    case _:
                        ids = common_pb2.TokenIds(ids=[1] * 20_000)
                        await self._refused(Question(token_ids=ids))
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                self.violations.append(f"{action}: {error.code().name}: {details}")

    async def _answer(
        self, stub: "inference_pb2_grpc.InferenceAsyncStub", pieces: int | None
    ) -> None:
        """One answer, cancelled after so many pieces; compared with the plain one."""
        number = self._random.randrange(len(self._questions))
        speculation = self._random.random() < SPECULATIVE
        attacked = speculation and self._random.random() < ATTACKED
        reply, heard = Reply(), 0
        call = stub.Generate(_asked(self._questions[number], speculation), timeout=DEADLINE_SECONDS)
        async for response in call:
            reply.take(response)
            heard += 1
            if attacked and heard == 1:
                self.actions["attacked"] += 1
                self._hostile.take_over(response.request_id)
            if heard == pieces:
                call.cancel()
                break
        if pieces is None and not reply.finish:
            self.violations.append(f"question {number}: no finish reason")
        if not reply.begins(self._answers[number]):
            self.violations.append(f"question {number}: not the plain answer")

    async def _disconnect(self) -> None:
        """On a connection of its own, which is closed in the middle of the answer."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            asking = asyncio.create_task(self._answer(stub, None))
            await asyncio.wait((asking,), timeout=self._random.uniform(0.0, 1.0))
            if asking.done():
                return asking.result()
        asking.cancel()  # the closed channel has ended its call already
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await asking
        return None

    async def _refused(self, question: Question) -> None:
        try:
            async for _ in self._stub.Generate(question, timeout=DEADLINE_SECONDS):
                self.violations.append("answered what cannot be asked")
                return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise


BAD_QUESTIONS = (
    Question(text=""),
    Question(text="x", model="no such model"),
    Question(token_ids=common_pb2.TokenIds(ids=[2**31])),
    Question(text="x", stopping=common_pb2.StoppingParams(max_tokens=0)),
    Question(text="x", stopping=common_pb2.StoppingParams(stop=["a"] * 17)),
    Question(text="x", sampling=common_pb2.SamplingParams(temperature=-1.0)),
    Question(text="x", sampling=common_pb2.SamplingParams(temperature=math.nan)),
    Question(text="x", sampling=common_pb2.SamplingParams(top_p=0.0)),
)
