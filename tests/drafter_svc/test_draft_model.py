"""Drafting with a small language model, against `transformers` run on every path from its start."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from coppice.errors import StartError
from coppice.tree import DraftTree
from drafter_svc.draft_model import DraftModel, load_draft_model
from drafter_svc.drafter import DraftRequest, FeatureRows
from drafter_svc.engine import DraftEngine
from drafter_svc.growing import GrowingDrafter
from drafter_svc.session import Update
from drafter_svc.static_tree import EAGLE_PATHS, StaticPolicy
from drafter_svc.telemetry import DraftMetrics
from drafter_svc.tree_builder import DynamicPolicy, TreePolicy

VOCAB = 60
CPU = torch.device("cpu")

torch.set_num_threads(1)


@dataclass(frozen=True)
class Node:
    path: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class SlowDrafter:
    """Grows trees without a cache, a mask or a batch."""

    model: Any

    def children(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """All next tokens of the target's vocabulary, likeliest first."""
        with torch.no_grad():
            logits = self.model(torch.tensor([list(tokens)])).logits[0, -1, :VOCAB]
        log_probs = logits.log_softmax(-1).tolist()
        return sorted(enumerate(log_probs), key=lambda entry: (-entry[1], entry[0]))

    def dynamic(self, tokens: list[int], nodes: int, top_k: int, depth: int) -> list[Node]:
        every: list[Node] = []
        frontier = [Node((), 0.0)]
        for _ in range(depth):
            level = [
                Node((*above.path, token), above.score + log_prob)
                for above in frontier
                for token, log_prob in self.children([*tokens, *above.path])[:top_k]
            ]
            every += level
            frontier = sorted(level, key=lambda node: -node.score)[:top_k]
        return sorted(every, key=lambda node: -node.score)[:nodes]

    def static(self, tokens: list[int], nodes: int) -> list[Node]:
        found: dict[tuple[int, ...], Node] = {(): Node((), 0.0)}
        for ranks in sorted(EAGLE_PATHS, key=len):
            above = found[ranks[:-1]]
            token, log_prob = self.children([*tokens, *above.path])[ranks[-1]]
            found[ranks] = Node((*above.path, token), above.score + log_prob)
        del found[()]
        return sorted(found.values(), key=lambda node: -node.score)[:nodes]


@dataclass(frozen=True)
class Tiny:
    network: DraftModel
    slow: SlowDrafter

    def drafter(self, slots: int, top_k: int, depth: int) -> GrowingDrafter:
        return GrowingDrafter(self.network, slots, DynamicPolicy(top_k, depth))


def write_tokenizer(directory: Path, words: dict[str, int]) -> None:
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.save(str(directory / "tokenizer.json"))


def words(count: int) -> dict[str, int]:
    return {f"w{token}": token for token in range(count)}


Make = Callable[..., Tiny]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A random model of 32 dimensions, saved and loaded as a published checkpoint."""

    def build(seed: int = 0, vocab: int = VOCAB) -> Tiny:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config).float().eval()
        target, draft = tmp_path / f"target{seed}", tmp_path / f"draft{seed}"
        for directory in (target, draft):
            directory.mkdir(exist_ok=True)
            write_tokenizer(directory, words(50))
        model.save_pretrained(draft)
        network = load_draft_model(draft, target, VOCAB, torch.float32, CPU)
        return Tiny(network, SlowDrafter(model))

    return build


def story(seed: int, length: int) -> list[int]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (length,), generator=noise).tolist()


def assert_same(tree: DraftTree, expected: list[Node]) -> None:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    assert paths[1:] == [node.path for node in expected]
    assert list(tree.scores) == pytest.approx([node.score for node in expected], abs=1e-4)


@pytest.mark.parametrize(
    ("nodes", "top_k", "depth"),
    [(1, 1, 1), (1, 8, 6), (4, 1, 5), (15, 4, 6), (20, 8, 3), (63, 8, 5)],
)
def test_a_tree_equals_the_slow_reference(make: Make, nodes: int, top_k: int, depth: int) -> None:
    tiny = make(nodes + top_k)
    tokens = story(depth, 3 + nodes)
    drafter = tiny.drafter(256, top_k, depth)
    [tree] = drafter.propose([DraftRequest("s", tokens, nodes)])
    assert_same(tree, tiny.slow.dynamic(tokens, nodes, top_k, depth))
    drafter.check_integrity()


@pytest.mark.parametrize("nodes", [1, 7, 20, 63])
def test_a_static_tree_equals_the_slow_reference(make: Make, nodes: int) -> None:
    tiny = make(5)
    tokens = story(5, 12)
    drafter = GrowingDrafter(tiny.network, 256, StaticPolicy(EAGLE_PATHS))
    [tree] = drafter.propose([DraftRequest("s", tokens, nodes)])
    assert_same(tree, tiny.slow.static(tokens, nodes))
    drafter.check_integrity()


def test_a_batch_of_different_needs_grows_the_trees_of_single_requests(make: Make) -> None:
    tiny = make(3)
    drafter = tiny.drafter(1024, 4, 4)
    needs = [("a", 1, 15), ("b", 30, 3), ("c", 2, 40), ("d", 9, 1), ("e", 400, 7)]
    stories = {name: story(seed, length) for seed, (name, length, _) in enumerate(needs)}
    trees = drafter.propose([DraftRequest(name, stories[name], nodes) for name, _, nodes in needs])
    for (name, _, nodes), tree in zip(needs, trees, strict=True):
        assert_same(tree, tiny.slow.dynamic(stories[name], nodes, 4, 4))
    drafter.check_integrity()


def test_a_session_that_grows_or_is_rolled_back_drafts_the_same(make: Make) -> None:
    tiny = make(4)
    tokens = story(4, 40)
    drafter = tiny.drafter(256, 3, 3)
    for length in (1, 5, 6, 6, 9, 40, 8, 7):
        [tree] = drafter.propose([DraftRequest("s", tokens[:length], 9)])
        assert_same(tree, tiny.slow.dynamic(tokens[:length], 9, 3, 3))
        drafter.check_integrity()
    other = [*tokens[:5], (tokens[5] + 1) % 50, 7]
    assert drafter.features_needed("s", other) == 5
    [tree] = drafter.propose([DraftRequest("s", other, 9)])
    assert_same(tree, tiny.slow.dynamic(other, 9, 3, 3))


def test_what_is_left_to_run_is_told_and_no_feature_is_needed(make: Make) -> None:
    tiny = make()
    tokens = story(4, 12)
    drafter = tiny.drafter(256, 3, 3)
    assert drafter.features_needed("s", tokens) == 0
    assert drafter.propose([DraftRequest("s", tokens[:8], 0)]) == [DraftTree()]
    assert drafter.features_needed("s", tokens[:8]) == 7
    assert drafter.features_needed("s", tokens) == 8
    assert drafter.features_needed("s", []) == 0
    assert drafter.propose([DraftRequest("none", [], 5)]) == [DraftTree()]
    # What others have brought for their drafters is nothing to this one.
    given = FeatureRows(0, torch.full((11, 3), torch.nan))
    [tree] = drafter.propose([DraftRequest("s", tokens, 9, given)])
    assert_same(tree, tiny.slow.dynamic(tokens, 9, 3, 3))


@pytest.mark.parametrize("vocab", [50, 72])
def test_another_padding_of_the_vocabulary_is_no_misfit(make: Make, vocab: int) -> None:
    """Ids from 50 on are padding. The target's 50 to 59 have no row in the small model; those of
    the larger one from 60 on may never be proposed."""
    tiny = make(vocab, vocab=vocab)
    tokens = story(1, 9)
    drafter = tiny.drafter(256, 8, 3)
    [tree] = drafter.propose([DraftRequest("s", tokens, 63)])
    assert_same(tree, tiny.slow.dynamic(tokens, 63, 8, 3))
    assert max(tree.tokens) < VOCAB
    assert len(drafter.propose([DraftRequest("padded", [*tokens, 59, 3], 9)])[0]) == 9


def test_a_vocabulary_of_other_words_is_refused_with_both_sides_named(
    make: Make, tmp_path: Path
) -> None:
    make()
    swapped = words(50) | {"w7": 8, "w8": 7}
    write_tokenizer(tmp_path / "target0", swapped)
    with pytest.raises(StartError) as refused:
        load_draft_model(tmp_path / "draft0", tmp_path / "target0", VOCAB, torch.float32, CPU)
    for said in ("draft0", "target0", "token 7", "'w7'", "'w8'", "speculation.draft_model"):
        assert said in str(refused.value)


def test_a_few_tokens_more_on_either_side_fit(make: Make, tmp_path: Path) -> None:
    make()
    for count in (40, 55):
        write_tokenizer(tmp_path / "target0", words(count))
        load_draft_model(tmp_path / "draft0", tmp_path / "target0", VOCAB, torch.float32, CPU)


def test_a_model_that_is_not_the_same_has_another_identity(make: Make) -> None:
    one, other = make(1).network.identity, make(2).network.identity
    assert one.startswith("draft1@")
    assert one.split("@")[1] != other.split("@")[1]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), static=st.booleans())
def test_no_slot_is_lost_whatever_sessions_do(
    make: Make, data: st.DataObject, static: bool
) -> None:
    policy: TreePolicy = StaticPolicy(EAGLE_PATHS) if static else DynamicPolicy(3, 3)
    drafter = GrowingDrafter(make().network, 64, policy)
    stories = {name: story(seed, 60) for seed, name in enumerate("abc")}
    for _ in range(data.draw(st.integers(1, 8))):
        names = data.draw(st.lists(st.sampled_from("abc"), unique=True))
        batch = [
            DraftRequest(
                name, stories[name][: data.draw(st.integers(0, 60))], data.draw(st.integers(0, 12))
            )
            for name in names
        ]
        for wanted, tree in zip(batch, drafter.propose(batch), strict=True):
            assert len(tree) <= wanted.budget
        if data.draw(st.booleans()):
            drafter.forget(data.draw(st.sampled_from("abc")))
        drafter.check_integrity()


def test_a_failing_pass_leaves_no_slot_behind(make: Make) -> None:
    drafter = make().drafter(256, 4, 4)
    tokens = story(14, 10)
    with pytest.raises(IndexError):
        drafter.propose([DraftRequest("s", [*tokens[:-1], -60_000], 9)])
    drafter.check_integrity()
    assert drafter.features_needed("s", tokens) == 0


class Watched(GrowingDrafter):
    """Remembers how many tokens of each session a batch has brought."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.batches: list[dict[str, int]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.batches.append({r.session_id: len(r.tokens) for r in requests})
        return super().propose(requests)


class Far:
    """A verifier that has no features to give."""

    def __init__(self) -> None:
        self.trees: asyncio.Queue[tuple[str, int, DraftTree]] = asyncio.Queue()

    def join(self, session_id: str, epoch: int) -> None: ...

    def leave(self, session_id: str, epoch: int) -> None: ...

    def send_tree(
        self, session_id: str, epoch: int, base_length: int, draft_id: int, tree: DraftTree
    ) -> None:
        self.trees.put_nowait((session_id, base_length, tree))

    def send_pass(self, session_id: str, epoch: int, base_length: int) -> None:
        raise AssertionError("there is always something to propose")

    def send_latency(self, times: Any) -> None: ...

    async def pull(self, session_id: str, epoch: int, positions: range) -> FeatureRows:
        raise AssertionError("it reads no features")


async def test_a_long_prompt_is_run_in_parts_that_nobody_waits_for(make: Make) -> None:
    tiny = make(6)
    drafter, far = Watched(tiny.network, 2048, DynamicPolicy(2, 2)), Far()
    engine = DraftEngine(drafter, DraftMetrics())
    tokens = story(6, 700)
    engine.start()
    try:
        for name, length in (("long", 700), ("short", 5)):
            engine.attach(name, 1, far)
            engine.committed(name, Update(1, 0, length, tokens[:length], 3))
        answers = [await asyncio.wait_for(far.trees.get(), 10) for _ in "ab"]
    finally:
        await engine.close()
    assert [(name, length) for name, length, _ in answers] == [("short", 5), ("long", 700)]
    for _, length, tree in answers:
        assert_same(tree, tiny.slow.dynamic(tokens[:length], 3, 2, 2))
    assert [batch["long"] for batch in drafter.batches] == [257, 514, 700]
    drafter.check_integrity()


def test_a_checkpoint_without_its_tokenizer_is_refused(make: Make, tmp_path: Path) -> None:
    make()
    (tmp_path / "draft0" / "tokenizer.json").write_text(json.dumps({}))
    with pytest.raises(StartError, match=r"draft0.*tokenizer\.json"):
        load_draft_model(tmp_path / "draft0", tmp_path / "target0", VOCAB, torch.float32, CPU)
