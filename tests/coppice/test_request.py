"""The bounds of a request's parameters, and what a refusal says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.errors import InvalidArgument
from coppice.request import SamplingParams, StoppingParams, check_tokens, parse_params

REFUSED = [
    (
        SamplingParams,
        {"temperature": -1},
        "p.temperature = -1: must be a finite number in [0, 100]",
    ),
    (
        SamplingParams,
        {"temperature": math.nan},
        "p.temperature = nan: must be a finite number in [0, 100]",
    ),
    (SamplingParams, {"top_p": 0.0}, "p.top_p = 0.0: must be a finite number in (0, 1]"),
    (SamplingParams, {"top_k": 0.5}, "p.top_k = 0.5: must be an integer in [0, 2147483647]"),
    (
        SamplingParams,
        {"seed": 2**64},
        "p.seed = 18446744073709551616: must be an integer in [0, 18446744073709551615]",
    ),
    (
        SamplingParams,
        {"logit_bias": {3: 101}},
        "p.logit_bias[3] = 101: must be a finite number in [-100, 100]",
    ),
    (
        SamplingParams,
        {"logit_bias": {-3: 1}},
        "p.logit_bias[-3] = -3: must be an integer in [0, 2147483648)",
    ),
    (
        SamplingParams,
        {"logit_bias": {"3": 101}},
        "p.logit_bias[3] = 101: must be a finite number in [-100, 100]",
    ),
    (
        SamplingParams,
        {"structured_output": {"regex": ""}},
        "p.structured_output.regex = '': must be a string of 1 to 8192 characters",
    ),
    (
        SamplingParams,
        {"structured_output": {"choice": {"values": ["a", ""]}}},
        "p.structured_output.choice.values[1] = '': must be a string of 1 to 1024 characters",
    ),
    (
        SamplingParams,
        {"structured_output": {"xml": 1}},
        "p.structured_output.xml = 1: must be one of the fields json_schema, regex, choice, ",
    ),
    (
        SamplingParams,
        {"structured_output": 3},
        "p.structured_output = 3: must be a message of the fields json_schema, regex, choice, ",
    ),
    (StoppingParams, {"max_tokens": 0}, "p.max_tokens = 0: must be an integer in [1, 2147483647]"),
    (StoppingParams, {"stop": [""]}, "p.stop[0] = '': must be a string of 1 to 256 characters"),
    (StoppingParams, {"ignore_eos": "maybe"}, "p.ignore_eos = 'maybe': must be true or false"),
    (StoppingParams, {"stop_token_ids": range(257)}, "must be a list of at most 256, each an int"),
    (
        StoppingParams,
        {"stops": []},
        "p.stops = []: must be one of the fields max_tokens, min_tokens, stop_token_ids, stop, ",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "complaint"), REFUSED)
def test_a_refusal_names_the_field_its_value_and_the_whole_range(kind, fields, complaint):
    with pytest.raises(InvalidArgument) as caught:
        parse_params(kind, "p", fields)
    assert complaint in str(caught.value)


def test_a_huge_value_does_not_make_a_huge_refusal():
    with pytest.raises(InvalidArgument) as caught:
        parse_params(StoppingParams, "p", {"stop": ["x" * 1000] * 1000})
    assert len(str(caught.value)) < 250


@given(value=st.floats())
def test_a_temperature_is_taken_exactly_when_it_lies_in_the_range_that_is_told(value):
    if 0 <= value <= 100:
        assert parse_params(SamplingParams, "p", {"temperature": value}).temperature == value
    else:
        with pytest.raises(InvalidArgument):
            parse_params(SamplingParams, "p", {"temperature": value})


@given(tokens=st.lists(st.integers(-2, 12)))
def test_tokens_pass_exactly_when_all_are_in_the_vocabulary(tokens):
    if all(0 <= token < 10 for token in tokens):
        check_tokens("prompt", tokens, 10)
    else:
        with pytest.raises(InvalidArgument, match=r"prompt\[\d+\] = "):
            check_tokens("prompt", tokens, 10)
