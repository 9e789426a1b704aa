"""What a config.json means, and what is refused by name."""

from typing import Any

import pytest

from coppice.errors import StartError
from coppice.models.config import DecoderConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def test_what_is_absent_takes_the_published_default() -> None:
    config = DecoderConfig.from_hf(LLAMA)
    assert (config.head_dim, config.kv_heads, config.rms_norm_eps) == (16, 4, 1e-6)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert not (config.attention_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    assert (config.eos_token_ids, config.bos_token_id, config.max_context) == ((), None, 4096)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_both_spellings_of_rope_mean_the_same(spelling: dict[str, Any]) -> None:
    rope = DecoderConfig.from_hf({**LLAMA, **spelling}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_end_tokens_are_one_several_or_none(eos: Any, ids: tuple[int, ...]) -> None:
    assert DecoderConfig.from_hf({**LLAMA, "eos_token_id": eos}).eos_token_ids == ids


def test_qwen2_has_biases_at_its_inputs_alone() -> None:
    config = DecoderConfig.from_hf({**LLAMA, "model_type": "qwen2"})
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (True, False, False)


def test_qwen3_without_head_dim_has_128() -> None:
    config = DecoderConfig.from_hf({**LLAMA, "model_type": "qwen3"})
    assert (config.head_dim, config.qk_norm) == (128, True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2'.*llama, mistral, qwen2, qwen3"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*quantized"),
        ({"model_type": "mistral", "sliding_window": 1024}, "sliding_window = 1024.*4096"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024},
            "sliding_window = 1024",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'.*yarn"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu.*silu"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "4 query heads.*3"),
        ({"head_dim": 15}, "head_dim = 15.*even"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(StartError, match=named) as refusal:
        DecoderConfig.from_hf({**LLAMA, **change})
    assert "\n" not in str(refusal.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(StartError, match="num_hidden_layers is absent"):
        DecoderConfig.from_hf({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


def test_a_window_that_covers_the_context_is_no_window() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 1024}
    assert DecoderConfig.from_hf(mistral, max_context=1024).max_context == 1024


def test_an_unused_window_of_qwen2_is_ignored() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}
    assert DecoderConfig.from_hf(qwen).max_context == 4096


def test_only_a_stretching_rope_bears_more_than_the_published_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    stretched = DecoderConfig.from_hf({**LLAMA, "rope_scaling": yarn}, max_context=16384)
    assert stretched.max_context == 16384
    with pytest.raises(StartError, match=r"maximum context = 16384.*4096"):
        DecoderConfig.from_hf(LLAMA, max_context=16384)
