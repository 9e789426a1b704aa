"""The text of an answer, whatever its steps were. Needs no service."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from coppice.request import StoppingParams
from gateway.answer import Answer
from gateway.metrics import GatewayMetrics
from gateway.validation import Order
from protos import common_pb2, verifier_pb2

STOP = common_pb2.FINISH_REASON_STOP


def answer_to(tokenizer, **stopping):
    sampling, ends = common_pb2.SamplingParams(), StoppingParams(**stopping)
    order = Order((1,), sampling, common_pb2.StoppingParams(), ends, False)
    return Answer("id", order, common_pb2.ModelInfo(), tokenizer, GatewayMetrics(), 0.0)


def split(data, raw):
    """Where the steps of an answer end, 0 and the end included."""
    inner = data.draw(st.sets(st.integers(1, len(raw)), max_size=6))
    return sorted(inner | {0, len(raw)})


@given(data=st.data())
def test_no_piece_ever_holds_half_a_character(tokenizer, data):
    text = data.draw(st.text("aé€🌲\u200d", min_size=1, max_size=12))
    raw = text.encode()
    cuts = split(data, raw)
    answer = answer_to(tokenizer)
    pieces = [
        answer.piece(verifier_pb2.RunEvent(tokens=raw[start:end])).text
        for start, end in itertools.pairwise(cuts)
    ]
    assert "".join(pieces) == text
    for count, cut in enumerate(cuts[1:], start=1):
        assert "".join(pieces[:count]) == raw[:cut].decode(errors="ignore")


@given(data=st.data())
def test_no_piece_ever_holds_a_part_of_the_stop_string_that_ends_it(tokenizer, data):
    before = data.draw(st.text("abx", max_size=10).filter(lambda text: "abab" not in text + "aba"))
    raw = (before + "abab").encode()
    answer = answer_to(tokenizer, stop=["abab"])
    shown = ""
    for start, end in itertools.pairwise(split(data, raw)):
        finish = STOP if end == len(raw) else common_pb2.FINISH_REASON_UNSPECIFIED
        event = verifier_pb2.RunEvent(tokens=raw[start:end], finish_reason=finish)
        shown += answer.piece(event).text
        assert before.startswith(shown)
    assert shown == before


def test_a_stop_token_that_completes_a_grammar_is_part_of_the_text(tokenizer):
    for stop_reason, text in (("97", "x"), ("grammar", "xa")):
        answer = answer_to(tokenizer, stop_token_ids=(97,), min_tokens=3)
        event = verifier_pb2.RunEvent(tokens=b"xa", finish_reason=STOP, stop_reason=stop_reason)
        assert answer.piece(event).text == text
