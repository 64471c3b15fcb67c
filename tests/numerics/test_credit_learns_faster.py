"""With oracle scorers, step-level credit finds the decisive action of a toy task before GRPO does.

Five turns of one token each, four actions; only the action of the third turn decides the outcome.
The policy is a table of logits, trained by the real advantages and the real loss.
"""

import numpy as np
import torch

from megatrl.algorithms.advantages import estimate_advantages
from megatrl.algorithms.policy_losses import clipped_policy_loss
from megatrl.config.credit import (
    CreditConfig,
    DeltaTTGCredit,
    GroupStatisticsConfig,
    NoCredit,
    RewardConfig,
    TraceCredit,
)
from megatrl.data.scores import AnswerScore, Forecast, MeterScore, Scores
from megatrl.data.trajectories import Prompt, PromptGroup, Segment, Termination, Trajectory, TrajectoryId, Turn

NUM_TURNS, NUM_ACTIONS, KEY_TURN, KEY_ACTION, GROUP_SIZE = 5, 4, 2, 1, 8


def episode(index, actions):
    turns = tuple(
        Turn(
            observation_tokens=(9,),
            action_tokens=(int(a),),
            behavior_logprobs=(0.0,),
            policy_version=0,
            is_tool_call=True,
        )
        for a in actions
    )
    success = bool(actions[KEY_TURN] == KEY_ACTION)
    return Trajectory(
        id=TrajectoryId(prompt_id="p", group_id="g", index=index),
        segments=(Segment(turns=turns, trailing_observation_tokens=(9,)),),
        reward=float(success),
        success=success,
        termination=Termination.MAX_TURNS,
    )


def oracle_scores(trajectories):
    """Both scorers know the outcome as soon as, and not before, the key action was taken."""
    undecided = Forecast(is_valid=True, completion=True, tokens_to_go=100)
    decided = {True: Forecast(is_valid=True, completion=True, tokens_to_go=10), False: Forecast(is_valid=True)}
    meter, answers = {}, {}
    for t in trajectories:
        states = [undecided if k <= KEY_TURN else decided[t.success] for k in range(NUM_TURNS)]
        meter[t.id] = MeterScore(forecasts=tuple(states))
        after = -0.05 if t.success else -4.0
        answers[t.id] = AnswerScore(logprobs=tuple(-1.4 if k <= KEY_TURN else after for k in range(NUM_TURNS + 1)))
    return Scores(meter=meter, answers=answers, failure_cost=200.0)


def key_probability(credit: CreditConfig, *, num_steps: int, seed: int) -> float:
    """Returns the probability of the key action after training a uniform policy."""
    random = np.random.default_rng(seed)
    logits = torch.zeros(NUM_TURNS, NUM_ACTIONS, dtype=torch.float64, requires_grad=True)
    for _ in range(num_steps):
        probabilities = torch.softmax(logits, -1).detach().numpy()
        sampled = [[random.choice(NUM_ACTIONS, p=p) for p in probabilities] for _ in range(GROUP_SIZE)]
        trajectories = tuple(episode(i, actions) for i, actions in enumerate(sampled))
        group = PromptGroup(prompt=Prompt(prompt_id="p", task={}, seed=0), group_id="g", trajectories=trajectories)
        estimate = estimate_advantages(
            [group],
            oracle_scores(trajectories),
            credit=credit,
            group_statistics=GroupStatisticsConfig(),
            reward=RewardConfig(),
        )
        advantages = torch.from_numpy(np.concatenate([np.concatenate(estimate.per_turn[t.id]) for t in trajectories]))
        turns = torch.arange(NUM_TURNS).repeat(GROUP_SIZE)
        logprobs = torch.log_softmax(logits, -1)[turns, torch.tensor(sampled).flatten()]
        output = clipped_policy_loss(
            logprobs,
            logprobs.detach(),
            advantages,
            torch.ones_like(turns, dtype=torch.bool),
            clip_low=0.2,
            clip_high=0.28,
            loss_denominator=float(len(turns)),
            num_action_tokens=float(len(turns)),
        )
        (gradient,) = torch.autograd.grad(output.loss, logits)
        with torch.no_grad():
            logits -= 2.0 * gradient
    return float(torch.softmax(logits, -1)[KEY_TURN, KEY_ACTION].detach())


def mean_key_probability(credit: CreditConfig) -> float:
    return float(np.mean([key_probability(credit, num_steps=8, seed=seed) for seed in range(6)]))


def test_deltattg_and_trace_raise_the_key_action_faster_than_grpo():
    grpo = mean_key_probability(NoCredit())
    deltattg = mean_key_probability(DeltaTTGCredit())
    trace = mean_key_probability(TraceCredit(alpha_turn=1.0))
    assert grpo > 0.3  # it learns, from a start of 0.25
    assert deltattg > grpo + 0.15
    assert trace > grpo + 0.15


def test_credit_for_the_wrong_sign_learns_slower():
    assert mean_key_probability(DeltaTTGCredit(sign_aware=False)) < mean_key_probability(DeltaTTGCredit())
