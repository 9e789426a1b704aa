"""The real target and the shipped head, in this process."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.inprocess import Answer, LocalLink, generate
from coppice.models.hub import DEFAULT_MODEL, resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import dtype_name
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from drafter_svc.building import build_drafter
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner

SLOTS = 12288


@dataclass(frozen=True)
class Reference:
    """What `transformers.generate` answered (see make_reference.py)."""

    name: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Target:
    """One loaded target; engines and drafters of any shape around it."""

    runner: Runner
    dtype: str

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        tokens: int = 128,
        nodes: int | None = None,
        depth: int = 6,
        top_k: int = 8,
        drafter: str = "eagle",
        chunk: int = 256,
        slots: int = SLOTS,
    ) -> list[Answer]:
        """Answers all prompts at once; `nodes` None: plainly."""
        settings = Settings.model_validate(
            {
                "model": {"dtype": self.dtype},
                "speculation": {
                    "budget": "fixed",
                    "nodes": nodes or 1,
                    "depth": depth,
                    "top_k": top_k,
                    "drafter": drafter,
                },
                "verifier": {
                    "kv_slots": slots,
                    "row_budget": 64 * len(prompts),
                    "prefill_chunk": chunk,
                },
            }
        )
        engine = Engine(self.runner, settings, VerifierMetrics("test"))
        link = None if nodes is None else LocalLink(engine, build_drafter(settings))
        stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
        answers = generate(engine, prompts, sampling, stopping, link)
        engine.check_integrity()
        assert engine.slots.used == 0
        return answers


def load(dtype: torch.dtype) -> Target:
    path = resolve_model(DEFAULT_MODEL, Settings().cache_dir)
    model = load_target(path, dtype, torch.device("cpu"))
    return Target(Runner(model, SLOTS), dtype_name(dtype))


@pytest.fixture(scope="session")
def fp32() -> Target:
    return load(torch.float32)


@pytest.fixture(scope="session")
def bf16() -> Target:
    return load(torch.bfloat16)


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    entries = json.loads(Path(__file__).with_name("reference_tokens.json").read_text())["entries"]
    return [Reference(entry["set"], entry["prompt"], entry["answer"]) for entry in entries]


@pytest.fixture(scope="session")
def model_path() -> Path:
    return resolve_model(DEFAULT_MODEL, Settings().cache_dir)
