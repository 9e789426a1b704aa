"""Turns the verifier's events of one session into the pieces that its client gets."""

import time

from coppice.stopping import AnswerText
from coppice.tokenizer import Tokenizer
from gateway.metrics import GatewayMetrics
from gateway.validation import Order
from protos import common_pb2, inference_pb2, verifier_pb2


class Answer:
    """Text, usage and timing of one answer. Times are of `time.monotonic`."""

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
        self._tokens = 0

    @property
    def started(self) -> bool:
        return self._first_at is not None

    def piece(self, event: verifier_pb2.RunEvent) -> inference_pb2.GenerateResponse:
        """The client's view of one step; the last one where `event` has a finish reason."""
        first = not self.started
        self._clock(len(event.tokens))
        piece = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            text=self._new_text(event),
            token_ids=event.tokens,
            logprobs=event.logprobs,
            mode=event.mode,
            seed=self._order.sampling.seed if first else 0,
        )
        if event.finish_reason:
            piece.finish_reason = event.finish_reason
            piece.stop_reason = event.stop_reason
            piece.usage.CopyFrom(self._usage())
            piece.speculation.CopyFrom(event.stats)
        return piece

    def _new_text(self, event: verifier_pb2.RunEvent) -> str:
        """What these tokens add. The verifier decides where the answer ends; a stop token's own
        text is no part of it."""
        tokens = list(event.tokens)
        stopped = event.finish_reason == common_pb2.FINISH_REASON_STOP
        if stopped and tokens and tokens[-1] in self._ending:
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
        self._tokens += tokens

    def _usage(self) -> inference_pb2.Usage:
        first_at = self._last_at if self._first_at is None else self._first_at
        return inference_pb2.Usage(
            prompt_tokens=len(self._order.prompt),
            completion_tokens=self._tokens,
            time_to_first_token_seconds=first_at - self._arrived,
            total_seconds=time.monotonic() - self._arrived,
        )
