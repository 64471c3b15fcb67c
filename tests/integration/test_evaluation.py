"""`megatrl eval` and `megatrl meter judge` on real parts: SGLang serves the policy, Megatron ranks hold the meter."""

import json
from pathlib import Path

import pytest

from megatrl.checkpoint.tiny_model import make_tiny
from megatrl.config.recipe import Recipe
from megatrl.errors import ConfigError
from megatrl.meter.frozen import freeze_meter
from megatrl.meter.process_bench import ProcessRecord, write_process_bench
from megatrl.meter.prompt import COMPACT, build_meter_prompt
from megatrl.observability.trajectories import read_records
from megatrl.orchestration.eval_journal import EPISODES, TRAJECTORIES, read_episodes
from megatrl.orchestration.eval_judge import judge
from megatrl.orchestration.eval_run import EvaluationPlan, evaluate
from megatrl.rendering.renderer import load_renderer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RECIPE = Recipe.model_validate(
    {
        "name": "evaluated",
        "seed": 3,
        "model": {"kind": "tiny", "family": "qwen3", "hidden_size": 64, "ffn_size": 128},
        "env": {"kind": "evidence_hunt", "num_questions": 3, "num_documents": 6, "num_hops": 2, "max_turns": 3},
        "actor": {"device": "cpu", "precision": "fp32", "timeout_s": 200},
        "rollout": {
            "tool_format": "react",
            "max_turns": 3,
            "max_action_tokens": 6,
            "context_tokens": 256,
            "max_observation_tokens": 32,
            "servers": {"device": "cpu", "precision": "fp32", "max_total_tokens": 16384, "start_timeout_s": 400},
        },
    }
)
TASKS, REPEATS = 5, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "policy"
    make_tiny(RECIPE.model, RECIPE.env, path)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def meter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained: it prefers something, and nobody knows what."""
    renderer = load_renderer(str(model), "chatml", "react")
    path = tmp_path_factory.mktemp("meters") / "meter"
    freeze_meter(
        model,
        path,
        prompt=build_meter_prompt(renderer, (1, 2, 3, 5, 8), COMPACT),
        failure_cost=10.0,
        failure_costs={"evidence_hunt": 10.0},
        training_hash="none",
        tool_format="react",
    )
    return path


def test_ways_to_act_are_compared_on_the_same_tasks_and_an_interrupted_evaluation_goes_on(
    model: Path, meter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    recipe = RECIPE.model_copy(update={"observe": RECIPE.observe.model_copy(update={"runs_dir": str(tmp_path)})})

    def plan(*selections, **changes) -> EvaluationPlan:
        common = {"episodes": TASKS, "repeats": REPEATS, "meter": meter, "candidates": 3, "out": out}
        return EvaluationPlan(policy=model, recipe=recipe, selections=selections, **{**common, **changes})

    report = evaluate(plan("natural", "meter"))
    natural, guided = report.arms["natural"], report.arms["meter"]
    wanted = [(position, repeat) for position in range(TASKS) for repeat in range(REPEATS)]
    for rows in (natural, guided):
        assert [(row.position, row.repeat) for row in rows] == wanted
        assert all(row.success is not None and row.termination != "server_error" for row in rows)
    assert all(row.sampled_tokens == row.action_tokens > 0 and row.changed_turns == 0 for row in natural)
    assert all(row.sampled_tokens > row.action_tokens for row in guided)
    assert any(row.changed_turns for row in guided)  # three actions of a random model differ
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "| meter |" in (out / "table.md").read_text()
    assert json.loads((out / "summary.json").read_text())["selections"]["natural"]["num_episodes"] == TASKS * REPEATS

    log = out / "logs" / "server-0.log"
    log.unlink()
    assert evaluate(plan("natural", "meter")).arms == report.arms
    assert not log.exists()  # everything was played: no server was started
    with pytest.raises(ConfigError, match="repeats was 2, is 3"):
        evaluate(plan("natural", repeats=3))
    with pytest.raises(ConfigError, match="candidates was 3, is 4"):
        evaluate(plan("meter", candidates=4))

    lines = (out / "natural" / EPISODES).read_text().splitlines(keepends=True)
    (out / "natural" / EPISODES).write_text("".join(lines[:5]) + lines[5][:30])  # killed while it wrote a line
    kept = [row for task in read_episodes(out / "natural", repeats=REPEATS) for row in task]
    assert len(kept) == 4
    resumed = evaluate(plan("natural")).arms["natural"]
    assert [(row.position, row.repeat) for row in resumed] == wanted
    assert [row for row in resumed if row in kept] == kept
    records, _ = read_records(out / "natural" / TRAJECTORIES)
    assert len(records) == TASKS + TASKS - 2  # only what was missing was played again


def test_a_meter_judges_a_published_file_with_words_it_does_not_know(meter: Path, tmp_path: Path) -> None:
    records = [
        ProcessRecord(
            dataset="tau2",
            query_index=query,
            sample_index=0,
            messages=(
                {"role": "user", "content": f"question q{query} please"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "open", "arguments": "{}"}}]},
                {"role": "tool", "content": "nothing of the kind was found"},
                {"role": "assistant", "content": "<answer> v0 v1 </answer>"},
            ),
            step_labels=(1, -1),
            is_success=False,
        )
        for query in range(3)
    ]
    write_process_bench(records, tmp_path / "tau2.jsonl")
    judgment = judge(
        meter,
        tmp_path / "tau2.jsonl",
        engines=RECIPE,
        target="future_score",
        readout="candidates",
        out=tmp_path / "judged",
    )
    assert judgment.overall.num_steps == 6
    assert judgment.by_dataset.keys() == {"tau2"}
    assert 0.2 < judgment.unknown_words < 0.9
    rows = [json.loads(line) for line in (tmp_path / "judged" / "signals.jsonl").read_text().splitlines()]
    assert [len(row["values"]) for row in rows] == [3, 3, 3]
    for row in rows:
        assert row["signal"] == pytest.approx([b - a for a, b in zip(row["values"], row["values"][1:], strict=False)])
    assert len({value for row in rows for value in row["values"]}) > 3
