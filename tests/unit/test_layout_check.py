"""Which layouts are possible: by name, and against a brute force that knows none of the rules' code."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatrl.config.engines import LayoutConfig, TinyModel
from megatrl.config.model_shape import ModelShape, tiny_model_shape
from megatrl.config.plan import check_layout, expert_tensor_degree, length_multiple, sequence_multiple

MIXTURE = replace(
    tiny_model_shape(TinyModel(), vocab_size=100), num_heads=8, num_kv_heads=4, num_layers=6, num_experts=12
)
DENSE = replace(tiny_model_shape(TinyModel(family="qwen3"), vocab_size=100), num_heads=8, num_kv_heads=4, num_layers=6)


def layout(**degrees: int | bool | None) -> LayoutConfig:
    return LayoutConfig.model_validate(degrees)


@pytest.mark.parametrize(
    "fitting",
    [
        {"world_size": 1},
        {"world_size": 7},
        {"world_size": 8, "tensor": 4, "pipeline": 2, "sequence_parallel": True},
        {"world_size": 8, "tensor": 8, "sequence_parallel": True},  # each KV head on two ranks
        {"world_size": 8, "tensor": 2, "expert": 4, "sequence_parallel": True},
        {"world_size": 12, "pipeline": 3, "expert": 4},
        {"world_size": 8, "context": 2, "expert": 4, "expert_tensor": 2},
        {"world_size": 4, "pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1},
        {"world_size": 3, "pipeline": 3, "virtual_pipeline": 2},
        {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 2},
    ],
)
def test_a_fitting_layout_has_no_violations(fitting: dict[str, int | bool]) -> None:
    assert check_layout(layout(**fitting), MIXTURE) == []


@pytest.mark.parametrize(
    ("impossible", "complaint"),
    [
        ({"world_size": 7, "tensor": 2, "sequence_parallel": True, "expert_tensor": 1}, "nearest world_size: 6 or 8"),
        ({"world_size": 2, "tensor": 1, "context": 4}, "context=4 (set) = 4; nearest world_size: 4, or context: 2"),
        ({"world_size": 4, "pipeline": 4}, "over 4 stages; nearest pipeline: 3 or 6"),
        ({"world_size": 8, "expert": 8}, "num_experts=12; nearest expert: 6 or 12"),
        ({"world_size": 4, "expert": 3}, "(default) = 3; nearest world_size: 3 or 6, or expert: 2 or 4"),
        ({"world_size": 4, "expert_tensor": 3}, "expert_tensor=3 (set) does not divide"),
        ({"world_size": 2, "tensor": 2}, "needs layout.sequence_parallel: true"),
        ({"world_size": 1, "sequence_parallel": True}, "needs layout.tensor > 1"),
        ({"world_size": 1, "virtual_pipeline": 2}, "2 chunks for each stage need more than one stage"),
        ({"world_size": 1, "last_stage_layers": 1}, "one stage holds all layers"),
        ({"world_size": 2, "pipeline": 2, "virtual_pipeline": 2}, "a stage of 3 layers does not divide into 2 chunks"),
    ],
)  # fmt: skip
def test_an_impossible_layout_is_refused_with_the_nearest_choices(
    impossible: dict[str, int | bool], complaint: str
) -> None:
    assert any(complaint in violation for violation in check_layout(layout(**impossible), MIXTURE))


def test_a_product_that_does_not_fit_names_every_factor_and_whether_it_was_set() -> None:
    (set_by_user,) = check_layout(layout(world_size=8, pipeline=2, expert=8), replace(MIXTURE, num_experts=16))
    assert set_by_user == (
        "layout.world_size=8 (set) is not a multiple of layout.expert_tensor=1 (default: 1, as expert is above 1) x "
        "layout.expert=8 (set) x layout.pipeline=2 (set) = 16; nearest world_size: 16, or expert: 4, or pipeline: 1"
    )
    four = layout(world_size=4, tensor=4, expert=4, expert_tensor=4, sequence_parallel=True)
    (product_of_16,) = check_layout(four, MIXTURE)
    assert "layout.expert_tensor=4 (set) x layout.expert=4 (set) x layout.pipeline=1 (default) = 16" in product_of_16


def test_every_violation_is_reported_at_once() -> None:
    violations = check_layout(layout(world_size=10, tensor=3, pipeline=4, expert=5), MIXTURE)
    causes = ("layout.tensor=3", "layout.expert=5", "num_heads=8", "num_kv_heads=4", "num_layers=6", "num_experts=12",
              "sequence_parallel")  # fmt: skip
    assert len(violations) == len(causes)
    assert all(cause in violation for cause, violation in zip(causes, violations, strict=True))


def test_kv_heads_that_neither_divide_the_tensor_ranks_nor_are_divided_are_refused_with_all_numbers() -> None:
    shape = replace(DENSE, num_heads=12, num_kv_heads=4, ffn_size=36)
    (violation,) = check_layout(layout(world_size=6, tensor=6), shape)
    assert all(text in violation for text in ("tensor=6", "num_kv_heads=4", "num_heads=12", "head_dim=16"))
    assert violation.endswith("nearest tensor: 4")


def test_expert_degrees_of_a_dense_model_are_refused() -> None:
    assert ["no experts" in text for text in check_layout(layout(world_size=2, expert=2), DENSE)] == [True]
    assert ["no experts" in text for text in check_layout(layout(world_size=2, expert_tensor=2), DENSE)] == [True]


def test_dense_models_need_no_sequence_parallelism_with_tensor_parallelism() -> None:
    assert check_layout(layout(world_size=2, tensor=2), DENSE) == []


def test_experts_are_cut_over_tensor_ranks_without_expert_parallelism_unless_it_is_set() -> None:
    odd_experts = replace(MIXTURE, expert_ffn_size=33)
    cut = layout(world_size=4, tensor=4, sequence_parallel=True)
    whole = layout(world_size=4, tensor=4, expert=4, sequence_parallel=True)
    whole_too = layout(world_size=4, tensor=4, expert_tensor=1, sequence_parallel=True)
    assert [expert_tensor_degree(each) for each in (cut, whole, whole_too)] == [4, 1, 1]
    assert "expert_ffn_size=33; nearest expert_tensor: 3 or 11" in check_layout(cut, odd_experts)[0]
    assert check_layout(whole, odd_experts) == check_layout(whole_too, odd_experts) == []


GRID: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 3, 4, 6, 8),
    "tensor": (1, 2, 3, 4),
    "pipeline": (1, 2, 3),
    "virtual_pipeline": (1, 2),
    "first_stage_layers": (None, 2),
    "last_stage_layers": (None, 1, 2),
    "context": (1, 2),
    "expert": (1, 2, 4),
    "expert_tensor": (None, 1, 2),
    "sequence_parallel": (False, True),
}
SHAPES = (
    replace(MIXTURE, num_heads=12, num_kv_heads=2, num_experts=4, expert_ffn_size=30),
    replace(DENSE, num_heads=4, num_kv_heads=4, num_layers=5, ffn_size=36),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.family)
def test_the_rules_agree_with_a_brute_force_over_many_layouts(shape: ModelShape) -> None:
    counts = {True: 0, False: 0}
    for values in list(product(*GRID.values()))[::5]:  # a fifth of them, in every corner
        degrees = dict(zip(GRID, values, strict=True))
        is_possible = can_be_built(shape=shape, **degrees)
        assert (check_layout(layout(**degrees), shape) == []) == is_possible, degrees
        counts[is_possible] += 1
    assert min(counts.values()) > 25, counts


def can_be_built(shape: ModelShape, **d: Any) -> bool:
    """Hands out every part of the model to ranks, and says whether it comes out even."""
    world, tensor, pipeline = d["world_size"], d["tensor"], d["pipeline"]
    experts = 1 if d["expert_tensor"] is None and d["expert"] > 1 else d["expert_tensor"] or tensor
    upto = range(1, 100)
    grids = [any(tensor * pipeline * d["context"] * data == world for data in upto)]
    if shape.is_mixture:
        grids.append(any(experts * d["expert"] * pipeline * data == world for data in upto))
        grids.append(d["expert"] in [n for n in upto if shape.num_experts % n == 0])
        grids.append(experts in [n for n in upto if shape.expert_ffn_size % n == 0])
        grids.append(tensor == 1 or d["sequence_parallel"])
    else:
        grids.append(d["expert"] == 1)
        grids.append(d["expert_tensor"] in (None, 1))
        grids.append(len(range(shape.ffn_size)[::tensor]) * tensor == shape.ffn_size)
    heads = [head // (shape.num_heads // shape.num_kv_heads) for head in range(shape.num_heads)]  # its KV head
    shares = [heads[len(heads) * r // tensor : len(heads) * (r + 1) // tensor] for r in range(tensor)]
    grids.append(len({len(share) for share in shares}) == 1)
    kv = [set(share) for share in shares]  # whole KV heads for each rank, or one KV head for several ranks
    owners = [sum(head in share for share in kv) for head in range(shape.num_kv_heads)]
    grids.append(all(len(share) == 1 for share in kv) or set(owners) == {1})
    grids.append(len(set(owners)) == 1 and len({len(share) for share in kv}) == 1)
    grids.append((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim % tensor == 0)
    grids.append(not d["sequence_parallel"] or tensor > 1)
    return all(grids) and layers_can_be_split(shape.num_layers, d)


def layers_can_be_split(num_layers: int, d: dict[str, Any]) -> bool:
    pipeline, first, last = d["pipeline"], d["first_stage_layers"], d["last_stage_layers"]
    if pipeline == 1:
        return d["virtual_pipeline"] == 1 and first is None and last is None
    for share in range(1, num_layers + 1):
        sizes = [share] * pipeline
        sizes[0] = first or share
        sizes[-1] = last or share
        if sum(sizes) == num_layers and all(size % d["virtual_pipeline"] == 0 for size in sizes):
            return True
    return False


def test_every_value_that_a_refusal_offers_removes_its_reason() -> None:
    offered = 0
    shape = SHAPES[0]
    for values in list(product(*GRID.values()))[::101]:
        degrees = dict(zip(GRID, values, strict=True))
        for violation in check_layout(layout(**degrees), shape):
            for name, choices in re.findall(r"(?:nearest|, or) (\w+): ([\d or]+)", violation.partition("; ")[2]):
                for choice in re.findall(r"\d+", choices):
                    offered += 1
                    after = check_layout(layout(**{**degrees, name: int(choice)}), shape)
                    assert not any(reason(text) == reason(violation) for text in after), (violation, name, choice)
    assert offered > 500


def reason(violation: str) -> str:
    """What of the model or the processes a sentence is about."""
    for mark in ("num_layers", "num_kv_heads", "num_heads", "num_experts", "expert_ffn_size"):
        if f"{mark}=" in violation:
            return mark
    return "experts' ranks" if "x layout.expert=" in violation else violation.partition("=")[0]


def test_padding_makes_room_for_two_chunks_on_each_context_rank_and_for_sequence_parallelism() -> None:
    for context, tensor, parallel in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 6), (False, True)):
        whole = length_multiple(tensor=tensor, context=context, sequence_parallel=parallel)
        share = whole // context
        assert whole % context == 0
        assert share % (tensor if parallel else 1) == 0, "tensor ranks have equal parts of a context rank's rows"
        assert whole % sequence_multiple(context) == 0, "the tail of a pack can be a sequence of its own"
        assert whole <= context * 2 * tensor
    assert length_multiple(tensor=3, context=3, sequence_parallel=True) == 18
    assert length_multiple(tensor=4, context=2, sequence_parallel=True) == 8
    assert length_multiple(tensor=4, context=1, sequence_parallel=False) == 1
    assert [sequence_multiple(context) for context in (1, 2, 4)] == [1, 4, 8]
