"""The real default model answers as it does in transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.models.decoder import Decoder
from coppice.models.loading import load_target
from coppice.tokenizer import ChatMessage, Tokenizer
from kernels.batch import AttentionBatch, Segment

QUESTION = ChatMessage("user", "What is the capital of France?")
CPU = torch.device("cpu")


def greedy(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    slots = torch.randperm(len(prompt) + count)
    cache = decoder.new_cache(len(slots))
    answer: list[int] = []
    done, tokens = 0, prompt
    while len(answer) < count and not set(answer) & set(decoder.config.eos_token_ids):
        mine = slots[done : done + len(tokens)]
        segment = Segment(len(tokens), slots[:done], mine, None)
        positions = torch.arange(done, done + len(tokens))
        features = decoder.forward(
            torch.tensor(tokens), cache, AttentionBatch(mine, positions, (segment,))
        )
        done += len(tokens)
        tokens = [int(decoder.logits(features[-1:]).argmax())]
        answer += tokens
    return answer


@torch.inference_mode()
def test_the_greedy_answer_is_that_of_transformers(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    prompt = tokenizer.encode_chat([QUESTION])
    answer = greedy(load_target(smollm2, torch.float32, CPU), prompt, 16)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert answer == expected[0, len(prompt) :].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_answer_makes_sense(dtype: torch.dtype, smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    decoder = load_target(smollm2, dtype, CPU)
    answer = greedy(decoder, tokenizer.encode_chat([QUESTION]), 24)
    assert "capital of France is Paris" in tokenizer.decode(answer)
    assert answer[-1] in decoder.config.eos_token_ids
