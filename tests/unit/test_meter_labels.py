from collections import Counter
from functools import partial

import pytest

from megatrl.data.meter_labels import MeterLabel
from megatrl.data.trajectories import Termination
from megatrl.errors import ScoringError
from megatrl.meter.labels import (
    LabelRule,
    collect_labels,
    failure_cost,
    failure_costs,
    lengths_without_reasoning,
    log_spaced_grid,
    split_by_task,
    trajectory_labels,
)
from tests.fakes.frozen_models import WordCodec, make_trajectory


def episode(lengths=(2, 3, 1), **options):
    return make_trajectory([((7, 7), (5,) * n) for n in lengths], **options)


def labels(trajectory, **options):
    return [(e.label.completion, e.label.tokens_to_go) for e in trajectory_labels(trajectory, LabelRule(**options))]


def test_a_success_counts_the_action_tokens_still_to_come_and_no_observation():
    assert labels(episode()) == [(True, 6), (True, 4), (True, 1)]


def test_a_failure_carries_no_number():
    assert labels(episode(reward=0.0)) == [(False, None)] * 3
    with pytest.raises(ScoringError):
        MeterLabel(completion=False, tokens_to_go=0)


@pytest.mark.parametrize(
    "termination", [Termination.MAX_TURNS, Termination.CONTEXT_OVERFLOW, Termination.ACTION_LENGTH]
)
def test_a_truncated_episode_failed_or_is_dropped(termination):
    trajectory = episode(reward=1.0, termination=termination)
    assert labels(trajectory) == [(False, None)] * 3
    assert labels(trajectory, truncated="drop") == []


@pytest.mark.parametrize("termination", [Termination.TIMEOUT, Termination.ENV_ERROR, Termination.SERVER_ERROR])
def test_an_infrastructure_failure_says_nothing(termination):
    assert labels(episode(reward=None, termination=termination)) == []


def test_the_end_of_the_transcript_is_labelled_only_when_asked_for():
    trajectory = episode(trailing=(9,))
    assert [e.state.length for e in trajectory_labels(trajectory)] == [2, 6, 11]
    terminal = trajectory_labels(trajectory, LabelRule(with_terminal=True))[-1]
    assert (terminal.label, terminal.state.length) == (MeterLabel(completion=True, tokens_to_go=0), 13)


def test_no_task_is_on_both_sides_of_the_split():
    trajectories = [episode(prompt_id=f"p{n % 10}", index=n) for n in range(40)]
    training, validation = split_by_task(trajectories, validation_fraction=0.2, seed=1)
    assert len(training) + len(validation) == 40
    sides = [{t.id.prompt_id for t in side} for side in (training, validation)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 2
    assert split_by_task(reversed(trajectories), validation_fraction=0.2, seed=1)[1] == validation[::-1]
    other = {t.id.prompt_id for t in split_by_task(trajectories, validation_fraction=0.2, seed=2)[1]}
    assert len(other) == 2


def test_a_small_split_still_holds_something_on_both_sides():
    trajectories = [episode(prompt_id=f"p{n}") for n in range(3)]
    training, validation = split_by_task(trajectories, validation_fraction=0.01, seed=0)
    assert (len(training), len(validation)) == (2, 1)


def test_prefixes_are_capped_for_each_trajectory_and_classes_are_equalised():
    long_failures = [episode((1,) * 30, reward=0.0, index=n) for n in range(4)]
    short_successes = [episode((4, 4), index=10 + n) for n in range(4)]
    chosen = collect_labels([*long_failures, *short_successes], LabelRule(max_prefixes_per_trajectory=5), seed=3)
    counts = Counter(e.label.completion for e in chosen.examples)
    assert counts == {True: 8, False: 8}
    assert chosen.left_out == {"over_cap": 100, "balance": 12}
    per_trajectory = Counter(e.trajectory.id for e in chosen.examples)
    assert max(per_trajectory.values()) <= 5
    turns = [e.state.turn_index for e in chosen.examples if not e.label.completion]
    assert max(turns) > 10  # drawn over the whole length, not the first ones


def test_the_same_seed_gives_the_same_examples_and_hash():
    trajectories = [episode((1,) * 9, reward=float(n % 2), index=n) for n in range(6)]
    first = collect_labels(trajectories, LabelRule(max_prefixes_per_trajectory=4), seed=3)
    again = collect_labels(trajectories, LabelRule(max_prefixes_per_trajectory=4), seed=3)
    other = collect_labels(trajectories, LabelRule(max_prefixes_per_trajectory=4), seed=4)
    assert first.content_hash == again.content_hash != other.content_hash


def test_one_class_alone_is_kept_whole_and_nothing_at_all_is_an_error():
    only = collect_labels([episode()], LabelRule(max_prefixes_per_trajectory=16), seed=0)
    assert len(only.examples) == 3
    with pytest.raises(ScoringError, match="no trajectory gave the meter a label"):
        collect_labels([episode(reward=None)], LabelRule(max_prefixes_per_trajectory=16), seed=0)


def test_the_failure_cost_is_five_quarters_of_the_99th_percentile():
    examples = trajectory_labels(episode((1,) * 100))  # tokens to go 100..1
    assert failure_cost(examples) == pytest.approx(1.25 * 99.01)
    with pytest.raises(ScoringError):
        failure_cost(trajectory_labels(episode(reward=0.0)))


def test_the_grid_is_even_in_the_logarithm_and_spans_the_labels():
    examples = trajectory_labels(episode((1,) * 64))
    assert log_spaced_grid(examples, size=7) == (1, 2, 4, 8, 16, 32, 64)
    assert log_spaced_grid(examples, size=7, is_spellable={0, 1, 3, 5, 50, 100}.__contains__) == (1, 3, 5, 50)
    with pytest.raises(ScoringError, match="can spell no number"):
        log_spaced_grid(examples, size=7, is_spellable=lambda value: False)
    assert log_spaced_grid(trajectory_labels(episode(), LabelRule(with_terminal=True)), size=3)[0] == 0


def test_a_cut_after_the_action_ends_with_it_and_has_only_the_later_ones_to_go():
    trajectory = episode(trailing=(9,))  # observations of 2 tokens, actions of 2, 3 and 1
    after = trajectory_labels(trajectory, LabelRule(cut="after_action"))
    assert [(e.cut, e.state.turn_index, e.state.length) for e in after] == [
        ("after_action", 1, 4), ("after_action", 2, 9)
    ]  # fmt: skip
    assert [e.label.tokens_to_go for e in after] == [4, 1]
    both = trajectory_labels(trajectory, LabelRule(cut="both"))
    assert [e.state.length for e in both] == [2, 4, 6, 9, 11]
    assert [e.label.tokens_to_go for e in both] == [6, 4, 4, 1, 1]


def test_the_end_is_labelled_before_and_after_what_followed_the_last_action():
    rule = LabelRule(cut="both", with_terminal=True)
    ends = [(e.cut, e.state.length) for e in trajectory_labels(episode(trailing=(9,)), rule)][-2:]
    assert ends == [("after_action", 12), ("before_action", 13)]
    only = [(e.cut, e.state.length) for e in trajectory_labels(episode(), rule)][-2:]
    assert only == [("before_action", 11), ("before_action", 12)]  # nothing followed: the two ends are one


def test_a_score_is_a_success_from_the_threshold_on():
    partial = episode(reward=0.7, success=False)
    assert labels(partial)[0] == (False, None)
    assert labels(partial, success_threshold=0.7)[0] == (True, 6)
    assert labels(partial, success_threshold=0.8)[0] == (False, None)


def test_thoughts_can_be_left_out_of_the_tokens_to_go():
    codec = WordCodec(["<think>", "hm", "</think>", "open", "doc"])
    texts = ("<think> hm hm </think> open doc", "open doc", "<think> hm hm hm")
    thoughtful = make_trajectory([((1,), codec.encode(text)) for text in texts])
    assert lengths_without_reasoning(thoughtful, codec) == [2, 2, 0]
    counted = collect_labels(
        [thoughtful], LabelRule(), seed=0, action_lengths=partial(lengths_without_reasoning, codec=codec)
    )
    assert sorted(e.label.tokens_to_go or 0 for e in counted.examples) == [0, 2, 4]


def test_every_domain_has_a_cost_of_its_own():
    short = trajectory_labels(episode((1,) * 10), domain="hunt")
    long = trajectory_labels(episode((10,) * 10), domain="maze")
    lost = trajectory_labels(episode(reward=0.0), domain="papers")
    costs = failure_costs([*short, *long, *lost])
    assert costs == pytest.approx({"hunt": 1.25 * 9.91, "maze": 1.25 * 99.1})


def test_tasks_are_split_by_what_they_are_and_not_by_their_name():
    trajectories = [episode(prompt_id=f"p{n}") for n in range(10)]
    sides = split_by_task(
        trajectories, validation_fraction=0.5, seed=1, task_of=lambda t: str(int(t.id.prompt_id[1:]) // 2)
    )
    for side in sides:
        numbers = {int(t.id.prompt_id[1:]) for t in side}
        assert {n ^ 1 for n in numbers} == numbers
        assert side
