"""Tiny random models: whatever drafts, and in whatever tree, the answer is the plain one."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inprocess import Answer, LocalLink, generate
from coppice.models.loading import load_target
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from drafter_svc.building import build_drafter
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner

VOCAB, HIDDEN = 60, 32
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.1)
PROMPTS = [[3, 4, 5, 3, 4], [7], [9, 9, 9, 2, 9, 9], list(range(40)) * 2]
HEAD_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bias": False,
}


def write_model(directory: Path, seed: int, layers: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {f"w{token}": token for token in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=noise) * 0.2 for name, shape in shapes.items()}


def write_medusa(directory: Path) -> None:
    directory.mkdir()
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(4):
        shapes[f"{head}.0.linear.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{head}.0.linear.bias"] = (HIDDEN,)
    save_file(random(shapes), directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text('{"medusa_num_heads": 4, "medusa_num_layers": 1}')


def write_eagle(directory: Path) -> None:
    directory.mkdir()
    attention = {f"layers.0.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    mlp = {f"layers.0.mlp.{name}_proj.weight": (48, HIDDEN) for name in ("gate", "up")}
    rest = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, 48),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    }
    save_file(random(attention | mlp | rest), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(HEAD_CONFIG))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "target", 1, 2)
    write_model(folder / "small", 2, 1)
    write_medusa(folder / "medusa")
    write_eagle(folder / "eagle")
    return folder


@pytest.fixture(scope="module")
def runner(models: Path) -> Runner:
    return Runner(load_target(models / "target", torch.float32, CPU), 4096)


def answers(
    runner: Runner, settings: Settings, sampling: SamplingParams, plain: bool = False
) -> list[Answer]:
    engine = Engine(runner, settings, VerifierMetrics("test"))
    link = None if plain else LocalLink(engine, build_drafter(settings))
    stopping = StoppingParams(max_tokens=40, ignore_eos=True)
    said = generate(engine, PROMPTS, sampling, stopping, link)
    engine.check_integrity()
    return said


def speculating(
    models: Path, speculation: Mapping[str, object], quantization: str = "none"
) -> Settings:
    given = [key for key in ("head", "draft_model") if key in speculation]
    named = {key: str(models / str(speculation[key])) for key in given}
    return Settings.model_validate(
        {
            "model": {"path": str(models / "target"), "dtype": "float32"},
            "speculation": {"budget": "fixed", **speculation, **named},
            "drafter": {"quantization": quantization},
        }
    )


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("speculation", "least"),
    [
        ({"drafter": "model", "draft_model": "target"}, 60),
        ({"drafter": "model", "draft_model": "target", "top_k": 1, "nodes": 7}, 20),
        ({"drafter": "model", "draft_model": "target", "tree": "static", "nodes": 31}, 40),
        ({"drafter": "model", "draft_model": "small"}, 1),
        ({"drafter": "model", "draft_model": "small", "ngram": True}, 1),
        ({"drafter": "medusa", "head": "medusa"}, 1),
        ({"drafter": "medusa", "head": "medusa", "tree": "static", "nodes": 63}, 1),
        ({"drafter": "medusa", "head": "medusa", "ngram": True}, 1),
        ({"drafter": "eagle", "head": "eagle", "tree": "static", "nodes": 31}, 1),
        ({"drafter": "eagle", "head": "eagle", "ngram": True}, 1),
    ],
    ids=lambda part: "-".join(map(str, part.values())) if isinstance(part, dict) else "",
)
def test_the_answer_is_the_plain_one(
    models: Path,
    runner: Runner,
    speculation: dict[str, object],
    least: int,
    sampling: SamplingParams,
    quantization: str,
) -> None:
    """`least`: of the drafted tokens have to be accepted, or nothing was tried."""
    settings = speculating(models, speculation, quantization)
    plain = answers(runner, settings, sampling, plain=True)
    drafted = answers(runner, settings, sampling)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert sum(answer.stats.accepted_nodes for answer in drafted) >= least


def test_a_model_that_drafts_for_itself_is_right_to_the_last_token(
    models: Path, runner: Runner
) -> None:
    chain = {"drafter": "model", "draft_model": "target", "top_k": 1, "nodes": 7, "depth": 6}
    chain["ngram"] = False
    for answer in answers(runner, speculating(models, chain), GREEDY):
        # Only what the end of the answer cuts off is not accepted.
        assert answer.stats.accepted_nodes > answer.stats.offered_depth - 6
        assert answer.stats.accepted_nodes > 30
