"""`Run`'s messages: a request becomes a session, and a session's events become answers."""

from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from coppice.errors import InvalidArgument
from coppice.grammar import Grammar, GrammarCompiler, GrammarError, refusal
from coppice.models.config import DecoderConfig
from coppice.request import (
    SamplingParams,
    StoppingParams,
    StructuredOutput,
    check_tokens,
    parse_params,
)
from coppice.stopping import FinishReason, Stopper
from coppice.tokenizer import Tokenizer
from protos import common_pb2, verifier_pb2
from verifier_svc.session import Logprobs, Session, StepEvent, new_session

_FINISH = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def requested_session(
    request: verifier_pb2.RunRequest,
    config: DecoderConfig,
    info: common_pb2.ModelInfo,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    sink: Callable[[StepEvent], None],
) -> Session:
    """Raises InvalidArgument with the field's name. Takes long where there is a grammar."""
    sampling = parse_params(SamplingParams, "sampling", _fields(request.sampling))
    stopping = parse_params(StoppingParams, "stopping", _fields(request.stopping))
    prompt, committed = list(request.prompt), list(request.committed)
    vocab, limit = info.vocab_size, info.max_context
    if not request.session_id:
        raise InvalidArgument("session_id", "", "not empty")
    if not 1 <= len(prompt) < limit:
        raise InvalidArgument("prompt", len(prompt), f"of 1 to {limit - 1} tokens")
    for name, ids in (
        ("prompt", prompt),
        ("committed", committed),
        ("stop_token_ids", list(stopping.stop_token_ids)),
        ("logit_bias", list(sampling.logit_bias)),
    ):
        check_tokens(name, ids, vocab)
    if sampling.seed is None:
        raise InvalidArgument("sampling.seed", None, "set by the gateway")
    left = limit - len(prompt)
    max_tokens = min(stopping.max_tokens or left, left)
    if len(committed) >= max_tokens:
        raise InvalidArgument("committed", len(committed), f"of fewer than {max_tokens} tokens")
    grammar = _grammar(grammars, sampling.structured_output, stopping.ignore_eos)
    stopper = Stopper(stopping, config.eos_token_ids, max_tokens, tokenizer, grammar)
    return new_session(
        request.session_id,
        request.epoch,
        prompt,
        sampling,
        stopping.min_tokens,
        stopper,
        sink,
        request.speculation,
        committed,
    )


def _grammar(
    grammars: GrammarCompiler, output: StructuredOutput | None, ignore_eos: bool
) -> Grammar | None:
    if output is None:
        return None
    try:
        return grammars.compile(output, ignore_eos)
    except GrammarError as error:
        raise refusal(output, str(error)) from None


def _fields(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def run_event(event: StepEvent) -> verifier_pb2.RunEvent:
    """The wire form of a step's event."""
    return verifier_pb2.RunEvent(
        tokens=event.tokens,
        logprobs=[_logprobs(entry) for entry in event.logprobs],
        mode=event.mode,
        tree_nodes=event.nodes,
        accepted_length=event.accepted,
        drafter=event.drafter,
        finish_reason=_FINISH[event.finish.reason if event.finish else None],
        stop_reason=event.finish.by if event.finish else "",
        stats=event.stats,
    )


def _logprobs(entry: Logprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenProb(token_id=entry.token, logprob=entry.logprob),
        top=[common_pb2.TokenProb(token_id=token, logprob=lp) for token, lp in entry.top],
    )
