from dataclasses import replace

import pytest
import torch

from megatrl.config.engines import Family, TinyModel
from megatrl.config.model_shape import ModelShape, tiny_model_shape
from megatrl.mcore.weight_map import cut, fuse, global_name, hf_tensor_shape, join, unfuse, weight_rules

VOCAB_SIZE = 19


def shape_of(family: Family) -> ModelShape:
    shape = tiny_model_shape(TinyModel(family=family, hidden_size=16, num_experts=4), vocab_size=VOCAB_SIZE)
    return replace(shape, num_heads=8, num_kv_heads=4, head_dim=2)


def hf_weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [name for rule in weight_rules(shape) for name in rule.hf_names]
    return {name: torch.randn(hf_tensor_shape(shape, name), generator=generator) for name in names}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama3"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])  # fewer than ranks, too
def test_fuse_cut_join_unfuse_is_the_identity(family: Family, num_ranks: int, num_kv_heads: int) -> None:
    shape = replace(shape_of(family), num_kv_heads=num_kv_heads)
    weights = hf_weights(shape)
    padded = -(-VOCAB_SIZE // num_ranks) * num_ranks
    for rule in weight_rules(shape):
        full = fuse(rule, [weights[name] for name in rule.hf_names], shape, padded_vocab=padded)
        parts = [cut(rule, full, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]
        assert all(part.shape == parts[0].shape for part in parts)
        restored = unfuse(rule, join(rule, parts), shape)
        for name, tensor in zip(rule.hf_names, restored, strict=True):
            assert torch.equal(tensor, weights[name]), name


def test_qkv_rows_of_a_tensor_rank_are_its_groups_queries_key_and_value() -> None:
    shape = shape_of("qwen3")  # 8 heads, 4 groups, head_dim 2
    rule = next(r for r in weight_rules(shape) if r.fusion == "qkv")
    marked = [
        torch.arange(rows).float()[:, None].expand(rows, 16) + start
        for rows, start in ((16, 0), (8, 100), (8, 200))  # q, k, v rows numbered
    ]
    full = fuse(rule, marked, shape, padded_vocab=VOCAB_SIZE)
    second_of_two = cut(rule, full, num_ranks=2, rank=1)[:, 0].tolist()
    assert second_of_two == [8, 9, 10, 11, 104, 105, 204, 205, 12, 13, 14, 15, 106, 107, 206, 207]


def test_tensor_ranks_that_share_a_kv_head_have_consecutive_rows_of_its_queries_key_and_value() -> None:
    shape = replace(shape_of("qwen3"), num_kv_heads=2)  # 8 heads, 2 groups, head_dim 2: 12 rows for each group
    rule = next(r for r in weight_rules(shape) if r.fusion == "qkv")
    marked = [
        torch.arange(rows).float()[:, None].expand(rows, 16) + start
        for rows, start in ((16, 0), (4, 100), (4, 200))  # q, k, v rows numbered
    ]
    full = fuse(rule, marked, shape, padded_vocab=VOCAB_SIZE)
    parts = [cut(rule, full, num_ranks=4, rank=rank)[:, 0].tolist() for rank in range(4)]
    assert parts == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 100, 101, 200, 201],
        [8, 9, 10, 11, 12, 13],
        [14, 15, 102, 103, 202, 203],
    ]


def test_gate_and_up_are_each_cut() -> None:
    shape = shape_of("qwen3")
    rule = next(r for r in weight_rules(shape) if r.fusion == "gate_up")
    rows = shape.ffn_size
    gate, up = (torch.arange(rows).float()[:, None].expand(rows, 16) + start for start in (0, 1000))
    part = cut(rule, fuse(rule, [gate, up], shape, padded_vocab=VOCAB_SIZE), num_ranks=2, rank=1)
    assert part[:, 0].tolist() == [*range(rows // 2, rows), *range(1000 + rows // 2, 1000 + rows)]


def test_names_count_over_the_whole_model_in_either_spelling() -> None:
    place = {"first_layer": 10, "first_expert": 4}
    for local, transformer_engine in [
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"),
        (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.linear_fc1.weight3",
        ),
        ("decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ]:
        assert global_name(local, **place) == global_name(transformer_engine, **place)
    assert global_name("decoder.layers.1.mlp.experts.linear_fc2.weight3", **place) == (
        "decoder.layers.11.mlp.experts.local_experts.7.linear_fc2.weight"
    )


def test_a_tied_model_exports_no_output_layer() -> None:
    names = [n for rule in weight_rules(replace(shape_of("qwen3"), tie_word_embeddings=True)) for n in rule.hf_names]
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


def test_the_rules_of_a_shape_are_made_once():
    assert weight_rules(shape_of("qwen3_moe")) is weight_rules(shape_of("qwen3_moe"))
