"""Bad input is refused at the door: the field, the value and the allowed range are named, and
nothing behind the door hears of it."""

import math

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsing import unparsable
from protos import common_pb2, inference_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Request = inference_pb2.GenerateRequest
Sampling = common_pb2.SamplingParams
Stopping = common_pb2.StoppingParams


def ids(*tokens):
    return common_pb2.TokenIds(ids=tokens)


GENERATE = [
    (Request(), "prompt = None: must be text or token_ids"),
    (Request(text=""), "text = '': must be at least one character"),
    (Request(token_ids=ids()), "number of tokens of token_ids.ids = 0: must be in [1, 63]"),
    (Request(text="a" * 64), "number of tokens of text = 64: must be in [1, 63]"),
    (Request(token_ids=ids(1, 258)), "token_ids.ids[1] = 258: must be a token id in [0, 258)"),
    (Request(text="a", model="gpt"), "model = 'gpt': must be 'tiny', or empty"),
    (
        Request(text="a", stopping=Stopping(max_tokens=0)),
        "stopping.max_tokens = 0: must be an integer in [1, 2147483647]",
    ),
    (
        Request(text="a", stopping=Stopping(max_tokens=3, min_tokens=4)),
        "stopping.min_tokens = 4: must be an integer in [0, 3]",
    ),
    (
        Request(text="a", stopping=Stopping(min_tokens=-1)),
        "stopping.min_tokens = -1: must be an integer in [0, 2147483647]",
    ),
    (
        Request(text="a", stopping=Stopping(stop=["x"] * 17)),
        "must be a list of at most 16, each a string of 1 to 256 characters",
    ),
    (
        Request(text="a", stopping=Stopping(stop=["x", ""])),
        "stopping.stop[1] = '': must be a string of 1 to 256 characters",
    ),
    (
        Request(text="a", stopping=Stopping(stop=["x" * 257])),
        "must be a string of 1 to 256 characters",
    ),
    (
        Request(text="a", stopping=Stopping(stop_token_ids=[0, 258])),
        "stopping.stop_token_ids[1] = 258: must be a token id in [0, 258)",
    ),
    (
        Request(text="a", stopping=Stopping(stop_token_ids=range(257))),
        "must be a list of at most 256",
    ),
    (
        Request(text="a", sampling=Sampling(temperature=-1)),
        "sampling.temperature = -1.0: must be a finite number in [0, 100]",
    ),
    (
        Request(text="a", sampling=Sampling(temperature=math.nan)),
        "sampling.temperature = nan: must be a finite number in [0, 100]",
    ),
    (
        Request(text="a", sampling=Sampling(temperature=math.inf)),
        "sampling.temperature = inf: must be a finite number in [0, 100]",
    ),
    (
        Request(text="a", sampling=Sampling(top_p=0.0)),
        "sampling.top_p = 0.0: must be a finite number in (0, 1]",
    ),
    (
        Request(text="a", sampling=Sampling(min_p=1.5)),
        "sampling.min_p = 1.5: must be a finite number in [0, 1]",
    ),
    (
        Request(text="a", sampling=Sampling(top_k=-1)),
        "sampling.top_k = -1: must be an integer in [0, 2147483647]",
    ),
    (
        Request(text="a", sampling=Sampling(repetition_penalty=0.0)),
        "sampling.repetition_penalty = 0.0: must be a finite number in [0.01, 100]",
    ),
    (
        Request(text="a", sampling=Sampling(presence_penalty=-2.5)),
        "sampling.presence_penalty = -2.5: must be a finite number in [-2, 2]",
    ),
    (
        Request(text="a", sampling=Sampling(logprobs=21)),
        "sampling.logprobs = 21: must be an integer in [0, 20]",
    ),
    (
        Request(text="a", sampling=Sampling(logit_bias={258: 1.0})),
        "258: must be a token id in [0, 258)",
    ),
    (
        Request(text="a", sampling=Sampling(logit_bias={7: 101.0})),
        "sampling.logit_bias[7] = 101.0: must be a finite number in [-100, 100]",
    ),
]

CHAT = [
    ([], "messages = []: must be at least one message"),
    (
        [inference_pb2.ChatMessage(role="robot", content="a")],
        "messages[0].role = 'robot': must be one of system, user, assistant, tool",
    ),
    (
        [inference_pb2.ChatMessage(role="user", content="a" * 60)],
        "number of tokens of messages = 65: must be in [1, 63]",
    ),
]


async def refusal(call):
    """The status and the message that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(("request_message", "complaint"), GENERATE)
async def test_bad_generate_requests_are_refused_by_name(house, request_message, complaint):
    code, details = await refusal(house.stub.Generate(request_message))
    assert code is INVALID
    assert complaint in details
    assert not house.reached


@pytest.mark.parametrize(("messages", "complaint"), CHAT)
async def test_bad_chats_are_refused_by_name(house, messages, complaint):
    code, details = await refusal(house.stub.Chat(inference_pb2.ChatRequest(messages=messages)))
    assert code is INVALID
    assert complaint in details
    assert not house.reached


async def test_a_refused_request_leaves_nothing_in_redis(house, redis):
    before = set(await redis.keys("coppice:*"))
    await refusal(house.stub.Generate(Request(text="a", sampling=Sampling(top_p=0))))
    assert set(await redis.keys("coppice:*")) == before


async def test_an_unknown_model_is_refused_for_model_info(house):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await house.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(model="gpt"))
    assert caught.value.code() is INVALID


def delimited(number, payload):
    """The wire form of a length-delimited field (shorter than 128 bytes)."""
    return bytes([number << 3 | 2, len(payload)]) + payload


BAD = b"ok\xff\xfe"
BROKEN = [
    ("Generate", delimited(2, BAD), r"text = b'ok\xff\xfe': must be valid UTF-8"),
    ("Generate", delimited(1, b"\xc3"), r"model = b'\xc3': must be valid UTF-8"),
    (
        "Generate",
        delimited(2, b"fine") + delimited(5, delimited(4, b"one") + delimited(4, b"\xe2\x82")),
        r"stopping.stop[1] = b'\xe2\x82': must be valid UTF-8",
    ),
    (
        "Chat",
        delimited(2, delimited(1, b"user") + delimited(2, BAD)),
        r"messages[0].content = b'ok\xff\xfe': must be valid UTF-8",
    ),
    ("Generate", b"\x12\x7fshort", "must be a message of type coppice.v1.GenerateRequest"),
]


@pytest.mark.parametrize(("method", "raw", "complaint"), BROKEN)
async def test_bytes_that_cannot_be_parsed_are_refused_by_name(house, method, raw, complaint):
    call = house.channel.unary_stream(f"/coppice.v1.Inference/{method}")
    code, details = await refusal(call(raw))
    assert code is INVALID
    assert complaint in details
    assert not house.reached


@given(st.binary(max_size=40))
def test_whatever_the_bytes_are_the_complaint_names_a_field_or_the_type(raw):
    complaint = str(unparsable(inference_pb2.ChatRequest.DESCRIPTOR, raw))
    assert complaint.endswith(("valid UTF-8", "coppice.v1.ChatRequest"))
