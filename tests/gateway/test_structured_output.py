"""Structured output at the door: what compiles is passed on as it is, what does not is refused, and
what never ends hurts nobody."""

import asyncio
import signal

import grpc
import pytest

from protos import common_pb2, inference_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Output = common_pb2.StructuredOutput
Choices = common_pb2.Choices
# The compiler makes a state of every remainder.
ENDLESS = Output(json_schema='{"type": "integer", "multipleOf": 99999989}')


def request(output: Output) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(structured_output=output)
    return inference_pb2.GenerateRequest(text="a", sampling=sampling)


GOOD = [
    Output(json_schema='{"type": "object", "properties": {"a": {"type": "string"}}}'),
    Output(regex="[a-z]+é?"),
    Output(choice=Choices(values=["yes", "no", "ü"])),
    Output(grammar='start: "a" b*\nb: "b" | <end>'),
    Output(json_object=True),
]


async def test_what_compiles_reaches_the_verifier_as_it_is(house) -> None:
    for output in GOOD:
        house.verifier.answers("x")
        first, *_ = [piece async for piece in house.stub.Generate(request(output))]
        assert first.text == "x"
        assert house.verifier.requests[-1].sampling.structured_output == output


BAD = [
    (Output(regex="("), "structured_output.regex = '(': must be a grammar that compiles: "),
    (Output(regex="("), "unclosed group"),
    (Output(regex=""), "structured_output.regex = '': must be a string of 1 to 8192 characters"),
    (Output(regex="a" * 8193), "must be a string of 1 to 8192 characters"),
    (Output(json_schema="{"), "structured_output.json_schema = '{': must be a grammar that compi"),
    (Output(json_schema='{"type": 7}'), "must be a grammar that compiles: "),
    (Output(json_schema=" " * 65537), "must be a string of 1 to 65536 characters"),
    (Output(grammar="begin: /a/"), "structured_output.grammar = 'begin: /a/': must be a grammar"),
    (Output(grammar="start: /a/ & /b/"), "must be a grammar that compiles: "),
    (Output(choice=Choices()), "structured_output.choice.values = {}: must be a list of 1 to 1024"),
    (Output(choice=Choices(values=["a", ""])), "choice.values[1] = '': must be a string of 1 to"),
    (Output(choice=Choices(values=["x"] * 1025)), "must be a list of 1 to 1024, each a string"),
    (Output(json_object=False), "structured_output.json_object = False: must be a grammar"),
    (Output(), "set json_schema, regex, choice, grammar, or json_object to true"),
]


async def test_what_does_not_compile_is_refused_with_the_reason(house) -> None:
    for output, complaint in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await house.stub.Generate(request(output)).read()
        assert caught.value.code() is INVALID, output
        details = caught.value.details()
        assert details.startswith("sampling.structured_output")
        assert complaint in details and len(details) < 600
    assert not house.reached


async def test_a_grammar_that_takes_too_long_is_refused_while_others_are_served(house) -> None:
    house.verifier.echoes = True
    endless = house.stub.Generate(request(ENDLESS))
    refused = asyncio.create_task(endless.read())
    served = 0
    while not refused.done():
        call = house.stub.Generate(inference_pb2.GenerateRequest(text="hello"))
        assert "".join([piece.text async for piece in call]) == "hello"
        served += 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await refused
    assert caught.value.code() is INVALID
    assert "it takes more than 2 s" in caught.value.details()
    assert served > 3
    call = house.stub.Generate(request(GOOD[0]))
    assert "".join([piece.text async for piece in call]) == "a"


async def test_grammars_are_tried_again_after_their_process_was_killed(house) -> None:
    house.verifier.echoes = True
    assert [p async for p in house.stub.Generate(request(GOOD[0]))]
    process = house.server._grammars._process
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert [p async for p in house.stub.Generate(request(GOOD[1]))]
    assert house.server._grammars._process.pid != process.pid
