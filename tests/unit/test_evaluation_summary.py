"""Numbers of an evaluation by hand."""

import math
from pathlib import Path

import pytest

from megatrl.observability.evaluation_plots import Bar, plot_evaluation
from megatrl.orchestration.eval_journal import EpisodeRow
from megatrl.orchestration.eval_summary import (
    HEADER,
    comparison_rows,
    markdown,
    paired_difference,
    summarize_episodes,
    wilson_interval,
)


def row(position: int, repeat: int, success: bool | None, **values: int) -> EpisodeRow:
    return EpisodeRow(
        prompt_id=f"t{position}",
        position=position,
        repeat=repeat,
        success=success,
        reward=None if success is None else float(success),
        turns=values.get("turns", 2),
        action_tokens=values.get("action_tokens", 10),
        sampled_tokens=values.get("sampled_tokens", 40),
        changed_turns=values.get("changed_turns", 0),
        termination="server_error" if success is None else "completed",
        attempts=1,
    )


def test_the_mean_is_over_repeats_and_its_deviation_is_the_population_s() -> None:
    # Means of 70.0, 72.86 and 75.1 % have the published deviation of 2.087188 points.
    shares = (700, 728.6, 751)
    rows = [row(p, r, p < round(share * 10)) for r, share in enumerate(shares) for p in range(10_000)]
    s = summarize_episodes(rows)
    assert s.success == pytest.approx(0.726533333, abs=1e-9)
    assert s.success_std == pytest.approx(0.02087188, abs=1e-8)


def test_unknown_outcomes_are_counted_and_enter_nothing_else() -> None:
    rows = [row(0, 0, True, turns=4), row(0, 1, None, turns=50), row(1, 0, False, turns=2), row(1, 1, True, turns=3)]
    s = summarize_episodes(rows)
    assert (s.num_episodes, s.num_unknown, s.num_tasks) == (3, 1, 2)
    assert s.success == pytest.approx((0.5 + 1.0) / 2)
    assert s.turns == 3.0
    assert s.success_interval == pytest.approx(wilson_interval(0.75, 2))
    assert s.terminations == {"completed": 3, "server_error": 1}
    nothing = summarize_episodes([row(0, 0, None)])
    assert (nothing.success, nothing.success_interval, nothing.changed_turns) == (None, None, None)


def test_wilson_s_interval_by_hand_and_at_the_ends() -> None:
    assert wilson_interval(0.5, 100) == pytest.approx((0.403832, 0.596168), abs=1e-6)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson_interval(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_the_difference_is_paired_by_task() -> None:
    ours = [row(p, 0, p % 2 == 0) for p in range(100)]
    assert paired_difference(ours, ours) == (0.0, (0.0, 0.0))
    theirs = [row(p, 0, p % 4 == 0) for p in range(100)]
    found = paired_difference(ours, theirs)
    assert found is not None
    assert found[0] == 0.25
    half = 1.96 * math.sqrt(0.25 * 0.75 / 100)
    assert found[1] == pytest.approx((0.25 - half, 0.25 + half), abs=0.02)
    assert paired_difference(ours, [row(500, 0, True)]) is None


def test_the_table_compares_with_the_first_and_counts_all_sampled_tokens(tmp_path: Path) -> None:
    natural = [row(p, 0, p < 5, sampled_tokens=10) for p in range(10)]
    guided = [row(p, 0, p < 8, changed_turns=1) for p in range(10)]
    table = comparison_rows({"natural": natural, "meter": guided})
    cells = [dict(zip(HEADER, line, strict=True)) for line in table]
    assert [c["success"] for c in cells] == ["0.500", "0.800"]
    assert cells[0]["difference to the first"] == "-"
    assert cells[1]["difference to the first"].startswith("+0.300 [")
    assert [c["sampled tokens"] for c in cells] == ["10.0", "40.0"]
    assert cells[1]["turns changed"] == "0.500"
    assert "Wilson" in markdown(table)
    bar = Bar(name="meter", success=0.8, interval=(0.5, 0.9), action_tokens=10, sampled_tokens=40)
    assert plot_evaluation([bar], tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
