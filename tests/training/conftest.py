"""A small random target in a checkpoint directory, with a tokenizer of whole words."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from coppice.settings import Settings

WORDS = [f"w{number}" for number in range(57)]
VOCAB = ["<unk>", "<s>", "</s>", *WORDS]
TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}<s>"
LAYERS = 6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_target(directory: Path, seed: int = 0) -> Path:
    random = torch.Generator().manual_seed(seed)
    hidden, inner = 32, 48
    shapes = {
        "self_attn.q_proj": (32, hidden),
        "self_attn.k_proj": (16, hidden),
        "self_attn.v_proj": (16, hidden),
        "self_attn.o_proj": (hidden, 32),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn((len(VOCAB), hidden), generator=random),
        "model.norm.weight": 1.0 + 0.1 * torch.randn(hidden, generator=random),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            scale = shape[1] ** -0.5
            tensors[f"{prefix}.{name}.weight"] = scale * torch.randn(shape, generator=random)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    fast = FastTokenizer(WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<unk>"))
    fast.pre_tokenizer = WhitespaceSplit()
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def settings(target: Path) -> Settings:
    return Settings.model_validate({"model": {"path": str(target)}, "verifier": {"threads": 1}})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of 24 different prompts of 1 to 8 words."""
    lines = [
        json.dumps({"prompt": " ".join(WORDS[(7 * n + i * i) % 57] for i in range(1 + n % 8))})
        for n in range(24)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path
