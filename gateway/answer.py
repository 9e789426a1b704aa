"""Turns the verifier's events of one session into the pieces that its client gets."""

import time

from coppice.stopping import BY_GRAMMAR, AnswerText
from coppice.tokenizer import Tokenizer
from gateway.metrics import GatewayMetrics
from gateway.validation import Order
from protos import common_pb2, inference_pb2, verifier_pb2


class Answer:
    """Text, usage and timing of one answer, whichever verifiers it comes from. Times are of
    `time.monotonic`."""

    def __init__(
        self,
        request_id: str,
        order: Order,
        model: common_pb2.ModelInfo,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        arrived: float,
    ) -> None:
        self._request_id = request_id
        self._order = order
        self._metrics = metrics
        self._text = AnswerText(tokenizer, order.ends)
        self._ending = set(order.ends.stop_token_ids)
        if not order.ends.ignore_eos:
            self._ending |= set(model.eos_token_ids)
        self._arrived = arrived
        self._first_at: float | None = None
        self._last_at = arrived
        self._finished_parts = common_pb2.SpeculationStats()
        self._part = common_pb2.SpeculationStats()  # of the verifier that runs it now
        self.tokens: list[int] = []  # all that came
        self.numerics_changed = False

    @property
    def started(self) -> bool:
        return self._first_at is not None

    def begin_part(self) -> None:
        """Another verifier goes on, and counts its steps from zero."""
        add_stats(self._finished_parts, self._part)
        self._part.Clear()

    def piece(self, event: verifier_pb2.RunEvent) -> inference_pb2.GenerateResponse:
        """The client's view of one step; the last one where `event` has a finish reason."""
        first = not self.started
        self._clock(len(event.tokens))
        self.tokens.extend(event.tokens)
        if event.HasField("stats"):
            self._part.CopyFrom(event.stats)
        piece = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            text=self._new_text(event),
            token_ids=event.tokens,
            logprobs=event.logprobs,
            mode=event.mode,
            seed=self._order.sampling.seed if first else 0,
            numerics_changed=self.numerics_changed,
        )
        if event.finish_reason:
            piece.finish_reason = event.finish_reason
            piece.stop_reason = event.stop_reason
            piece.usage.CopyFrom(self._usage())
            piece.speculation.CopyFrom(self._finished_parts)
            add_stats(piece.speculation, self._part)
        return piece

    def _new_text(self, event: verifier_pb2.RunEvent) -> str:
        """What these tokens add. The verifier decides where the answer ends; a stop token's own
        text is no part of it."""
        tokens = list(event.tokens)
        stopped = event.finish_reason == common_pb2.FINISH_REASON_STOP
        whole = event.stop_reason == BY_GRAMMAR
        if stopped and not whole and tokens and tokens[-1] in self._ending:
            tokens.pop()
        text = "".join(self._text.push(token) for token in tokens)
        return text + self._text.flush() if event.finish_reason else text

    def _clock(self, tokens: int) -> None:
        if tokens == 0:
            return
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._metrics.time_to_first_token.observe(now - self._arrived)
        else:
            for _ in range(tokens):
                self._metrics.inter_token_latency.observe((now - self._last_at) / tokens)
        self._last_at = now

    def _usage(self) -> inference_pb2.Usage:
        first_at = self._last_at if self._first_at is None else self._first_at
        return inference_pb2.Usage(
            prompt_tokens=len(self._order.prompt),
            completion_tokens=len(self.tokens),
            time_to_first_token_seconds=first_at - self._arrived,
            total_seconds=time.monotonic() - self._arrived,
        )


def add_stats(total: common_pb2.SpeculationStats, part: common_pb2.SpeculationStats) -> None:
    """Adds the counts of `part` to `total`."""
    positions = total.accepted_per_position
    positions.extend([0] * (len(part.accepted_per_position) - len(positions)))
    for position, accepted in enumerate(part.accepted_per_position):
        positions[position] += accepted
    for field in total.DESCRIPTOR.fields:
        if field.name != "accepted_per_position":
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
