"""The target's own answers to many prompts at once, by the service's engine, with features."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from coppice.models.decoder import Decoder
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import DrafterSettings, Settings, VerifierSettings
from coppice.stopping import Stopper
from training.dataset import Sample
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner
from verifier_svc.session import Session, StepEvent, new_session

EPOCH = 1
LEAST_SLOTS = 128  # that an engine may have


@dataclass(frozen=True, slots=True)
class Question:
    tokens: Sequence[int]  # the prompt
    sampling: SamplingParams
    max_tokens: int


class Generator:
    """An engine of its own that decodes `sessions` answers at a time, plainly."""

    def __init__(
        self,
        model: Decoder,
        sessions: int,
        max_length: int,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        """`max_length` tokens, prompt and answer, fit for every session at once. Features are the
        inputs of `feature_layers`, as in `Runner`."""
        slots = max(LEAST_SLOTS, sessions * max_length)
        verifier = VerifierSettings(kv_slots=slots, max_sessions=sessions)
        settings = Settings(verifier=verifier, drafter=DrafterSettings(count=0))
        runner = Runner(model, slots, feature_layers)
        self._engine = Engine(runner, settings, VerifierMetrics("training"))
        self._sessions = sessions
        self._eos = model.config.eos_token_ids

    def answer(
        self, questions: Sequence[Question], progress: Callable[[int], None] | None = None
    ) -> list[Sample]:
        """A sample for each question; `progress` is told of new tokens. Raises CoppiceError."""
        samples: dict[int, Sample] = {}
        waiting = iter(enumerate(questions))
        while len(samples) < len(questions):
            self._open(waiting, samples, progress)
            self._engine.step(block=False)
        return [samples[index] for index in range(len(questions))]

    def _open(
        self,
        waiting: Iterator[tuple[int, Question]],
        samples: dict[int, Sample],
        progress: Callable[[int], None] | None,
    ) -> None:
        for _ in range(self._sessions - len(self._engine.sessions)):
            if (entry := next(waiting, None)) is None:
                return
            index, question = entry
            stopping = StoppingParams(max_tokens=question.max_tokens)
            stopper = Stopper(stopping, self._eos, question.max_tokens, None)

            def take(event: StepEvent, index: int = index) -> None:
                if event.error is not None:
                    raise event.error
                if progress is not None:
                    progress(len(event.tokens))
                if event.finish is not None:
                    samples[index] = self._sample(self._engine.sessions[str(index)])

            self._engine.open(
                new_session(
                    str(index), EPOCH, question.tokens, question.sampling, 0, stopper, take, False
                )
            )

    def _sample(self, session: Session) -> Sample:
        """Of a session that has just ended, whose slots are still there."""
        features = self._engine.runner.features[torch.tensor(session.slots)]
        return Sample(
            torch.tensor(session.tokens, dtype=torch.int32),
            session.prompt_length,
            session.params.temperature,
            features.to("cpu", torch.bfloat16),
        )


def questions(
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    seed: int,
    first: int,
    max_tokens: int,
) -> list[Question]:
    """One for each prompt, the temperatures in turn; what a prompt gets depends on its number,
    from `first` on, alone."""
    greedy = SamplingParams(temperature=0.0)
    made: list[Question] = []
    for number, prompt in enumerate(prompts, start=first):
        temperature = temperatures[number % len(temperatures)]
        sampling = greedy.model_copy(update={"temperature": temperature, "seed": seed + number})
        made.append(Question(prompt, sampling, max_tokens))
    return made
