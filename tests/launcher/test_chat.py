import io
import socket

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from coppice.errors import CoppiceError
from launcher.chat import Conversation, converse, stats_line
from launcher.cli import app
from launcher.client import AnswerOptions, Client, ServerError, Turn
from protos import common_pb2

from .conftest import Peer

DEFAULTS = AnswerOptions()


def ask(peer: Peer, *arguments: str, stdin: str | None = None):
    command = ["chat", *arguments, "--address", peer.address]
    return CliRunner().invoke(app, command, input=stdin, catch_exceptions=True)


def test_one_question_prints_the_plain_answer(peer: Peer) -> None:
    result = ask(peer, "hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n"
    (request,) = peer.inference.requests
    assert [(m.role, m.content) for m in request.messages] == [("user", "hi")]


def test_what_was_not_asked_for_is_left_to_the_service(peer: Peer) -> None:
    ask(peer, "hi")
    (request,) = peer.inference.requests
    assert request.sampling == common_pb2.SamplingParams()
    assert request.stopping == common_pb2.StoppingParams()
    assert request.speculation is True


def test_flags_become_fields(peer: Peer) -> None:
    flags = "--no-speculation --temperature 0 --top-k 3 --top-p 0.5 --min-p 0.1 --seed 7"
    more = "--repetition-penalty 1.5 --frequency-penalty 0.5 --presence-penalty 0.25"
    limits = "--max-tokens 9 --stop a --stop b --system be"
    ask(peer, "hi", *flags.split(), *more.split(), *limits.split())
    (request,) = peer.inference.requests
    assert request.sampling == common_pb2.SamplingParams(
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    assert request.stopping == common_pb2.StoppingParams(max_tokens=9, stop=["a", "b"])
    assert request.speculation is False
    assert [(m.role, m.content) for m in request.messages] == [("system", "be"), ("user", "hi")]


def test_piped_input_is_one_question(peer: Peer) -> None:
    assert ask(peer, stdin="two\nlines\n").stdout == "Hello world\n"
    assert peer.inference.requests[0].messages[0].content == "two\nlines\n"


def test_statistics_go_beside_the_answer(peer: Peer) -> None:
    result = ask(peer, "hi", "--stats")
    assert result.stdout == "Hello world\n"
    # 10 tokens in the 2 s after the first; 6 accepted in 4 trees, and 12 levels offered
    assert result.stderr.splitlines() == [
        "11 tokens · 5.0 tokens/s · first token after 250 ms · acceptance length 2.50 · "
        "acceptance rate 50%"
    ]


def test_plain_decoding_has_no_acceptance(peer: Peer) -> None:
    peer.inference.script[-1].speculation.Clear()
    with Client(peer.address) as client:
        answer = client.chat([Turn("user", "hi")], DEFAULTS).finish()
    assert stats_line(answer).endswith("plain decoding")
    assert answer.token_ids == (1, 2, 3)


def test_a_refusal_is_one_line(peer: Peer) -> None:
    peer.inference.script.clear()
    peer.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "top_p = 0:\n must be more")
    result = ask(peer, "hi")
    assert result.stdout == ""
    assert str(result.exception) == "INVALID_ARGUMENT: top_p = 0: must be more"
    assert isinstance(result.exception, CoppiceError)


def test_an_answer_that_breaks_off_keeps_what_came_and_says_so(peer: Peer) -> None:
    peer.inference.script.pop()
    peer.inference.refusal = (grpc.StatusCode.UNAVAILABLE, "the verifier is away")
    result = ask(peer, "hi")
    assert result.stdout == "Hello \n"
    assert str(result.exception) == "UNAVAILABLE: the verifier is away"


def test_an_answer_without_an_end_is_an_error(peer: Peer) -> None:
    peer.inference.script.pop()
    with Client(peer.address) as client, pytest.raises(ServerError, match="without a finish"):
        client.chat([Turn("user", "hi")], DEFAULTS).finish()


def test_no_service_is_said_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with Client(address) as client, pytest.raises(ServerError, match="`coppice up`") as caught:
            client.chat([Turn("user", "hi")], DEFAULTS).finish()
    assert address in str(caught.value)


def talk(peer: Peer, lines: str, monkeypatch: pytest.MonkeyPatch, stats: bool = False) -> str:
    """What the conversation shows beside the answers."""
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with Client(peer.address) as client:
        console = Console(file=shown, width=200)
        converse(Conversation(client, DEFAULTS), console, stats)
    return shown.getvalue()


def test_a_conversation_keeps_its_history_until_reset(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(peer, "one\ntwo\n/reset\n\nthree\n", monkeypatch)
    asked = [[m.content for m in request.messages] for request in peer.inference.requests]
    assert asked == [["one"], ["one", "Hello world", "two"], ["three"]]


def test_a_failed_question_is_shown_and_not_remembered(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.inference.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    shown = talk(peer, "one\ntwo\n", monkeypatch)
    assert shown.count("error: RESOURCE_EXHAUSTED: full\n") == 2
    assert [len(request.messages) for request in peer.inference.requests] == [1, 1]
