"""With the native kernels: the same bits with and without speculation, in bf16 and in fp32.

A row's numbers do not depend on the rows beside it, so tokens *and log-probabilities* are equal,
whatever the tree, the batch, or the chunks of the prompt.
"""

import pytest

from coppice.request import SamplingParams
from kernels import ops

pytestmark = pytest.mark.skipif(
    not ops.native_backends(), reason="the native kernels were not built: no C++ compiler"
)

GREEDY = SamplingParams(temperature=0.0, logprobs=3)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=2**64 - 1, logprobs=1)


def said(answers) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, which are compared as equal floats."""
    return [
        (
            a.tokens,
            [entry.logprob for entry in a.logprobs] + [p for e in a.logprobs for _, p in e.top],
        )
        for a in answers
    ]


@pytest.fixture(params=["bf16", pytest.param("fp32", marks=pytest.mark.long)])
def target(request: pytest.FixtureRequest):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_gives_the_same_bits_whatever_the_tree(target, references, sampling) -> None:
    prompts = [r.prompt for r in references[::10]]
    plain = said(target.generate(prompts, sampling, 32))
    for nodes, depth, top_k in ((7, 6, 8), (63, 6, 8)):
        tree = target.generate(prompts, sampling, 32, nodes=nodes, depth=depth, top_k=top_k)
        assert said(tree) == plain
        assert sum(a.stats.accepted_nodes for a in tree) > 10


def test_the_batch_changes_no_bit(target, references) -> None:
    prompts = [r.prompt for r in references[:8]]
    alone = [said(target.generate([prompt], GREEDY, 16))[0] for prompt in prompts]
    assert said(target.generate(prompts, GREEDY, 16)) == alone
    assert said(target.generate(prompts[:3], GREEDY, 16, nodes=15)) == alone[:3]


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_the_chunks_of_a_prompt_change_no_bit(target, references, chunk: int) -> None:
    prompts = [references[7].prompt]
    whole = said(target.generate(prompts, GREEDY, 12))
    assert said(target.generate(prompts, GREEDY, 12, nodes=7, chunk=chunk)) == whole


def test_a_shared_prefix_changes_no_bit(target, references) -> None:
    start = references[7].prompt
    prompts = [[*start, *references[n].prompt[-n:]] for n in range(1, 5)]
    alone = [said(target.generate([prompt], GREEDY, 16))[0] for prompt in prompts]
    assert said(target.generate(prompts, GREEDY, 16, nodes=7, chunk=64)) == alone


def test_recomputing_after_preemption_changes_no_bit(target, references) -> None:
    prompts = [r.prompt for r in references[:5]]
    whole = said(target.generate(prompts, SAMPLED, 48))
    longest = max(len(prompt) for prompt in prompts)
    tight = target.generate(prompts, SAMPLED, 48, nodes=7, slots=2 * longest + 200)
    assert said(tight) == whole
