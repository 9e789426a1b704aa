"""One target over several processes: whatever tree, batch or chunk, the bits of plain steps."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.inprocess import Answer, LocalLink, generate
from benchmarks.random_target import write_target
from benchmarks.rank_processes import RankGroup, rank_group
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.tree import DraftTree
from drafter_svc.drafter import DraftRequest, DraftTimes, Features
from kernels import ops
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Rows, Runner
from verifier_svc.target import Target

CPU = torch.device("cpu")
VOCAB, HIDDEN, LAYERS, SLOTS = 61, 72, 4, 512
SHAPE = {
    "model_type": "llama", "vocab_size": 2 * VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
    "max_position_embeddings": 256, "attention_bias": True, "mlp_bias": True, "eos_token_id": 1,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, logprobs=1)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], list(range(2, 60)), [44]]
# Feature layers of the groups: those of an EAGLE-3 head, the last one being the output of all.
EAGLE3 = (2, 1, LAYERS)

pytestmark = pytest.mark.skipif(
    not ops.native_backends(), reason="the native kernels were not built: no C++ compiler"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of SmolLM2's proportions, with every bias; token v + VOCAB has the LM head of token v."""
    path = write_target(tmp_path_factory.mktemp("target"), SHAPE)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][VOCAB:] = tensors["lm_head.weight"][:VOCAB]
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(
    scope="module",
    params=[(2, torch.bfloat16, False), (3, torch.float32, False), (2, torch.float32, True)],
    ids=["2-bf16", "3-fp32", "2-int8"],
)
def group(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    size, dtype, quantize = request.param
    with rank_group(Target(checkpoint, CPU, dtype, quantize, None), size, SLOTS, EAGLE3) as group:
        yield group


@dataclass
class Guesser:
    """Draws bushy trees around answers that it knows, wrong now and then."""

    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]
    identity: str = "guesser"
    features: Features = Features.NONE
    hidden_size: int = 0
    vocab_size: int = 0
    times: DraftTimes = field(default_factory=DraftTimes)
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def features_needed(self, session_id: str, tokens: Sequence[int]) -> int:
        return len(tokens) - 1

    def forget(self, session_id: str) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self.tree(request) for request in requests]

    def tree(self, request: DraftRequest) -> DraftTree:
        session = int(request.session_id)
        done = len(request.tokens) - len(self.prompts[session])
        tokens, parents, row = list[int](), list[int](), 0
        for true in self.answers[session][done : done + self.rng.randint(1, 5)]:
            guess = true if self.rng.random() < 0.8 else (true + 1) % VOCAB
            siblings = {guess, (guess + 7) % VOCAB, (guess + 9) % VOCAB}
            below = row
            for sibling in sorted(siblings, key=lambda _: self.rng.random()):
                tokens.append(sibling)
                parents.append(below)
                if sibling == guess:
                    row = len(tokens)
        count = request.budget
        scores = [0.0] * len(tokens)
        return DraftTree(tuple(tokens[:count]), tuple(parents[:count]), tuple(scores[:count]))


def answers_of(
    runner: Runner,
    sampling: SamplingParams,
    prompts: Sequence[list[int]],
    chunk: int = 256,
    drafter: Guesser | None = None,
) -> list[Answer]:
    settings = Settings.model_validate(
        {
            "speculation": {"budget": "fixed", "nodes": 15},
            "verifier": {"kv_slots": SLOTS, "prefill_chunk": chunk, "row_budget": 64},
        }
    )
    engine = Engine(runner, settings, VerifierMetrics("test"))
    link = None if drafter is None else LocalLink(engine, drafter)
    stopping = StoppingParams(max_tokens=24, ignore_eos=True)
    return generate(engine, prompts, sampling, stopping, link)


def said(answers: Sequence[Answer]) -> list[tuple[list[int], list[object]]]:
    return [(a.tokens, [(e.logprob, e.top) for e in a.logprobs]) for a in answers]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_batches_and_chunks_change_no_bit(group: RankGroup, sampling: SamplingParams) -> None:
    alone = [answers_of(group.runner, sampling, [prompt])[0] for prompt in PROMPTS]
    assert len({token for answer in alone for token in answer.tokens}) > 10, "degenerate"
    guesser = Guesser(PROMPTS, [answer.tokens for answer in alone])
    together = answers_of(group.runner, sampling, PROMPTS, chunk=7, drafter=guesser)
    assert said(together) == said(alone)
    assert sum(answer.stats.accepted_nodes for answer in together) > 10


def chain(tokens: Sequence[int], start: int, logits: int, greedy: bool = False) -> Rows:
    """Tokens at the positions and slots from `start` on, after those of lower slots."""
    stop = start + len(tokens)
    slots = list(range(start, stop))
    return Rows(tokens, slots, slots, list(range(start)), None, logits, greedy)


def features_at(runner: Runner, slots: range) -> Tensor:
    return runner.features[slots.start : slots.stop].clone()


def test_logits_and_eagle3_features_of_a_row_are_the_same_alone_and_among_others(
    group: RankGroup,
) -> None:
    tokens = [(7 * i + 3) % VOCAB for i in range(70)]
    runner = group.runner
    steps = [runner.run([chain(tokens[i : i + 1], i, 1)])[0] for i in range(70)]
    features = features_at(runner, range(70))
    assert features.shape == (70, 3 * HIDDEN)
    (whole,) = runner.run([chain(tokens, 0, 70)])
    assert torch.equal(whole, torch.cat(steps))
    assert torch.equal(features_at(runner, range(70)), features)
    other = Rows([5, 6], [0, 1], [100, 101], [], None, 2)
    runner.run([chain(tokens[:40], 0, 0)])
    beside = runner.run([other, chain(tokens[40:], 40, 30)])[1]
    assert torch.equal(beside, whole[40:])
    assert torch.equal(features_at(runner, range(70)), features)


def test_greedy_rows_bring_the_lowest_ids_of_their_largest_logits(group: RankGroup) -> None:
    tokens = [(5 * i + 2) % VOCAB for i in range(30)]
    (logits,) = group.runner.run([chain(tokens, 0, 30)])
    # Every logit is there twice, but for the first one at two ranks.
    assert torch.equal(logits[:, :VOCAB], logits[:, VOCAB:])
    ids, beside = group.runner.run(
        [chain(tokens, 0, 30, greedy=True), Rows([9], [0], [100], [], None, 1)]
    )
    assert ids.tolist() == logits[:, :VOCAB].argmax(-1).tolist()
    assert beside.shape == (1, 2 * VOCAB)
