"""A tiny random EAGLE-3 head: the answers are the plain ones, in one process and over gRPC."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
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
from drafter_svc import wire
from drafter_svc.building import build_drafter
from drafter_svc.service import DrafterService
from kernels import ops
from protos import common_pb2, verifier_pb2
from protos.verifier_pb2_grpc import VerifierStub
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner
from verifier_svc.service import VerifierService

VOCAB, HIDDEN, DRAFTED = 60, 32, 20
PROMPTS = [[3, 4, 5, 3, 4], [7], [9, 9, 9, 2, 9, 9], list(range(40)) * 2]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.1)
SECONDS = 30.0


def write_target(directory: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {f"w{token}": token for token in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


def write_head(directory: Path, layers: list[int]) -> None:
    """Of every third token; reads the inputs of `layers`."""
    noise = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (DRAFTED, HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
        "midlayer.mlp.up_proj.weight": (48, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
    } | {f"midlayer.self_attn.{part}_proj.weight": (HIDDEN, 2 * HIDDEN) for part in "qkv"}
    tensors = {name: torch.randn(shape, generator=noise) * 0.2 for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    tensors |= {"norm.weight": torch.ones(HIDDEN), "t2d": torch.arange(VOCAB) % 3 == 0}
    tensors["d2t"] = 2 * torch.arange(DRAFTED)
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target")
    write_head(folder / "head", [2, 3, 5])
    write_head(folder / "other", [1, 3, 5])
    return folder


def settings_of(models: Path, dtype: str, head: str = "head") -> Settings:
    return Settings.model_validate(
        {
            "model": {"path": str(models / "target"), "dtype": dtype},
            "speculation": {"budget": "fixed", "depth": 4, "top_k": 4, "head": models / head},
            "verifier": {"kv_slots": 2048, "threads": 1},
            "drafter": {"kv_slots": 2048, "threads": 1},
        }
    )


def answers(
    settings: Settings, runner: Runner, sampling: SamplingParams, drafted: bool
) -> list[Answer]:
    engine = Engine(runner, settings, VerifierMetrics("test"))
    link = LocalLink(engine, build_drafter(settings)) if drafted else None
    stopping = StoppingParams(max_tokens=24, ignore_eos=True)
    said = generate(engine, PROMPTS, sampling, stopping, link)
    engine.check_integrity()
    return said


def tokens(said: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in said]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SAMPLED], ids=["greedy", "sampled"]
)
def test_the_answer_is_the_plain_one(models: Path, dtype: str, sampling: SamplingParams) -> None:
    settings = settings_of(models, dtype)
    ops.set_threads(1)
    model = load_target(models / "target", getattr(torch, dtype), torch.device("cpu"))
    plain = answers(settings, Runner(model, 2048), sampling, drafted=False)
    runner = Runner(model, 2048, build_drafter(settings).features.layers)
    assert runner.features.shape == (2048, 3 * HIDDEN)
    drafted = answers(settings, runner, sampling, drafted=True)
    assert tokens(drafted) == tokens(plain)
    assert sum(answer.stats.accepted_nodes for answer in drafted) > 0


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[str, VerifierStub]]:
    service = VerifierService(settings)
    address = await service.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield address, VerifierStub(channel)
    finally:
        await service.stop()


def request(name: str) -> verifier_pb2.RunRequest:
    return verifier_pb2.RunRequest(
        session_id=name,
        epoch=1,
        prompt=PROMPTS[3],
        sampling=common_pb2.SamplingParams(temperature=0.0, seed=1),
        stopping=common_pb2.StoppingParams(max_tokens=150, ignore_eos=True),
        speculation=True,
    )


async def test_the_services_agree_on_what_the_head_reads(models: Path) -> None:
    settings = settings_of(models, "float32")
    drafter = DrafterService.from_settings(settings)
    drafter.start()
    async with serving(settings) as (address, stub):
        call = stub.Run(request("plain"), timeout=SECONDS)
        plain = [token async for event in call for token in event.tokens]
        accepted = 0
        for attempt in range(20):  # a session may be over before the drafter has caught up
            said: list[int] = []
            async for event in stub.Run(request(str(attempt)), timeout=SECONDS):
                if not said:
                    await drafter.attach(str(attempt), address, 2)
                said += event.tokens
                accepted += event.accepted_length
            assert said == plain
            if accepted:
                break
        await drafter.stop()
    assert accepted > 0


async def test_a_head_of_other_layers_is_refused_with_both_sides_named(models: Path) -> None:
    other = build_drafter(settings_of(models, "float32", "other"))
    async with serving(settings_of(models, "float32")) as (_, stub):
        stream = stub.Draft(timeout=SECONDS)
        item = verifier_pb2.DraftItem(hello=wire.hello(other, "d"))
        await stream.write(verifier_pb2.DraftMessage(items=[item]))
        complaint = r"drafter d .* layers \[1, 3, 5\], verifier of target .* layers \[2, 3, 5\]"
        with pytest.raises(grpc.aio.AioRpcError, match=complaint) as error:
            await stream.read()
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
