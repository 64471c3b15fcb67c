"""The scoring benchmark at toy size: what it prints is there and belongs together; times are not looked at."""

import json

import pytest

from benchmarks import scoring

pytestmark = pytest.mark.slow


def test_it_reports_every_length_with_ideal_token_counts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt", "6", "--turn-tokens", "5", "--branch", "4", "--hidden", "64", "--layers", "1", "--vocab", "64"]
    scoring.main(["--turns", "1", "3", *sizes, "--repeats", "1", "--json"])
    points = json.loads(capsys.readouterr().out)["points"]
    assert [p["turns"] for p in points] == [1, 3]
    for p in points:
        assert p["trunk_tokens"] == 6 + 5 * p["turns"]
        assert p["tree_tokens"] == p["ideal_tokens"] == p["trunk_tokens"] + 4 * (p["turns"] + 1)
        assert p["independent_tokens"] == sum(6 + 5 * k + 4 for k in range(p["turns"] + 1))
        assert p["speedup"] == p["independent_s"] / p["tree_s"]
