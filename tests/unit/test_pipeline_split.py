"""Every layer exactly once and in order, or a refusal with the numbers."""

from itertools import product

import pytest

from megatrl.config.pipeline import pipeline_chunks
from megatrl.errors import LayoutError


def test_every_layer_is_held_exactly_once_and_in_order_or_the_split_is_refused() -> None:
    num_split = num_refused = 0
    sizes = (None, 1, 2, 3, 4)
    for layers, pipeline, virtual, first, last in product(range(1, 13), range(1, 6), range(1, 4), sizes, sizes):
        try:
            chunks = pipeline_chunks(layers, pipeline=pipeline, virtual=virtual, first=first, last=last)
        except LayoutError:
            num_refused += 1
            continue
        num_split += 1
        passed = [layer for chunk in range(virtual) for stage in chunks for layer in stage[chunk]]
        assert passed == list(range(layers)), (layers, pipeline, virtual, first, last)
        assert [len(stage) for stage in chunks] == [virtual] * pipeline
        held = [sum(len(chunk) for chunk in stage) for stage in chunks]
        assert min(held) > 0
        assert first is None or held[0] == first
        assert last is None or held[-1] == last
        own = (first is not None, last is not None)
        assert len(set(held[own[0] : pipeline - own[1]])) <= 1, "the other stages share evenly"
    assert num_split > 200
    assert num_refused > 200


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ({"num_layers": 30, "pipeline": 4}, "30 layers do not divide evenly over 4 stages"),
        ({"num_layers": 20, "pipeline": 1, "last": 1}, "one stage holds all layers"),
        ({"num_layers": 4, "pipeline": 2, "first": 1, "last": 2}, "1 + 2 = 3 layers, the model has 4"),
        ({"num_layers": 8, "pipeline": 2, "virtual": 2, "last": 3}, "a stage of 5 layers does not divide into 2"),
        ({"num_layers": 3, "pipeline": 3, "first": 3}, "3 of 3 layers leave 0 for the 2 other stages, each needs one"),
        ({"num_layers": 2, "pipeline": 2, "first": 9}, "9 of 2 layers leave 0 for the 1 other stages"),
        ({"num_layers": 6, "pipeline": 3, "first": 1}, "5 layers do not divide evenly over 2 other stages"),
    ],
)
def test_a_refused_split_gives_the_numbers(split: dict[str, int], numbers: str) -> None:
    with pytest.raises(LayoutError, match=numbers.replace("+", r"\+")):
        pipeline_chunks(**split)


def test_interleaved_stages_take_turns() -> None:
    assert pipeline_chunks(8, pipeline=2, virtual=2) == ((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert pipeline_chunks(6, pipeline=2, virtual=2, first=4) == (
        (range(0, 2), range(3, 5)),
        (range(2, 3), range(5, 6)),
    )
