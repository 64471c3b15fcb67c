from dataclasses import replace

import pytest

from megatrl.config.engines import LayoutConfig, TinyModel
from megatrl.config.model_shape import tiny_model_shape
from megatrl.config.plan import check_layout, expert_tensor_degree

MIXTURE = replace(
    tiny_model_shape(TinyModel(), vocab_size=100), num_heads=8, num_kv_heads=4, num_layers=6, num_experts=12
)
DENSE = replace(tiny_model_shape(TinyModel(family="qwen3"), vocab_size=100), num_heads=8, num_kv_heads=4, num_layers=6)


def layout(**degrees: int | bool) -> LayoutConfig:
    return LayoutConfig.model_validate(degrees)


@pytest.mark.parametrize(
    "fitting",
    [
        {"world_size": 1},
        {"world_size": 7},
        {"world_size": 8, "tensor": 4, "pipeline": 2, "sequence_parallel": True},
        {"world_size": 8, "tensor": 2, "expert": 4, "sequence_parallel": True},
        {"world_size": 12, "pipeline": 3, "expert": 4},
    ],
)
def test_a_fitting_layout_has_no_violations(fitting: dict[str, int | bool]) -> None:
    assert check_layout(layout(**fitting), MIXTURE) == []


@pytest.mark.parametrize(
    ("impossible", "complaint"),
    [
        ({"world_size": 7, "tensor": 2, "sequence_parallel": True}, "nearest world_size: 6 or 8"),
        ({"world_size": 1, "pipeline": 2}, "nearest world_size: 2"),
        ({"world_size": 8, "tensor": 8, "sequence_parallel": True}, "num_kv_heads=4; nearest tensor: 4"),
        ({"world_size": 4, "pipeline": 4}, "num_layers=6; nearest pipeline: 3 or 6"),
        ({"world_size": 8, "expert": 8}, "num_experts=12; nearest expert: 6 or 12"),
        ({"world_size": 4, "expert": 3}, "4 / 1 = 4; nearest expert: 2 or 4"),
        ({"world_size": 2, "tensor": 2}, "needs layout.sequence_parallel: true"),
        ({"world_size": 1, "sequence_parallel": True}, "needs layout.tensor > 1"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_nearest_choices(
    impossible: dict[str, int | bool], complaint: str
) -> None:
    violations = check_layout(layout(**impossible), MIXTURE)
    assert len(violations) == 1
    assert complaint in violations[0]


def test_every_violation_is_reported_at_once() -> None:
    violations = check_layout(layout(world_size=10, tensor=3, pipeline=4, expert=5), MIXTURE)
    causes = ("world_size=10", "num_heads=8", "num_kv_heads=4", "num_layers=6", "num_experts=12", "sequence_parallel")
    assert len(violations) == len(causes)
    assert all(cause in violation for cause, violation in zip(causes, violations, strict=True))


def test_experts_of_a_dense_model_are_refused() -> None:
    (violation,) = check_layout(layout(world_size=2, expert=2), DENSE)
    assert "has no experts" in violation


def test_dense_models_need_no_sequence_parallelism_with_tensor_parallelism() -> None:
    assert check_layout(layout(world_size=2, tensor=2), DENSE) == []


def test_experts_are_cut_over_tensor_ranks_only_without_expert_parallelism() -> None:
    odd_experts = replace(MIXTURE, expert_ffn_size=33)
    cut = layout(world_size=4, tensor=4, sequence_parallel=True)
    whole = layout(world_size=4, tensor=4, expert=4, sequence_parallel=True)
    assert (expert_tensor_degree(cut), expert_tensor_degree(whole)) == (4, 1)
    assert "expert_ffn_size=33; nearest tensor: 3 or 11" in check_layout(cut, odd_experts)[0]
    assert check_layout(whole, odd_experts) == []
