"""The real target with int8 weights: speculation changes no bit there either."""

import pytest
import torch

from benchmarks.inprocess import Answer
from coppice.models.loading import load_target
from coppice.request import SamplingParams
from kernels import ops
from verifier_svc.runner import Runner

pytestmark = pytest.mark.skipif(
    not ops.native_backends(), reason="the native kernels were not built: no C++ compiler"
)

GREEDY = SamplingParams(temperature=0.0, logprobs=1)


def said(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(a.tokens, [entry.logprob for entry in a.logprobs]) for a in answers]


def test_speculation_gives_the_same_bits(bf16, references, model_path) -> None:
    model = load_target(model_path, torch.bfloat16, torch.device("cpu"), quantize=True)
    assert model.lm_head.dtype == model.weights.layers[0].down.dtype == torch.int8
    assert model.weights.embedding.dtype == torch.bfloat16
    target = type(bf16)(Runner(model, 4096), "bfloat16")
    prompts = [r.prompt for r in references[:2]]
    plain = target.generate(prompts, GREEDY, 32, slots=4096)
    tree = target.generate(prompts, GREEDY, 32, nodes=7, slots=4096)
    assert said(tree) == said(plain)
    assert sum(a.stats.accepted_nodes for a in tree) > 5
    assert said(plain) != said(bf16.generate(prompts, GREEDY, 32))
