"""Structured output over the running whole: the answer is what was asked for, drafted or not."""

import json
import re

import grpc
import pytest

from protos import common_pb2

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SPECULATIVE = common_pb2.DECODING_MODE_SPECULATIVE
QUESTION = "Invent a person. Answer as JSON with the fields name, age, job and three hobbies."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"enum": ["doctor", "software engineer", "teacher"]},
        "hobbies": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "job", "hobbies"],
    "additionalProperties": False,
}
GRAMMAR = common_pb2.StructuredOutput(json_schema=json.dumps(SCHEMA))


def logprobs_of(reply) -> list[float]:
    return [entry.chosen.logprob for piece in reply.pieces for entry in piece.logprobs]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_json_answer_is_the_same_with_and_without_speculation(whole, temperature) -> None:
    options = {"tokens": 400, "temperature": temperature, "seed": 7, "logprobs": 0}
    plain = await whole.ask(QUESTION, speculation=False, structured_output=GRAMMAR, **options)
    drafted = await whole.ask(QUESTION, structured_output=GRAMMAR, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert logprobs_of(drafted) == logprobs_of(plain)
    assert SPECULATIVE in drafted.modes
    assert drafted.last.speculation.accepted_nodes > 0
    for reply in (plain, drafted):
        assert reply.last.finish_reason == common_pb2.FINISH_REASON_STOP
        assert reply.last.stop_reason == "grammar"
    person = json.loads(drafted.text)
    assert list(person) == ["name", "age", "job", "hobbies"]
    assert type(person["age"]) is int and 0 <= person["age"] <= 120
    assert person["job"] in SCHEMA["properties"]["job"]["enum"]
    assert len(person["hobbies"]) == 3 and all(len(hobby) <= 20 for hobby in person["hobbies"])


async def test_an_answer_matches_its_regex(whole) -> None:
    output = common_pb2.StructuredOutput(regex="(yes|no), because [a-z ]{10,60}\\.")
    reply = await whole.ask("Is the sky blue?", tokens=60, structured_output=output)
    assert re.fullmatch("(yes|no), because [a-z ]{10,60}\\.", reply.text)


async def test_a_grammar_that_does_not_compile_is_refused_at_the_door(whole) -> None:
    for output in (
        common_pb2.StructuredOutput(regex="("),
        common_pb2.StructuredOutput(json_schema='{"type": "text"}'),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await whole.ask("Hi", structured_output=output)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "must be a grammar that compiles" in error.value.details()
