"""Judging heads: against the engine that really speculates, and shapes against trees of theirs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.inprocess import LocalLink, generate
from coppice.errors import StartError
from coppice.models.loading import load_target
from coppice.request import SamplingParams, StoppingParams
from coppice.settings import Settings
from coppice.tokenizer import ChatMessage, Tokenizer
from coppice.tree import DraftTree
from drafter_svc.building import build_drafter
from drafter_svc.tree_builder import DynamicPolicy, TreePolicy
from launcher.cli import app
from training.acceptance import Acceptance
from training.evaluate import EvaluateOptions, evaluate, read_sets
from training.report import calibration_error
from training.shapes import DEPTH, NODES, Costs, Rated, Shape, WholeTrees, accepted, rate
from verifier_svc.engine import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.runner import Runner

QUIET = Console(quiet=True)
TOKENS = 12


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A random EAGLE head for the tiny target."""
    shapes = {
        "fc.weight": (32, 64),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
        "layers.0.post_attention_layernorm.weight": (32,),
    }
    random = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=random) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "llama",
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_theta": 1000.0,
        "bias": False,
    }
    path = tmp_path / "head"
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def with_head(settings: Settings, head: Path, **speculation: object) -> Settings:
    changed = {"head": head, "budget": "fixed", **speculation}
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"dtype": "float32"}),
            "speculation": settings.speculation.model_copy(update=changed),
        }
    )


def first_prompts(target: Path, file: Path, count: int) -> list[list[int]]:
    lines = [json.loads(line)["prompt"] for line in file.read_text().splitlines()[:count]]
    tokenizer = Tokenizer.load(target)
    return [tokenizer.encode_chat([ChatMessage("user", line)]) for line in lines]


def test_the_length_is_that_of_the_engine_that_speculates(
    settings: Settings, target: Path, head: Path, prompts: Path
) -> None:
    options = EvaluateOptions([prompts], 4, TOKENS, (0.0, 1.0), (3, 15), 0)
    results = evaluate(with_head(settings, head), options, QUIET).results
    model = load_target(target, torch.float32, torch.device("cpu"))
    for result in results:
        of_size = with_head(settings, head, nodes=result.nodes)
        runner = Runner(model, 2048)
        committed = steps = 0
        for number, prompt in enumerate(first_prompts(target, prompts, 4)):
            engine = Engine(runner, of_size, VerifierMetrics("test"))
            link = LocalLink(engine, build_drafter(of_size))
            sampling = SamplingParams(temperature=result.temperature, seed=number)
            stopping = StoppingParams(max_tokens=TOKENS)
            (answer,) = generate(engine, [prompt], sampling, stopping, link)
            committed += len(answer.tokens) - 1  # the first comes of the prefill
            steps += answer.stats.speculative_steps
        counted = result.acceptance
        assert (counted.tokens, counted.verifications) == (committed, steps)
    assert len(results) == 4
    assert results[0].acceptance.tokens > results[0].acceptance.verifications


class Fake:
    """Children of a path: the same for the same path, and in no other way regular."""

    def children(self, path: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
        random = np.random.default_rng((11, *path))
        tokens = random.permutation(20)[:count].tolist()
        return tokens, np.sort(np.log(random.dirichlet(np.ones(24))))[::-1][:count].tolist()

    def grown(self, policy: TreePolicy, nodes: int) -> DraftTree:
        tree, paths = policy.new_tree(nodes), [()]
        while paths:
            found = [self.children(path, policy.children) for path in paths]
            frontier = tree.extend(
                np.asarray([tokens for tokens, _ in found], np.int64),
                np.asarray([log_probs for _, log_probs in found], np.float32),
            )
            pairs = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
            paths = [(*paths[parent], token) for parent, token in pairs]
        return tree.finished()


def right(tree: DraftTree, follows: Sequence[int]) -> int:
    row, count = 0, 0
    for token in follows:
        below = [i + 1 for i, p in enumerate(tree.parents) if p == row and tree.tokens[i] == token]
        if not below:
            break
        row, count = below[0], count + 1
    return count


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_whole_tree_holds_the_trees_of_every_depth_and_size(width: int) -> None:
    fake = Fake()
    whole = fake.grown(WholeTrees(width), 63)
    stories = [follows_best(fake, ranks) for ranks in ((0,) * 9, (1, 0, 0), (2, 1, 0), (7, 0, 2))]
    for follows in stories:
        lengths = accepted(whole, follows)
        for depth in range(1, DEPTH + 1):
            for index, nodes in enumerate(NODES):
                tree = fake.grown(DynamicPolicy(width, depth), nodes)
                assert lengths[depth - 1, index] == right(tree, follows)


def follows_best(fake: Fake, ranks: Sequence[int]) -> list[int]:
    path: tuple[int, ...] = ()
    for rank in ranks:
        path = (*path, fake.children(path, 8)[0][rank])
    return list(path)


@pytest.mark.parametrize("gains", [[0], [4] * 5, [0, 1, 2, 3, 4, 0, 0, 1]])
def test_plain_decoding_is_the_best_where_drafts_cost_more_than_they_gain(gains: list[int]) -> None:
    lengths = np.broadcast_to(np.asarray(gains)[:, None, None], (len(gains), DEPTH, len(NODES)))
    dear = Costs({1: 1.0, 64: 1.0}, {2: [9.0] * DEPTH})
    plain, *shapes = rate({2: [lengths]}, dear)
    assert plain == Rated(None, 1.0, 1.0)
    assert all(each.tokens_per_second < plain.tokens_per_second for each in shapes)


def test_a_shape_is_rated_by_its_walk_and_its_costs() -> None:
    lengths = np.zeros((5, DEPTH, len(NODES)), dtype=np.int64)
    lengths[0, 1:, 2:] = 2  # three tokens at once, then two plain ones
    costs = Costs({1: 1.0, 4: 2.5, 64: 62.5}, {1: [0.1] * DEPTH, 2: [0.1 * n for n in range(1, 9)]})
    rated = {each.shape: each for each in rate({2: [lengths]}, costs)}
    # 3 nodes in 2 levels: 0.2 s to draft, 2.5 s for 4 rows; 5 tokens in 3 steps.
    assert rated[Shape(2, 2, 3)].acceptance_length == pytest.approx(5 / 3)
    assert rated[Shape(2, 2, 3)].tokens_per_second == pytest.approx(5 / 3 / 2.7)
    # 5 rows lie between 4 and 64.
    assert rated[Shape(3, 2, 4)].tokens_per_second == pytest.approx(5 / 3 / (0.3 + 3.5))
    assert rated[Shape(1, 2, 3)].acceptance_length == 1.0


def test_the_calibration_error_is_the_mean_gap_of_the_nodes() -> None:
    counts = Acceptance()
    probabilities = [(0.9, True), (0.9, True), (0.9, False), (0.12, False)]
    for probability, hit in probabilities:
        counts.add(DraftTree((5,), (0,), (float(np.log(probability)),)), [5 if hit else 6])
    assert calibration_error(counts) == pytest.approx((3 * abs(0.9 - 2 / 3) + 0.12) / 4)


def test_prompts_that_are_too_long_or_doubly_named_are_refused(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(target)
    with pytest.raises(StartError, match="none that the model's context has room for"):
        read_sets(tokenizer, [prompts], 4, 2)
    with pytest.raises(StartError, match="two files"):
        read_sets(tokenizer, [prompts, prompts], 4, 100)
    (sets,) = read_sets(tokenizer, [prompts], 4, 100).values()
    assert sets == first_prompts(target, prompts, 4)


def test_the_command_prints_a_table_and_writes_json_and_a_picture(
    target: Path, head: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(target), "--head", str(head), "--prompts", str(prompts)]
    threads = ["--verifier-threads", "1"]
    sizes = ["--count", "3", "--tokens", "12", "--nodes", "7", "--nodes", "15"]
    files = ["--json", str(tmp_path / "e.json"), "--picture", str(tmp_path / "e.png")]
    result = CliRunner().invoke(
        app, ["train", "evaluate", *arguments, *threads, *sizes, *files], env={"COLUMNS": "160"}
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e.json").read_text())
    lengths = found["acceptance_length"]["prompts"]
    assert list(lengths) == ["0", "1"]
    assert list(lengths["0"]) == ["8", "16"]
    assert f"{lengths['1']['16']:.2f}" in result.output
    assert found["best_static"]["plain_tokens_per_second"] > 0
    bins = found["calibration"]["0"]["16"]["bins"]
    assert sum(each["nodes"] for each in bins) > 0
    assert found["per_depth"]["prompts"]["0"]["8"]
    assert "cpu" in found["machine"]
    assert ("No static shape beats plain" in result.output) != found["best_static"]["pays"]
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
