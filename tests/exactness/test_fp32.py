"""fp32: the real model answers as `transformers.generate` does, whatever the tree."""

from pathlib import Path

import pytest
import torch
import transformers

from coppice.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=2**63 + 5)
PENALIZED = SamplingParams(
    temperature=0.7, top_k=40, min_p=0.02, seed=1, repetition_penalty=1.2, frequency_penalty=0.3
)


def test_plain_decoding_equals_transformers(fp32, references) -> None:
    answers = fp32.generate([r.prompt for r in references], GREEDY)
    assert [a.tokens for a in answers] == [r.answer for r in references]


@pytest.mark.parametrize(
    ("nodes", "depth", "top_k", "every"),
    [(1, 1, 1, 5), (4, 4, 1, 5), (15, 6, 8, 5), (63, 6, 8, 20)],
)
def test_speculation_equals_transformers(
    fp32, references, nodes: int, depth: int, top_k: int, every: int
) -> None:
    # Plain decoding has all 20 above; trees some of them, and half of their answers, as rows take
    # minutes on small machines (`benchmarks.exactness` takes all).
    chosen = references[::every]
    answers = fp32.generate(
        [r.prompt for r in chosen], GREEDY, 64, nodes=nodes, depth=depth, top_k=top_k
    )
    assert [a.tokens for a in answers] == [r.answer[:64] for r in chosen]
    accepted = sum(a.stats.accepted_nodes for a in answers)
    assert accepted > 0.3 * sum(a.stats.speculative_steps for a in answers)


def test_the_kept_reference_is_what_transformers_answers(references, model_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for reference in (references[0], references[-1]):
        ids = torch.tensor([reference.prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert out[0, ids.shape[1] :].tolist() == reference.answer[:24]


@pytest.mark.parametrize("sampling", [SAMPLED, PENALIZED], ids=["top-p", "penalties"])
def test_a_seeded_sample_does_not_depend_on_the_tree(fp32, references, sampling) -> None:
    prompts = [r.prompt for r in references[::10]]
    plain = [a.tokens for a in fp32.generate(prompts, sampling, 40)]
    bushy = fp32.generate(prompts, sampling, 40, nodes=15)
    chain = fp32.generate(prompts, sampling, 40, nodes=3, depth=3, top_k=1)
    ngram = fp32.generate(prompts, sampling, 40, nodes=15, drafter="ngram")
    for other in (bushy, chain, ngram):
        assert [a.tokens for a in other] == plain
    assert sum(a.stats.accepted_nodes for a in bushy) > 20


@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_a_seeded_sample_does_not_depend_on_the_batch(fp32, references, concurrency: int) -> None:
    prompts = [references[0].prompt] + [r.prompt for r in references[1:concurrency]]
    alone = fp32.generate(prompts[:1], SAMPLED, 32)[0].tokens
    together = fp32.generate(prompts, SAMPLED, 32, nodes=7)
    assert together[0].tokens == alone
