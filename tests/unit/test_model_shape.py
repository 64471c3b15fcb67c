import json
from pathlib import Path
from typing import Any

import pytest

from megatrl.config.engines import Family, TinyModel
from megatrl.config.model_shape import Llama3RopeScaling, hf_config, model_shape_of, read_model_shape, tiny_model_shape
from megatrl.errors import ModelError

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
}
LLAMA_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def shape_of(config: dict[str, Any]) -> Any:
    return model_shape_of(config, source="config.json")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_the_published_mixture_config_is_read() -> None:
    shape = shape_of(QWEN3_MOE)
    assert (shape.family, shape.num_experts, shape.num_experts_per_token, shape.expert_ffn_size) == (
        "qwen3_moe", 128, 8, 768,
    )  # fmt: skip
    assert shape.head_dim == 128, "head_dim is read: hidden_size / heads would be 64"
    assert shape.rope_theta == 1e6
    assert shape.has_qk_norm


def test_both_spellings_of_rope_and_of_experts_give_the_same_shape() -> None:
    old = QWEN3_MOE | {"model_type": "qwen3_moe"}
    parameters = {"rope_type": "default", "rope_theta": 1000000.0}
    new = without(old, "rope_theta", "rope_scaling", "num_experts")
    new |= {"rope_parameters": parameters, "num_local_experts": 128}
    assert shape_of(new) == shape_of(old)


def test_llama_scaling_is_read_in_both_spellings() -> None:
    dense = without(QWEN3_MOE, "num_experts", "moe_intermediate_size", "norm_topk_prob", "rope_theta", "rope_scaling")
    old = dense | {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA_SCALING}
    new = dense | {"model_type": "llama", "rope_parameters": LLAMA_SCALING | {"rope_theta": 500000.0}}
    expected = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert shape_of(old).rope_scaling == shape_of(new).rope_scaling == expected
    assert shape_of(old) == shape_of(new)
    assert not shape_of(old).has_qk_norm


def test_a_missing_theta_is_an_error() -> None:
    with pytest.raises(ModelError, match="neither rope_theta nor rope_parameters"):
        shape_of(without(QWEN3_MOE, "rope_theta"))


def test_a_missing_number_of_experts_is_an_error() -> None:
    with pytest.raises(ModelError, match="does not give num_local_experts"):
        shape_of(without(QWEN3_MOE, "num_experts"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are qwen3, qwen3_moe, llama"),
        ({"model_type": None}, "model_type is 'None'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    ],
)
def test_what_the_actor_cannot_run_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as error:
        shape_of(QWEN3_MOE | change)
    assert complaint in error.value.message


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama3"])
def test_a_tiny_shape_survives_its_config_json(family: Family, tmp_path: Path) -> None:
    shape = tiny_model_shape(TinyModel(family=family, tie_word_embeddings=True), vocab_size=77)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
    assert read_model_shape(tmp_path) == shape
    assert shape.vocab_size == 77


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    "field, message",
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported is 'softmax'"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5; supported is 1"),
        ({"n_group": 8, "topk_group": 4}, "n_group is 8; supported is 1"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512; supported is 0"),
        ({"router_temperature": 0.5}, "router_temperature = 0.5 is no routing field that megatrl knows"),
        ({"use_routed_dropout": True}, "use_routed_dropout = True is no routing field that megatrl knows"),
    ],
)
def test_routing_fields_that_change_the_model_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config.json: {message}"):
        shape_of(QWEN3_MOE | field)


def test_routing_fields_are_mapped_or_leave_the_model_as_it_is() -> None:
    neutral = {"router_aux_loss_coef": 0.001, "output_router_logits": False, "n_group": 1, "scoring_func": "softmax"}
    assert shape_of(QWEN3_MOE | neutral) == shape_of(QWEN3_MOE)
    assert shape_of(QWEN3_MOE | {"norm_topk_prob": False}).norm_topk_prob is False
    assert shape_of(without(QWEN3_MOE, "norm_topk_prob")).norm_topk_prob is False  # the default of transformers
