"""Tiny published checkpoints, and ways to run ours over scattered slots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from coppice.models.decoder import Decoder
from kernels.batch import AttentionBatch, Segment

VOCAB = 97
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Published = Callable[..., tuple[Path, Any]]
Prefill = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """A random model of a family, saved by transformers: (directory, the model)."""

    def publish(model_type: str, shard: str = "5GB", **settings: Any) -> tuple[Path, Any]:
        config = AutoConfig.for_model(model_type, **{**BASE, **settings})
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            # Wide enough for errors to show, and no bias or norm left at its neutral value.
            for name, weight in model.named_parameters():
                weight.normal_(0.0, 0.25)
                if "norm" in name:
                    weight.add_(1.0)
        model.save_pretrained(tmp_path / "model", max_shard_size=shard)
        return tmp_path / "model", model

    return publish


@pytest.fixture
def prefill() -> Prefill:
    """Logits [rows, vocab] of tokens run in chunks, each sequence in slots scattered at random."""

    def run(decoder: Decoder, tokens: Tensor, chunk: int) -> Tensor:
        rows = len(tokens)
        cache = decoder.new_cache(2 * rows)
        slots = torch.randperm(2 * rows)[:rows]
        features = []
        for start in range(0, rows, chunk):
            stop = min(start + chunk, rows)
            segment = Segment(stop - start, slots[:start], slots[start:stop], None)
            batch = AttentionBatch(slots[start:stop], torch.arange(start, stop), (segment,))
            features.append(decoder.forward(tokens[start:stop], cache, batch))
        return decoder.logits(torch.cat(features))

    return run
