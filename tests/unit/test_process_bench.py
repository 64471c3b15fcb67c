import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.errors import ScoringError
from megatrl.meter.process_bench import ProcessRecord, load_process_bench, split_records, write_process_bench
from megatrl.meter.process_judgment import TIE_RULES, judgment_accuracy, process_signal, target_values

ROW: dict[str, Any] = {
    "total_index": 7,
    "query_index": 1,
    "sample_index": 2,
    "question": "where?",
    "data_source": "searchR1_hotpotqa",
    "ground_truth": {"target": ["Adelaide"]},
    "messages": [
        {"role": "system", "content": "be helpful"},
        {"role": "user", "content": "where?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"q": "a b"}'}}
            ],
        },
        {"role": "tool", "name": "search", "content": "nothing"},
        {"role": "assistant", "content": "it is Adelaide"},
    ],
    "tools": [{"type": "function", "function": {"name": "search"}}],
    "step_labels": {"2": 1, "4": -1},
    "final_label": -1,
}


def words(text: str) -> int:
    return len(text.split())


def record(labels: tuple[int, ...], *, dataset: str = "tau2", query: int = 0, sample: int = 0, success: bool = True):
    messages = [{"role": "user", "content": "task"}]
    for step in range(len(labels)):
        messages += [
            {"role": "assistant", "content": " ".join(["w"] * (step + 1))},
            {"role": "tool", "content": "observed"},
        ]
    return ProcessRecord(
        dataset=dataset,
        query_index=query,
        sample_index=sample,
        messages=tuple(messages),
        step_labels=labels,
        is_success=success,
    )


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_the_published_form_is_read_with_its_steps_and_prefixes(tmp_path: Path) -> None:
    (loaded,) = load_process_bench(write(tmp_path / "hotpotqa.jsonl", ROW))
    assert (loaded.name, loaded.step_labels, loaded.is_success) == ("hotpotqa/1/2", (1, -1), False)
    assert loaded.step_indices == (2, 4)
    assert [len(loaded.prefix(step)) for step in range(3)] == [2, 4, 5]


def test_a_directory_is_read_file_by_file_and_written_files_are_read_back_equal(tmp_path: Path) -> None:
    records = [record((1, 0, -1), sample=i, success=i % 2 == 0) for i in range(4)]
    write_process_bench(records, tmp_path / "tau2.jsonl")
    write(tmp_path / "hotpotqa.jsonl", ROW)
    loaded = load_process_bench(tmp_path)
    assert tuple(r for r in loaded if r.dataset == "tau2") == tuple(records)
    assert {r.dataset for r in loaded} == {"tau2", "hotpotqa"}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "hotpotqa.jsonl:1: not valid JSON"),
        ([1], "a record is a JSON object"),
        ({k: v for k, v in ROW.items() if k != "final_label"}, "lacks final_label"),
        (ROW | {"final_label": 0}, "final_label is 0"),
        (ROW | {"step_labels": {"2": 1}}, r"name the messages \['2'\], the assistant's are \['2', '4'\]"),
        (ROW | {"step_labels": {"2": 1, "3": 1}}, "the assistant's are"),
        (ROW | {"step_labels": {"2": 1, "4": 2}}, r"step labels \[2\]"),
        (ROW | {"messages": "text"}, "messages must be a list"),
    ],
)
def test_anything_else_is_refused_with_file_and_line(row: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=complaint):
        load_process_bench(write(tmp_path / "hotpotqa.jsonl", row))


def test_a_record_twice_and_an_empty_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match="hotpotqa/1/2 occurs twice"):
        load_process_bench(write(tmp_path / "hotpotqa.jsonl", ROW, ROW))
    with pytest.raises(ScoringError, match=r"neither a \.jsonl file nor a directory"):
        load_process_bench(tmp_path / "absent")


def test_the_split_is_stratified_by_dataset_and_outcome_and_loses_nothing() -> None:
    records = [
        record((1,), dataset=dataset, query=query, sample=sample, success=sample < 2)
        for dataset in ("bfcl", "tau2")
        for query in range(10)
        for sample in range(5)
    ]
    parts = split_records(records, seed=3)
    assert sorted(r.name for part in parts for r in part) == sorted(r.name for r in records)
    for part, share in zip(parts, (0.6, 0.2, 0.2), strict=True):
        counts = Counter((r.dataset, r.is_success) for r in part)
        assert counts == {(d, s): round(share * (20 if s else 30)) for d in ("bfcl", "tau2") for s in (True, False)}
    assert split_records(records, seed=3) == parts
    assert split_records(records, seed=4) != parts


def test_the_three_targets_of_a_success_and_of_a_failure() -> None:
    good, bad = record((1, 1, 1)), record((1, 1, 1), success=False)
    assert target_values(good, "steps_to_go", words) == (3.0, 2.0, 1.0, 0.0)
    assert target_values(good, "tokens_to_go", words) == (6.0, 5.0, 3.0, 0.0)
    assert target_values(good, "future_score", words) == (1.0,) * 4
    assert target_values(bad, "tokens_to_go", words) == (None,) * 4
    assert target_values(bad, "future_score", words) == (0.0,) * 4


def test_tokens_of_tool_calls_count_like_those_of_the_text(tmp_path: Path) -> None:
    (loaded,) = load_process_bench(write(tmp_path / "hotpotqa.jsonl", ROW | {"final_label": 1}))
    assert target_values(loaded, "tokens_to_go", words) == (4.0 + 3.0, 3.0, 0.0)


def test_the_signal_is_the_increase_of_a_score_and_the_decrease_of_a_clamped_cost() -> None:
    assert process_signal((0.2, 0.5, 0.4), "future_score").tolist() == pytest.approx([0.3, -0.1])
    signal = process_signal((900.0, 700.0, None, 5000.0, 300.0), "tokens_to_go", failure_cost=2000.0)
    assert signal.tolist() == [200.0, -1300.0, 0.0, 1700.0]
    with pytest.raises(ScoringError, match="needs its own C"):
        process_signal((1.0, 0.0), "steps_to_go")


def test_accuracy_by_hand_with_every_tie_rule_and_without_neutral_steps() -> None:
    records = [record((1, -1, 0, 1)), record((-1, 1), dataset="bfcl")]
    signals = [np.array([2.0, 1.0, -5.0, 0.0]), np.array([0.0, 3.0])]
    overall, by_dataset = judgment_accuracy(records, signals)
    # hits: +1 right, -1 judged +1 wrong, neutral out, tie on +1 | tie on -1, +1 right
    assert (overall.num_steps, overall.num_ties) == (5, 2)
    assert overall.by_tie_rule == pytest.approx({"negative": 3 / 5, "positive": 3 / 5, "half": 3 / 5, "wrong": 2 / 5})
    assert by_dataset["tau2"].by_tie_rule == pytest.approx(
        {"negative": 1 / 3, "positive": 2 / 3, "half": 0.5, "wrong": 1 / 3}
    )
    assert by_dataset["bfcl"].by_tie_rule["negative"] == 1.0


def test_a_wrong_number_of_signals_and_nothing_to_judge_are_refused() -> None:
    with pytest.raises(ScoringError, match="has 2 steps but 1 signals"):
        judgment_accuracy([record((1, -1))], [np.zeros(1)])
    with pytest.raises(ScoringError, match="nothing to judge"):
        judgment_accuracy([record((0, 0))], [np.zeros(2)])


@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1]), st.integers(-2, 2)), min_size=1, max_size=30))
def test_the_rules_bracket_each_other_and_flipping_all_signals_mirrors_the_accuracy(
    steps: list[tuple[int, int]],
) -> None:
    if all(label == 0 for label, _ in steps):
        return
    labels = tuple(label for label, _ in steps)
    signal = np.array([value for _, value in steps], dtype=np.float64)
    overall, _ = judgment_accuracy([record(labels)], [signal])
    rules = overall.by_tie_rule
    assert set(rules) == set(TIE_RULES)
    assert rules["wrong"] <= min(rules["negative"], rules["positive"], rules["half"])
    assert rules["negative"] + rules["positive"] == pytest.approx(2 * rules["half"])
    flipped, _ = judgment_accuracy([record(labels)], [-signal])
    assert rules["half"] + flipped.by_tie_rule["half"] == pytest.approx(1.0)
