import math

import pytest

from megatrl.data.meter_prompt import MeterAnswer, MeterPrompt
from megatrl.data.scores import Forecast
from megatrl.errors import ScoringError
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.meter import AnswerReadout, CandidateMeter
from tests.fakes.frozen_models import PrefixRunner, make_group, make_trajectory

# Ids of the meter's words; histories use ids below 50.
HEADER, QUESTION, COMPLETION, NO, YES, TO_GO, NULL = 90, 91, 92, 93, 94, 95, 96
GRID = {1.0: 61, 10.0: 62, 100.0: 63}


def make_prompt(numbers=None, fingerprint="words"):
    numbers = numbers or {value: (token,) for value, token in GRID.items()}
    answers = [MeterAnswer(tokens=(COMPLETION, NO, TO_GO, NULL), completion=False)]
    answers += [
        MeterAnswer(tokens=(COMPLETION, YES, TO_GO, *tokens), completion=True, tokens_to_go=value)
        for value, tokens in numbers.items()
    ]
    return MeterPrompt(
        header=(HEADER,),
        question=(QUESTION,),
        answers=tuple(answers),
        tokenizer_fingerprint=fingerprint,
        template_hash="t",
    )


def meter(logprob, *, prompt=None, **options):
    runner = PrefixRunner(logprob)
    settings = {"failure_cost": 500.0, "policy_fingerprint": "words", "max_sequence_tokens": 200, **options}
    backend = IndependentBackend(runner=runner, microbatch_tokens=64)
    return CandidateMeter(prompt=prompt or make_prompt(), backend=backend, **settings), runner


def history(prefix):
    """The state that a question was asked about."""
    assert prefix[0] == HEADER
    return prefix[1 : prefix.index(QUESTION)]


def episode(**options):
    return make_trajectory([((1, 2), (3,)), ((4,), (5, 6)), ((7,), (8,))], **options)


def table_logprob(prefix, target):
    """p(completion) = 0.3 / (0.3 + 0.1); numbers in odds 1 : 2 : 1."""
    fixed = {COMPLETION: 1.0, YES: 0.3, NO: 0.1, TO_GO: 0.9, 61: 0.1, 62: 0.2, 63: 0.1}
    return math.log(fixed[target])


def test_a_hand_table_gives_the_renormalised_bit_and_the_expected_number():
    scorer, _ = meter(table_logprob)
    scores, metrics = scorer.score([make_group(episode())])
    (score,) = scores.values()
    assert len(score.forecasts) == 3
    for forecast in score.forecasts:
        assert forecast.is_valid
        assert forecast.completion
        assert forecast.completion_prob == pytest.approx(0.75)
        assert forecast.tokens_to_go == pytest.approx(0.25 * 1 + 0.5 * 10 + 0.25 * 100)
    assert score.terminal is None
    assert scorer.failure_cost == 500.0
    assert metrics == {"meter/invalid": 0.0, "meter/shortened": 0.0, "meter/forecast_failure": 0.0}


def test_each_state_is_asked_about_with_its_own_history_in_one_branch():
    seen = set()

    def logprob(prefix, target):
        seen.add(history(prefix))
        return table_logprob(prefix, target)

    scorer, runner = meter(logprob)
    scorer.score([make_group(episode())])
    assert seen == {(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7)}
    assert runner.num_sequences == 3


def test_numbers_of_several_tokens_multiply_their_probabilities():
    # Numbers in digits with a closing brace: 1 } and 1 0 }. p(1)=1, then } or 0 at 0.4 : 0.6, then }.
    prompt = make_prompt({1.0: (71, 70), 10.0: (71, 72, 70)})

    def logprob(prefix, target):
        odds = {COMPLETION: 1.0, YES: 0.2, NO: 0.6, TO_GO: 1.0, 71: 1.0, 72: 0.6, 70: 0.4 if prefix[-1] == 71 else 1.0}
        return math.log(odds[target])

    scorer, runner = meter(logprob, prompt=prompt)
    scores, _ = scorer.score([make_group(episode())])
    forecast = next(iter(scores.values())).forecasts[0]
    assert not forecast.completion
    assert forecast.completion_prob == pytest.approx(0.25)
    assert forecast.tokens_to_go == pytest.approx(0.4 * 1 + 0.6 * 10)
    assert runner.num_sequences == 3


def test_a_forecast_follows_the_state_and_not_its_place():
    """Tokens to go fall with each action seen: the readout keeps states apart."""

    def logprob(prefix, target):
        if target in GRID.values():
            wanted = {2: 63, 4: 62, 7: 61}[len(history(prefix))]
            return 0.0 if target == wanted else -50.0
        return table_logprob(prefix, target)

    scorer, _ = meter(logprob)
    trajectories = [episode(index=n) for n in range(3)]
    scores, _ = scorer.score([make_group(*trajectories)])
    for trajectory in trajectories:
        assert [f.tokens_to_go for f in scores[trajectory.id].forecasts] == pytest.approx([100, 10, 1])


def test_extreme_logprobs_stay_finite():
    readout = AnswerReadout(make_prompt())

    def forecast(no, yes, numbers):
        values = {COMPLETION: -1.0, NO: no, YES: yes, TO_GO: -1.0, **dict(zip(GRID.values(), numbers, strict=True))}
        (branch,) = readout.plan.branches
        return readout.forecast([tuple(tuple(values[t] for t in targets) for targets in branch.targets)])

    assert forecast(-1e4, 0.0, (-1e4, -1e4, 0.0)) == Forecast(
        is_valid=True, completion=True, completion_prob=1.0, tokens_to_go=100.0
    )
    hopeless = forecast(0.0, -1e4, (-1e4, -1e4, -1e4))
    assert not hopeless.completion
    assert hopeless.completion_prob < 1e-300
    assert hopeless.tokens_to_go == pytest.approx(37.0)


def test_the_end_state_is_asked_about_when_wanted():
    lengths = []

    def logprob(prefix, target):
        lengths.append(len(history(prefix)))
        return table_logprob(prefix, target)

    scorer, _ = meter(logprob, with_terminal=True)
    plain, trailing = episode(), episode(index=1, trailing=(9, 9))
    scores, _ = scorer.score([make_group(plain, trailing)])
    assert set(lengths) == {2, 4, 7, 8, 10}
    assert all(len(s.forecasts) == 3 and s.terminal is not None for s in scores.values())


def test_a_new_segment_is_a_trunk_of_its_own():
    seen = set()

    def logprob(prefix, target):
        seen.add(history(prefix))
        return table_logprob(prefix, target)

    scorer, _ = meter(logprob)
    scorer.score([make_group(episode(segment_starts=[1]))])
    assert seen == {(1, 2), (4,), (4, 5, 6, 7)}


def test_long_histories_lose_middle_turns_and_hopeless_ones_are_invalid():
    seen = {}

    def logprob(prefix, target):
        seen[history(prefix)] = True
        if target in GRID.values():
            wanted = {(1, 2): 63, (1, 2, 3, 4): 62, (1, 2, 7): 61}[history(prefix)]
            return 0.0 if target == wanted else -50.0
        return table_logprob(prefix, target)

    room = make_prompt().num_extra_tokens
    scorer, _ = meter(logprob, max_sequence_tokens=room + 4)
    scores, metrics = scorer.score([make_group(episode())])
    assert set(seen) == {(1, 2), (1, 2, 3, 4), (1, 2, 7)}
    assert metrics["meter/shortened"] == pytest.approx(1 / 3)
    forecasts = next(iter(scores.values())).forecasts
    assert all(f.is_valid for f in forecasts)
    assert [f.tokens_to_go for f in forecasts] == pytest.approx([100, 10, 1])

    scorer, _ = meter(logprob, max_sequence_tokens=room + 2)
    scores, metrics = scorer.score([make_group(episode())])
    assert [f.is_valid for f in next(iter(scores.values())).forecasts] == [True, False, False]
    assert metrics["meter/invalid"] == pytest.approx(2 / 3)


def test_another_tokenizer_is_refused_before_any_forward_pass():
    with pytest.raises(ScoringError, match="would mean other words"):
        meter(table_logprob, policy_fingerprint="words-permuted")


def test_answers_that_part_in_more_than_one_token_are_refused():
    answers = make_prompt().answers
    strange = MeterAnswer(tokens=(COMPLETION, 50, TO_GO, 64), completion=True, tokens_to_go=1000.0)
    broken = MeterPrompt(
        header=(), question=(QUESTION,), answers=(*answers, strange), tokenizer_fingerprint="w", template_hash="t"
    )
    with pytest.raises(ScoringError, match="at one token"):
        AnswerReadout(broken)


def test_trajectories_without_an_outcome_are_not_asked_about():
    scorer, runner = meter(table_logprob)
    scores, _ = scorer.score([make_group(episode(reward=None))])
    assert scores == {}
    assert runner.calls == []
