"""Runs read back: the table, and the plot of success over steps."""

import json
import struct
from pathlib import Path

import pytest
from rich.console import Console

from megatrl.errors import MegatrlError
from megatrl.observability.plots import across, plot_success, smoothed
from megatrl.observability.run_summary import RunMetrics, Series, load_run, markdown_table, rich_table, summarize


def _make_run(run_dir: Path, label: str | None = None, *, shift: float = 0.0) -> RunMetrics:
    run_dir.mkdir()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(21):
            row: dict[str, float] = {"step": step, "wall_time_s": 1.0}
            if step % 10 == 0:
                row["eval/success"] = 0.3 + 0.02 * step - (0.3 if step == 20 else 0.0) + shift
            if step:
                row |= {"rollout/success": step / 20 + shift, "rollout/reward": step / 10, "seconds/step": 2.0}
                row["rollout/num_action_tokens"] = 100.0
            file.write(json.dumps(row) + "\n")
        file.write('{"step": 21, "rollout/su')
    return load_run(run_dir, label)


def test_a_run_is_summed_up_from_its_metrics_file(tmp_path: Path) -> None:
    row = summarize(_make_run(tmp_path / "grpo-1"))
    assert (row.label, row.num_steps, row.num_action_tokens, row.step_s) == ("grpo-1", 20, 2000.0, 2.0)
    assert row.eval_success == pytest.approx(0.4)
    assert row.best_eval_success == pytest.approx(0.5)
    assert row.train_success == pytest.approx(sum(range(11, 21)) / 200)
    assert row.reward == pytest.approx(sum(range(11, 21)) / 100)


def test_tables_for_terminal_and_markdown_hold_the_same_cells(tmp_path: Path) -> None:
    rows = [summarize(_make_run(tmp_path / "a", "gr|po")), summarize(load_run(_evaluation_only(tmp_path / "b")))]
    lines = markdown_table(rows).splitlines()
    assert lines[2] == "| gr/po | 20 | 0.400 | 0.500 | 0.775 | 1.550 | 2,000 | 2.00 |"
    assert lines[3] == "| b | 0 | 0.250 | 0.250 | - | - | - | - |"
    assert {line.count("|") for line in lines} == {9}
    console = Console(width=140, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(rich_table(rows))
    assert "gr|po" in console.export_text()


def _evaluation_only(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "wall_time_s": 1.0, "eval/success": 0.25}\n')
    return run_dir


def test_a_run_without_lines_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegatrlError, match=r"metrics.jsonl does not exist"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MegatrlError, match="has no line yet"):
        load_run(tmp_path)


def test_smoothing_is_a_mean_over_the_values_so_far() -> None:
    assert smoothed(Series((1, 2, 3, 4), (1.0, 3.0, 5.0, 7.0)), 2).values == (1.0, 2.0, 4.0, 6.0)


def test_repeats_are_compared_only_at_steps_they_share() -> None:
    steps, means, lowest, highest = across([Series((0, 10, 20), (0.0, 0.2, 0.9)), Series((0, 10), (0.2, 0.6))])
    assert steps == [0, 10]
    assert means == pytest.approx([0.1, 0.4])
    assert (lowest, highest) == ([0.0, 0.2], [0.2, 0.6])


def test_the_plot_is_a_png_with_a_line_for_each_method(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        _make_run(tmp_path / "a", "grpo"),
        _make_run(tmp_path / "b", "trace"),
        _make_run(tmp_path / "c", "trace", shift=-0.1),
        load_run(_evaluation_only(tmp_path / "d"), "start"),
    ]
    path = plot_success(runs, tmp_path / "plots" / "success.png", title="demo")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 400
    single = plot_success(runs[:1], tmp_path / "plots" / "one.png", title="demo").read_bytes()
    assert single != content
