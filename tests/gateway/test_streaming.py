"""What a client of Generate and Chat gets for a good request."""

import asyncio

import pytest

from protos import common_pb2, inference_pb2

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
END = 256


def generate(text="hi", **stopping):
    return inference_pb2.GenerateRequest(
        text=text, stopping=common_pb2.StoppingParams(**stopping), speculation=False
    )


async def collect(call):
    return [piece async for piece in call]


async def text_of(call):
    return "".join(piece.text for piece in await collect(call))


async def test_every_step_becomes_one_piece_with_its_tokens(house):
    verifier = house.verifier
    verifier.registers()
    verifier.commits("wo", mode=common_pb2.DECODING_MODE_PREFILL)
    verifier.commits("rld", mode=common_pb2.DECODING_MODE_SPECULATIVE)
    verifier.finishes(LENGTH)
    pieces = await collect(house.stub.Generate(generate()))
    assert [(p.text, bytes(p.token_ids), p.mode) for p in pieces] == [
        ("wo", b"wo", common_pb2.DECODING_MODE_PREFILL),
        ("rld", b"rld", common_pb2.DECODING_MODE_SPECULATIVE),
        ("", b"", common_pb2.DECODING_MODE_UNSPECIFIED),
    ]
    assert len({piece.request_id for piece in pieces}) == 1


async def test_a_piece_is_sent_while_the_next_step_still_runs(house):
    house.verifier.registers()
    house.verifier.commits("a")
    call = house.stub.Generate(generate())
    assert (await call.read()).text == "a"
    house.verifier.finishes(LENGTH)
    assert (await call.read()).finish_reason == LENGTH


async def test_the_last_piece_carries_reason_usage_and_statistics(house):
    house.verifier.registers()
    house.verifier.commits("abc")
    stats = common_pb2.SpeculationStats(speculative_steps=2, accepted_nodes=5)
    house.verifier.commits("d", finish_reason=LENGTH, stats=stats)
    last = (await collect(house.stub.Generate(generate("hello"))))[-1]
    assert last.finish_reason == LENGTH
    assert last.speculation == stats
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 4)
    assert 0 < last.usage.time_to_first_token_seconds <= last.usage.total_seconds


async def test_log_probs_pass_through(house):
    logprobs = common_pb2.TokenLogprobs(chosen=common_pb2.TokenProb(token_id=97, logprob=-0.5))
    house.verifier.registers()
    house.verifier.commits("a", logprobs=[logprobs], finish_reason=LENGTH)
    (piece,) = await collect(house.stub.Generate(generate()))
    assert list(piece.logprobs) == [logprobs]


async def test_the_verifier_gets_the_parameters_with_seed_and_length_resolved(house):
    house.verifier.answers("x")
    sampling = common_pb2.SamplingParams(temperature=0.0, logit_bias={7: -1.5})
    request = inference_pb2.GenerateRequest(
        text="hello", sampling=sampling, stopping=common_pb2.StoppingParams(stop=["Z"])
    )
    pieces = await collect(house.stub.Generate(request))
    (run,) = house.verifier.requests
    assert bytes(run.prompt) == b"hello"
    assert (run.sampling.temperature, dict(run.sampling.logit_bias)) == (0.0, {7: -1.5})
    assert (list(run.stopping.stop), run.stopping.max_tokens) == (["Z"], 64 - 5)
    assert run.sampling.HasField("seed")
    assert pieces[0].seed == run.sampling.seed
    assert run.speculation


async def test_two_requests_without_a_seed_get_different_ones(house):
    seeds = []
    for _ in range(2):
        house.verifier.answers("x")
        seeds.append((await collect(house.stub.Generate(generate())))[0].seed)
    assert seeds[0] != seeds[1]


async def test_a_given_seed_is_kept(house):
    house.verifier.answers("x")
    request = inference_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(seed=0))
    await collect(house.stub.Generate(request))
    sampling = house.verifier.requests[0].sampling
    assert sampling.HasField("seed")
    assert sampling.seed == 0


async def test_max_tokens_is_cut_to_what_the_context_leaves(house):
    house.verifier.answers("x")
    await collect(house.stub.Generate(generate("a" * 60, max_tokens=1000)))
    assert house.verifier.requests[0].stopping.max_tokens == 4


async def test_a_prompt_may_come_as_token_ids(house):
    house.verifier.answers("x")
    ids = common_pb2.TokenIds(ids=[5, 6, 256])
    await collect(house.stub.Generate(inference_pb2.GenerateRequest(token_ids=ids)))
    assert list(house.verifier.requests[0].prompt) == [5, 6, 256]


async def test_chat_applies_the_template(house):
    house.verifier.answers("x")
    messages = [
        inference_pb2.ChatMessage(role="system", content="be"),
        inference_pb2.ChatMessage(role="user", content="yo"),
    ]
    assert await text_of(house.stub.Chat(inference_pb2.ChatRequest(messages=messages))) == "x"
    assert bytes(house.verifier.requests[0].prompt) == b"s:be|u:yo|a:"


async def test_a_character_split_over_two_steps_comes_whole(house):
    house.verifier.registers()
    house.verifier.commits("€".encode()[:2])
    house.verifier.commits("€".encode()[2:])
    house.verifier.finishes(LENGTH)
    pieces = await collect(house.stub.Generate(generate()))
    assert [piece.text for piece in pieces] == ["", "€", ""]


async def test_text_that_may_begin_a_stop_string_is_held_back(house):
    house.verifier.registers()
    house.verifier.commits("one EN")
    call = house.stub.Generate(generate(stop=["END"]))
    assert (await call.read()).text == "one "
    house.verifier.commits("Z two")
    assert (await call.read()).text == "ENZ two"
    house.verifier.finishes(LENGTH)
    assert (await call.read()).text == ""


async def test_text_ends_before_a_stop_string_that_spans_steps(house):
    house.verifier.registers()
    house.verifier.commits("one E")
    house.verifier.commits("N")
    house.verifier.commits("D", finish_reason=STOP, stop_reason="END")
    pieces = await collect(house.stub.Generate(generate(stop=["END"])))
    assert "".join(piece.text for piece in pieces) == "one "
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (STOP, "END")


async def test_held_back_text_comes_at_the_end_when_no_stop_string_followed(house):
    house.verifier.registers()
    house.verifier.commits("one EN")
    house.verifier.finishes(LENGTH)
    assert await text_of(house.stub.Generate(generate(stop=["END"]))) == "one EN"


async def test_a_stop_string_within_min_tokens_is_plain_text(house):
    house.verifier.registers()
    house.verifier.commits("END")
    house.verifier.commits("xEND", finish_reason=STOP, stop_reason="END")
    assert await text_of(house.stub.Generate(generate(stop=["END"], min_tokens=3))) == "ENDx"


async def test_the_text_of_a_stop_token_is_left_out(house):
    house.verifier.registers()
    house.verifier.commits("abc", finish_reason=STOP, stop_reason=str(ord("c")))
    pieces = await collect(house.stub.Generate(generate(stop_token_ids=[ord("c")])))
    assert [(p.text, bytes(p.token_ids)) for p in pieces] == [("ab", b"abc")]


async def test_a_stop_token_where_the_length_ends_the_answer_is_text(house):
    house.verifier.registers()
    house.verifier.commits("abc", finish_reason=LENGTH)
    assert await text_of(house.stub.Generate(generate(stop_token_ids=[ord("c")]))) == "abc"


async def test_concurrent_streams_do_not_mix(build):
    house = await build(verifiers=2)
    for verifier in house.verifiers:
        verifier.echoes = True
    prompts = [f"prompt {number}" for number in range(8)]
    calls = [house.stub.Generate(generate(prompt)) for prompt in prompts]
    assert await asyncio.gather(*map(text_of, calls)) == prompts


@pytest.mark.parametrize("name", ["", "tiny"])
async def test_model_info_is_the_verifiers(house, name):
    info = await house.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(model=name))
    assert (info.model, info.max_context, list(info.eos_token_ids)) == ("tiny", 64, [END])
