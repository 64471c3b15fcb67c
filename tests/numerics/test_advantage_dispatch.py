"""From trajectories and scores to per-turn advantages, for every credit rule."""

from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from megatrl.algorithms.advantages import estimate_advantages, groups_needing_meter
from megatrl.algorithms.rewards import combine_rewards, task_reward
from megatrl.config.credit import (
    DeltaTTGCredit,
    GiGPOCredit,
    GroupStatisticsConfig,
    HGPOCredit,
    NoCredit,
    OverlongConfig,
    RewardConfig,
    TraceCredit,
)
from megatrl.config.section import Section
from megatrl.data.scores import AnswerScore, Forecast, MeterScore, Scores
from megatrl.data.trajectories import (
    Prompt,
    PromptGroup,
    Segment,
    Termination,
    Trajectory,
    TrajectoryId,
    Turn,
)
from megatrl.errors import ConfigError, ScoringError

POPULATION = GroupStatisticsConfig(std="population", eps=0)
EXPANDED = GroupStatisticsConfig(step_expanded=True)


def trajectory(index, reward, lengths, *, keys=None, penalties=None, termination=None, segments=1, last_is_answer=True):
    turns = tuple(
        Turn(
            observation_tokens=(1,),
            action_tokens=(2,) * length,
            behavior_logprobs=(-0.5,) * length,
            policy_version=0,
            is_tool_call=not (last_is_answer and k == len(lengths) - 1),
            observation_key=keys[k] if keys else "",
            penalty=penalties[k] if penalties else 0.0,
        )
        for k, length in enumerate(lengths)
    )
    cuts = [len(turns) * s // segments for s in range(segments + 1)]
    lost = Termination.ENV_ERROR if reward is None else Termination.COMPLETED
    return Trajectory(
        id=TrajectoryId(prompt_id="p", group_id="g", index=index),
        segments=tuple(Segment(turns=turns[a:b]) for a, b in pairwise(cuts)),
        reward=reward,
        success=None if reward is None else reward >= 1,
        termination=termination or lost,
    )


def group(*members):
    return PromptGroup(prompt=Prompt(prompt_id="p", task={}, seed=0), group_id="g", trajectories=members)


def forecasts(*tokens_to_go):
    """None is an unparseable answer."""
    return MeterScore(
        forecasts=tuple(
            Forecast(is_valid=t is not None, completion=t is not None, tokens_to_go=t or 0.0) for t in tokens_to_go
        )
    )


def estimate(
    groups, credit, *, meter=None, answers=None, statistics=None, reward=None, failure_cost: float | None = 2000.0
):
    scores = Scores(meter=meter or {}, answers=answers or {}, failure_cost=failure_cost)
    return estimate_advantages(
        groups,
        scores,
        credit=credit,
        group_statistics=statistics or GroupStatisticsConfig(),
        reward=reward or RewardConfig(),
    )


def by_turn(result, member):
    """The value of each turn; every token of a turn must hold it."""
    for values, turn in zip(result.per_turn[member.id], member.turns, strict=True):
        assert values.shape == (len(turn.action_tokens),)
        assert len(set(values)) <= 1
    return [float(values[0]) if len(values) else 0.0 for values in result.per_turn[member.id]]


def test_without_credit_every_token_gets_the_group_relative_advantage():
    won, lost, broken = trajectory(0, 1.0, [2, 3]), trajectory(1, 0.0, [4]), trajectory(2, None, [1, 1])
    result = estimate([group(won, lost, broken)], NoCredit())
    assert by_turn(result, won) == pytest.approx([np.sqrt(0.5)] * 2, abs=1e-5)
    assert by_turn(result, lost) == pytest.approx([-np.sqrt(0.5)], abs=1e-5)
    assert by_turn(result, broken) == [0, 0]
    assert result.metrics["credit/unscorable_fraction"] == pytest.approx(1 / 3)
    assert result.metrics["credit/zero_signal_groups"] == 0


def test_ragged_groups_never_mix():
    first = group(*(trajectory(i, float(i % 2), [1]) for i in range(4)))
    second = group(trajectory(10, 1.0, [1]), trajectory(11, 1.0, [1]), trajectory(12, 0.0, [1]))
    third = group(trajectory(20, 1.0, [1]))
    together = estimate([first, second, third], NoCredit())
    for alone in (first, second, third):
        result = estimate([alone], NoCredit())
        for member in alone.trajectories:
            assert by_turn(together, member) == by_turn(result, member)
    assert by_turn(together, third.trajectories[0]) == [0]
    assert together.metrics["credit/zero_signal_groups"] == pytest.approx(1 / 3)


def test_a_trajectory_split_into_segments_gets_the_same_advantages():
    meter = None
    for credit in (NoCredit(), DeltaTTGCredit(), GiGPOCredit(), HGPOCredit()):
        results = []
        for segments in (1, 2, 4):
            members = [
                trajectory(i, 1.0 - i, [1, 2, 3, 4], keys=["a", "b", "a", f"c{i}"], segments=segments) for i in range(2)
            ]
            meter = {m.id: forecasts(900, 700, 760, 300) for m in members}
            results.append(by_turn(estimate([group(*members)], credit, meter=meter, statistics=EXPANDED), members[0]))
        assert results[0] == results[1] == results[2]


def test_deltattg_spreads_the_advantage_and_keeps_its_token_average():
    won, lost = trajectory(0, 1.0, [10, 5, 20, 5]), trajectory(1, 0.0, [7, 9])
    meter = {won.id: forecasts(900, 700, 760, 300), lost.id: forecasts(500, 700)}
    result = estimate([group(won, lost)], DeltaTTGCredit(), meter=meter)
    advantage = np.sqrt(0.5)
    np.testing.assert_allclose(
        by_turn(result, won), advantage * np.array([0.688742, 0.158940, 1.377483, 0.953642]), atol=2e-6
    )
    for member, sign in ((won, 1), (lost, -1)):
        tokens = np.concatenate(result.per_turn[member.id])
        assert tokens.mean() == pytest.approx(sign * advantage, abs=1e-5)
        assert (np.sign(tokens) == sign).all()
    assert result.details[won.id]["signal"] == (200, -60, 460, 300)
    assert result.metrics["credit/parse_failure_rate"] == 0
    assert -1 <= result.metrics["credit/signal_length_correlation"] <= 1
    assert result.metrics["credit/capped_token_fraction"] == 0
    # Weight of the last action: 0.953642 x 5 / 40 where it won; where it lost, shares 0.2067 and 0.7933 of 7 and 9.
    lost_share = 0.2 / 2 + 0.8 * 1300 / 1500
    expected = (0.953642 * 5 / 40 + 9 * lost_share / (7 * (1 - lost_share) + 9 * lost_share)) / 2
    assert result.metrics["credit/last_action_weight"] == pytest.approx(expected, abs=1e-6)
    assert result.metrics["credit/last_action_token_share"] == pytest.approx((5 + 9) / (40 + 16))
    assert result.metrics["credit/failure_cost_rate"] == 0


def test_meter_scores_are_needed_only_where_advantages_are_not_zero():
    open_group = group(trajectory(0, 1.0, [1, 1]), trajectory(1, 0.0, [1]))
    decided = group(trajectory(2, 1.0, [1]), trajectory(3, 1.0, [1, 2]))
    alone = group(trajectory(4, 1.0, [1]), trajectory(5, None, [1]))
    groups = [open_group, decided, alone]
    need = {"group_statistics": EXPANDED}
    assert groups_needing_meter(groups, credit=DeltaTTGCredit(), **need) == (open_group,)
    for idle in (NoCredit(), TraceCredit(), DeltaTTGCredit(rho=1.0), DeltaTTGCredit(max_multiplier=1.0)):
        assert groups_needing_meter(groups, credit=idle, **need) == ()
    meter = {t.id: forecasts(*[5] * t.num_turns) for t in open_group.trajectories}
    result = estimate(groups, DeltaTTGCredit(), meter=meter, statistics=EXPANDED)
    assert by_turn(result, decided.trajectories[1]) == [0, 0]
    with pytest.raises(ScoringError, match=r"p/g/0\.0 has a non-zero advantage but no meter score"):
        estimate(groups, DeltaTTGCredit(), statistics=EXPANDED)


@pytest.mark.parametrize(
    "credit", [DeltaTTGCredit(rho=1.0), DeltaTTGCredit(max_multiplier=1.0), TraceCredit(alpha_turn=0)]
)
def test_limits_of_the_credit_rules_are_grpo(credit):
    members = [trajectory(i, float(i == 0), [3, 1, 4]) for i in range(3)]
    answers = {m.id: AnswerScore(logprobs=(-3, -2, -1)) for m in members}
    plain = estimate([group(*members)], NoCredit())
    result = estimate([group(*members)], credit, answers=answers)
    for member in members:
        assert by_turn(result, member) == by_turn(plain, member)


def test_a_skipped_meter_score_is_grpo_for_that_trajectory_and_counted():
    won, lost = trajectory(0, 1.0, [1, 9]), trajectory(1, 0.0, [2, 2])
    meter = {won.id: MeterScore(forecasts=(), skipped="overlong"), lost.id: forecasts(10, 20)}
    result = estimate([group(won, lost)], DeltaTTGCredit(), meter=meter)
    assert len(set(by_turn(result, won))) == 1
    assert result.metrics["credit/meter_skipped"] == 1


def test_too_many_unparseable_answers_stop_the_run():
    won, lost = trajectory(0, 1.0, [1] * 10), trajectory(1, 0.0, [1] * 10)
    meter = {won.id: forecasts(*[50] * 9, None), lost.id: forecasts(*[50] * 10)}
    credit = DeltaTTGCredit(max_parse_failure_rate=0.05)
    metrics = estimate([group(won, lost)], credit, meter=meter).metrics
    assert metrics["credit/parse_failure_rate"] == metrics["credit/failure_cost_rate"] == 0.05
    with pytest.raises(ScoringError, match="1 of 20 meter answers are unparseable"):
        estimate([group(won, lost)], DeltaTTGCredit(max_parse_failure_rate=0.04), meter=meter)


def test_scorer_errors_name_the_trajectory():
    won, lost = trajectory(0, 1.0, [1, 1]), trajectory(1, 0.0, [1])
    with pytest.raises(ScoringError, match=r"trajectory p/g/0\.0: the meter gave 1 forecasts for 2 turns"):
        estimate([group(won, lost)], DeltaTTGCredit(), meter={won.id: forecasts(5), lost.id: forecasts(5)})
    answers = {lost.id: AnswerScore(logprobs=(-1,))}
    wrong = trajectory(0, 1.0, [1, 1, 1])
    short = {wrong.id: AnswerScore(logprobs=(-1, -1))}
    with pytest.raises(ScoringError, match="3 turns; expected one"):
        estimate([group(wrong)], TraceCredit(), answers=short)
    answers[won.id] = AnswerScore(logprobs=(-1, -1, float("nan")))
    stopped = trajectory(0, 1.0, [1, 1], last_is_answer=False)
    with pytest.raises(ScoringError, match=r"trajectory p/g/0\.0: answer logprobs"):
        estimate([group(stopped, lost)], TraceCredit(), answers=answers)
    with pytest.raises(ScoringError, match="no answer score"):
        estimate([group(won, lost)], TraceCredit())


def test_the_automatic_failure_cost_comes_from_the_meter_and_scales():
    won, lost = trajectory(0, 1.0, [1, 1]), trajectory(1, 0.0, [1, 1])
    meter = {won.id: forecasts(900, 100), lost.id: forecasts(900, 100)}
    result = estimate([group(won, lost)], DeltaTTGCredit(failure_cost_scale=0.25), meter=meter)
    assert result.details[won.id]["cost"] == (500, 100)
    fixed = estimate([group(won, lost)], DeltaTTGCredit(failure_cost=300.0), meter=meter, failure_cost=None)
    assert fixed.details[won.id]["cost"] == (300, 100)
    with pytest.raises(ConfigError, match="failure_cost=auto needs"):
        estimate([group(won, lost)], DeltaTTGCredit(), meter=meter, failure_cost=None)
    estimate([group(won, lost)], DeltaTTGCredit(target="binary"), meter=meter, failure_cost=None)


def test_net_of_spent_needs_a_signal_in_tokens():
    for switches in ({"target": "binary"}, {"cost_transform": "log1p"}):
        with pytest.raises(ValidationError, match="net_of_spent subtracts tokens"):
            DeltaTTGCredit.model_validate({"net_of_spent": True, **switches})


def test_penalties_are_separate_row_terms_beside_the_redistributed_part():
    won, lost = trajectory(0, 10.0, [1, 1], penalties=[0, 0.1]), trajectory(1, 0.0, [1, 1])
    meter = {won.id: forecasts(900, 300), lost.id: forecasts(500, 500)}
    with_penalty = estimate([group(won, lost)], DeltaTTGCredit(), meter=meter, statistics=EXPANDED)
    rows = np.array([10, 9.9, 0, 0])
    plain = estimate([group(won, lost)], NoCredit(), statistics=EXPANDED)
    expected = (rows - rows.mean()) / (rows.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(by_turn(plain, won) + by_turn(plain, lost), expected)
    multipliers = np.array(with_penalty.details[won.id]["multiplier"])
    part = (10 - 5) / (rows.std(ddof=1) + 1e-6)
    penalty = (0.025 - np.array([0, 0.1])) / (rows.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(by_turn(with_penalty, won), part * multipliers + penalty)


def test_trace_credits_tool_turns_and_leaves_the_final_answer_to_the_outcome():
    members = [trajectory(i, float(i < 3), [2, 3, 1, 2, 4]) for i in range(4)]
    answers = {m.id: AnswerScore(logprobs=(-4.5, -3.2, -1.8, -0.9, -0.2)) for m in members}
    result = estimate([group(*members)], TraceCredit(), answers=answers, statistics=POPULATION)
    won = [0.674447, 0.846091, 0.903489, 1.002897, 0.577350]
    lost = [-1.634954, -1.936275, -1.997119, -2.045513, -1.732051]
    np.testing.assert_allclose(by_turn(result, members[0]), won, atol=1.01e-6)
    np.testing.assert_allclose(by_turn(result, members[3]), lost, atol=1.01e-6)


def test_a_turn_limit_makes_the_last_turn_a_transition_and_a_verdict_after_the_answer_does_not():
    logprobs = (-4.0, -3.0, -2.0)
    stopped = trajectory(0, 0.0, [1, 1], termination=Termination.MAX_TURNS, last_is_answer=False)
    answered = trajectory(1, 0.0, [1, 1])
    answers = {stopped.id: AnswerScore(logprobs=logprobs), answered.id: AnswerScore(logprobs=logprobs)}
    result = estimate([group(stopped, answered)], TraceCredit(), answers=answers, statistics=POPULATION)
    assert all(value > 0 for value in by_turn(result, stopped))
    assert by_turn(result, answered)[1] == 0
    assert by_turn(result, answered)[0] == pytest.approx(0.2 * np.log(4.1 / 3.1))


@pytest.mark.parametrize("reason", ["missing_gold", "empty_gold", "overlong"])
def test_a_trajectory_that_could_not_be_scored_keeps_its_outcome_advantage(reason):
    won, lost = trajectory(0, 1.0, [1, 2]), trajectory(1, 0.0, [1, 2])
    answers = {won.id: AnswerScore(logprobs=(), skipped=reason), lost.id: AnswerScore(logprobs=(-2, -1))}
    result = estimate([group(won, lost)], TraceCredit(), answers=answers, statistics=POPULATION)
    assert by_turn(result, won) == [1, 1]
    assert result.metrics["credit/answers_skipped"] == 1


def test_an_equal_reward_group_trains_on_local_credit_and_an_unknown_outcome_does_not():
    member, broken = trajectory(0, 0.0, [1, 1]), trajectory(1, None, [1, 1])
    answers = {member.id: AnswerScore(logprobs=(-4, -2))}
    result = estimate([group(member, broken)], TraceCredit(), answers=answers, statistics=POPULATION)
    np.testing.assert_allclose(by_turn(result, member), [0.133810, 0], atol=1.01e-6)
    assert by_turn(result, broken) == [0, 0]


def test_credit_of_one_trajectory_depends_on_the_others_only_through_the_outcome():
    won, lost = trajectory(0, 1.0, [1, 1, 1]), trajectory(1, 0.0, [1, 1, 1])
    mine = AnswerScore(logprobs=(-3, -2, -1))
    values = [
        by_turn(
            estimate([group(won, lost)], TraceCredit(), answers={won.id: mine, lost.id: other}, statistics=POPULATION),
            won,
        )
        for other in (AnswerScore(logprobs=(-3, -9, -1)), AnswerScore(logprobs=(-0.1, -0.1, -0.1)))
    ]
    assert values[0] == values[1]


def test_the_tail_rule_replaces_the_final_answers_advantage():
    won, lost = trajectory(0, 1.0, [1, 1]), trajectory(1, 0.0, [1, 1])
    answers = {m.id: AnswerScore(logprobs=(-1, -1)) for m in (won, lost)}
    result = estimate([group(won, lost)], TraceCredit(tail_scale=0.05), answers=answers, statistics=POPULATION)
    assert by_turn(result, won)[1] == pytest.approx(0.05 * 0.5)
    assert by_turn(result, lost)[1] == pytest.approx(-0.05 * 0.5)


def test_gigpo_adds_step_advantages_to_the_episode_advantage():
    won = trajectory(0, 1.0, [1, 1, 1], keys=["start", "hall", "vault"])
    lost = trajectory(1, 0.0, [1, 1], keys=["start", "hall"])
    result = estimate([group(won, lost)], GiGPOCredit(mean_std_norm=False, step_weight=2.0))
    episode = np.sqrt(0.5)
    expected = [episode + 0.95**2, episode + 0.95, episode]
    assert by_turn(result, won) == pytest.approx(expected, abs=1e-5)
    assert by_turn(result, lost) == pytest.approx([-episode - 0.95**2, -episode - 0.95], abs=1e-5)
    assert result.metrics["credit/unanchored_fraction"] == 0


def test_hgpo_has_no_episode_term_unless_the_base_group_is_on():
    won = trajectory(0, 1.0, [1, 1], keys=["start", "vault"])
    lost = trajectory(1, 0.0, [1, 1], keys=["start", "hall"])
    unknown = trajectory(2, None, [1, 1], keys=["start", "hall"])
    result = estimate([group(won, lost, unknown)], HGPOCredit())
    assert by_turn(result, won) == pytest.approx([1, 0], abs=1e-5)
    assert by_turn(result, lost) == pytest.approx([-1, 0], abs=1e-5)
    assert by_turn(result, unknown) == [0, 0]
    based = estimate([group(won, lost, unknown)], HGPOCredit(base_group=True))
    assert by_turn(based, won) == pytest.approx([(np.sqrt(0.5) + 2) / 3, np.sqrt(0.5)], abs=1e-5)


def test_turns_without_sampled_tokens_count_in_no_statistic():
    empty, won, lost = trajectory(0, 0.0, [0, 0]), trajectory(1, 1.0, [1, 0, 2]), trajectory(2, 0.0, [1])
    result = estimate([group(empty, won, lost)], NoCredit(), statistics=EXPANDED)
    reference = estimate([group(trajectory(1, 1.0, [1, 2]), lost)], NoCredit(), statistics=EXPANDED)
    assert by_turn(result, empty) == [0, 0]
    assert by_turn(result, lost) == by_turn(reference, lost)
    assert result.metrics["credit/unscorable_fraction"] == pytest.approx(1 / 3)


def test_length_shaping_is_added_once_before_credit_and_can_be_taken_off():
    reward = RewardConfig(overlong=OverlongConfig(max_tokens=20, buffer_tokens=10))
    short, long, lost = trajectory(0, 1.0, [10]), trajectory(1, 1.0, [10, 5]), trajectory(2, None, [9] * 9)
    (shaped,) = combine_rewards([group(short, long, lost)], reward)
    assert [t.reward for t in shaped.trajectories] == [1.0, 0.5, None]
    assert [task_reward(t, reward) for t in shaped.trajectories] == [1.0, 1.0, None]
    assert shaped.trajectories[1].success is True
    assert combine_rewards([group(short)], RewardConfig()) == (group(short),)
    result = estimate([shaped], NoCredit(), reward=reward)
    assert by_turn(result, long)[0] < 0 < by_turn(result, short)[0]


def test_the_outcome_target_ends_at_the_unshaped_reward():
    reward = RewardConfig(overlong=OverlongConfig(max_tokens=20, buffer_tokens=10))
    short, long = trajectory(0, 1.0, [10]), trajectory(1, 1.0, [10, 5])
    (shaped,) = combine_rewards([group(short, long)], reward)
    valued = MeterScore(forecasts=(Forecast(is_valid=True, completion_prob=0.2),) * 2)
    meter = {short.id: MeterScore(forecasts=valued.forecasts[:1]), long.id: valued}
    result = estimate([shaped], DeltaTTGCredit(target="outcome"), meter=meter, reward=reward)
    assert result.details[long.id]["signal"] == pytest.approx((0, 0.8))


def test_no_groups_give_no_advantages():
    result = estimate([], NoCredit())
    assert result.per_turn == {}
    assert result.metrics["credit/advantage_abs_mean"] == 0


def test_a_credit_section_without_a_rule_is_refused_and_not_taken_for_grpo():
    class NewCredit(Section):
        kind: str = "new"

    with pytest.raises(AssertionError, match="new"):
        estimate([group(trajectory(0, 1.0, [2]), trajectory(1, 0.0, [2]))], NewCredit())
