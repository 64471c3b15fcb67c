"""Megatron in every layout against plain transformers + AdamW: logprobs, loss, gradients, weights.

fp32, 1e-5 relative. Adam's eps is large on purpose: near zero, Adam turns rounding noise into sign flips.
The rows are in layout_rows.py, which also prints them as a table.
"""

from pathlib import Path
from typing import Any

import pytest
from layout_rows import COMPARED, ROWS, Row, measure, table, write_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
Measured = dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_cases(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def measured(cases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Measured]:
    """World size -> its results; filled as tests ask, so that a world that fails does not fail the others."""
    return {}


@pytest.fixture
def results(request: pytest.FixtureRequest, measured: dict[int, Measured], cases: dict[str, str]) -> Any:
    """A function from a row to what each rank found."""

    def of(row: Row) -> list[dict[str, float]]:
        if row.world not in measured:
            measured[row.world] = {}
            out: Path = request.getfixturevalue("tmp_path")
            measured[row.world] = measure(row.world, cases, out, timeout_s=500.0)
            print(table(measured[row.world]))
        assert row.name in measured[row.world], "the world of this row failed, see its first row"
        return measured[row.world][row.name]

    return of


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_layout_equals_the_oracle(row: Row, results: Any) -> None:
    for rank, result in enumerate(results(row)):
        wrong = {name: result[name] for name in COMPARED if not result[name] <= TOLERANCE}
        assert not wrong, f"rank {rank} of {row.layout}"
        assert result["names_equal"] == 1.0
        assert result["replicas_equal"] == 1.0, "a replicated parameter differs between ranks"


@pytest.mark.parametrize("row", [row for row in ROWS if row.world > 1], ids=lambda row: row.name)
def test_a_loss_over_whole_sequences_equals_that_of_one_process(row: Row, results: Any) -> None:
    alone = next(other for other in ROWS if other.world == 1 and other.model == row.model and not other.options)
    if row.options.get("reorder"):
        alone = next(other for other in ROWS if other.world == 1 and other.options == {"reorder": True})
    (expected,) = results(alone)
    for result in results(row):
        for name in ("sequence_loss", "sequence_grad_norm"):
            assert result[name] == pytest.approx(expected[name], rel=TOLERANCE), row.layout


def test_the_packings_compared_are_different_ones(results: Any) -> None:
    by_tokens = {
        row.options.get("microbatch_tokens", 40): results(row)[0]["microbatches"]
        for row in ROWS
        if (row.label, row.model) == ("one process", "moe")
    }
    assert by_tokens[100_000] == 2 < by_tokens[40] < by_tokens[1]
    alone = next(row for row in ROWS if (row.label, row.model) == ("DP2", "moe one sample"))
    assert sorted(result["num_logprobs"] for result in results(alone)) == [0, 1]
    assert results(alone)[0]["fillers"] == 1, "one data rank was meant to have nothing but a filler"
    interleaved = next(row for row in ROWS if (row.label, row.model) == ("PP2 x VPP2", "moe one sample"))
    assert results(interleaved)[0]["schedule_fillers"] == 1, "its schedule takes even numbers of microbatches only"
