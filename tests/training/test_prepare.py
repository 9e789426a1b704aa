"""Data that the engine generates, against the target run over whole texts by plain torch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from coppice.errors import StartError
from coppice.settings import Settings
from coppice.tokenizer import ChatMessage, Tokenizer
from tests.training.conftest import LAYERS
from training.dataset import Dataset, Sample, frequent_tokens, token_counts
from training.invention import begun_turn
from training.prepare import PrepareOptions, prepare

QUIET = Console(quiet=True)


@pytest.fixture
def options(prompts: Path, tmp_path: Path) -> PrepareOptions:
    return PrepareOptions(
        prompts=[prompts],
        held_out=[],
        output=tmp_path / "data",
        count=12,
        temperatures=(0.0, 1.0),
        max_prompt_tokens=9,
        max_answer_tokens=7,
        sessions=5,
        layers=False,
        seed=3,
    )


@torch.inference_mode()
def states(target: Path, sample: Sample) -> tuple[torch.Tensor, ...]:
    """By transformers: the input of every layer, and the final feature, [length, hidden]."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    result = model(sample.tokens[None].long(), output_hidden_states=True)
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    layer = model.model.layers[-1]
    layer.register_forward_hook(lambda _, __, out: inputs.append(out[0] if out.ndim == 3 else out))
    model(sample.tokens[None].long())
    return (*inputs, result.hidden_states[-1][0])


def test_answers_and_features_are_the_targets_own(
    settings: Settings, target: Path, options: PrepareOptions
) -> None:
    dataset = prepare(settings, options, QUIET)
    samples = list(dataset.samples())
    assert len(samples) == 12
    assert {sample.temperature for sample in samples} == {0.0, 1.0}
    for sample in samples:
        *_, final = states(target, sample)
        expected = final[:-1].to(torch.bfloat16).float()
        torch.testing.assert_close(sample.features.float(), expected, atol=0.02, rtol=0.01)
        if sample.temperature == 0.0:
            embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
            best = (final @ embedding.T).argmax(-1)[sample.prompt_length - 1 : -1]
            assert sample.tokens[sample.prompt_length :].tolist() == best.tolist()


def test_layers_are_kept_in_order_and_end_with_the_last_output(
    settings: Settings, target: Path, options: PrepareOptions
) -> None:
    dataset = prepare(settings, replace(options, count=2, layers=True), QUIET)
    assert dataset.description.feature_layers == (2, LAYERS // 2, LAYERS - 3, LAYERS)
    for sample in dataset.samples():
        *inputs, _ = states(target, sample)
        wanted = torch.cat([inputs[layer] for layer in (2, 3, 3, 6)], -1)[:-1]
        torch.testing.assert_close(
            sample.features.float(), wanted.to(torch.bfloat16).float(), atol=0.05, rtol=0.02
        )


def test_what_is_missing_is_made_again_the_same(
    settings: Settings, options: PrepareOptions
) -> None:
    dataset = prepare(settings, options, QUIET)
    file = dataset.path / "shard-00000.safetensors"
    first = file.read_bytes()
    file.unlink()
    assert dataset.missing() == [0]
    prepare(settings, options, QUIET)
    assert file.read_bytes() == first


def test_another_dataset_is_not_mixed_in(settings: Settings, options: PrepareOptions) -> None:
    prepare(settings, options, QUIET)
    with pytest.raises(StartError, match="seed = 3, now it is 4"):
        prepare(settings, replace(options, seed=4), QUIET)


def test_prompts_that_are_held_out_or_too_long_are_left_out(
    settings: Settings, options: PrepareOptions
) -> None:
    held_out = options.output.parent / "held.txt"
    held_out.write_text("w7 w8 w11 w16 w23 w32 w43 w56\n")  # the second longest prompt, all of it
    short = replace(options, count=100, max_prompt_tokens=9, held_out=[held_out])
    every = replace(options, count=100, output=options.output.parent / "all")
    kept = list(prepare(settings, short, QUIET).samples())
    assert len(kept) <= len(list(prepare(settings, every, QUIET).samples()))
    assert max(sample.prompt_length for sample in kept) <= 9
    with pytest.raises(StartError, match="max-prompt-tokens"):
        prepare(settings, replace(options, max_prompt_tokens=2), QUIET)


def test_a_folder_without_a_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="coppice train prepare"):
        Dataset.open(tmp_path)


def test_the_draft_vocabulary_is_the_commonest_tokens_of_answers(
    settings: Settings, options: PrepareOptions
) -> None:
    dataset = prepare(settings, options, QUIET)
    answers = [t for s in dataset.samples() for t in s.tokens[s.prompt_length :].tolist()]
    counts = token_counts(dataset)
    assert int(counts.sum()) == len(answers)
    common = sorted(set(range(60)), key=lambda token: (-answers.count(token), token))[:5]
    assert frequent_tokens(counts, 5) == sorted(common)


def test_an_invented_turn_begins_where_the_user_speaks(target: Path) -> None:
    tokenizer = Tokenizer.load(target)
    assert begun_turn(tokenizer, "w3 w4") == tokenizer.encode("<s> w3 w4")
    assert tokenizer.encode_chat([ChatMessage("user", "w3 w4")]) == tokenizer.encode(
        "<s> w3 w4 <s>"
    )
