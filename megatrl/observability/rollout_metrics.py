"""Numbers that describe a step's trajectories. Outcomes that are unknown enter no mean."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatrl.data.trajectories import PromptGroup, Termination, Trajectory
from megatrl.data.wire import GroupRecord
from megatrl.observability.metrics import Max, Mean, Metric, Min, Sum

SUCCESS = "rollout/success"
REWARD = "rollout/reward"
EVALUATION_SUCCESS = "eval/success"
TOKENS_PER_S = "throughput/tokens_per_s"


def rollout_metrics(groups: Sequence[PromptGroup]) -> dict[str, Metric]:
    """Metrics under `rollout/` over all trajectories of `groups`, dropped groups included.

    `reward` and `success` are means over trajectories with a known outcome. `termination/*` are
    shares of all trajectories, always all of them, so that a curve does not end where one is zero.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    known = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    metrics: dict[str, Metric] = {
        REWARD: Mean.of(trajectory.reward for trajectory in known if trajectory.reward is not None),
        SUCCESS: Mean.of(bool(trajectory.success) for trajectory in known),
        "rollout/num_groups": Sum(len(groups)),
        "rollout/num_trajectories": Sum(len(trajectories)),
        "rollout/num_unknown_outcomes": Sum(len(trajectories) - len(known)),
        "rollout/num_action_tokens": Sum(sum(trajectory.num_action_tokens for trajectory in trajectories)),
        "rollout/num_tokens": Sum(sum(_num_tokens(trajectory) for trajectory in trajectories)),
        "rollout/turns": Mean.of(trajectory.num_turns for trajectory in trajectories),
        "rollout/action_tokens": Mean.of(trajectory.num_action_tokens for trajectory in trajectories),
        "rollout/action_tokens_per_turn": Mean.of(len(turn.action_tokens) for turn in turns),
        "rollout/action_length_share": Mean.of(turn.finish_reason == "length" for turn in turns),
        "rollout/tool_call_share": Mean.of(turn.is_tool_call for turn in turns),
        "rollout/penalty": Mean.of(turn.penalty for turn in turns),
        "rollout/behavior_logprob": Mean.of(logprob for turn in turns for logprob in turn.behavior_logprobs),
    }
    if trajectories:
        metrics["rollout/tokens_max"] = Max(max(_num_tokens(trajectory) for trajectory in trajectories))
        metrics["rollout/turns_max"] = Max(max(trajectory.num_turns for trajectory in trajectories))
        versions = [turn.policy_version for turn in turns]
        if versions:
            metrics["rollout/policy_version_min"] = Min(min(versions))
            metrics["rollout/policy_version_max"] = Max(max(versions))
        endings = Counter(trajectory.termination for trajectory in trajectories)
        for termination in Termination:
            metrics[f"rollout/termination/{termination}"] = Mean(
                endings[termination] / len(trajectories), len(trajectories)
            )
    return metrics | _environment_metrics(trajectories)


def drop_metrics(records: Sequence[GroupRecord]) -> dict[str, Metric]:
    """Number of dropped groups, in all and by reason."""
    reasons = Counter(record.dropped for record in records if record.dropped)
    metrics: dict[str, Metric] = {f"rollout/dropped/{reason}": Sum(count) for reason, count in reasons.items()}
    return metrics | {"rollout/num_dropped_groups": Sum(sum(reasons.values()))}


def advantage_metrics(records: Sequence[GroupRecord]) -> dict[str, Metric]:
    """How the credit is spread: over tokens, and over the turns of one trajectory."""
    tokens: list[float] = []
    spreads: list[float] = []
    for record in records:
        for note in record.notes:
            turns = [turn for turn in note.advantages or () if turn]
            tokens.extend(value for turn in turns for value in turn)
            if len(turns) > 1:
                spreads.append(float(np.std([float(np.mean(turn)) for turn in turns])))
    if not tokens:
        return {}
    return {
        "credit/advantage_mean": Mean.of(tokens),
        "credit/advantage_abs": Mean.of(abs(value) for value in tokens),
        "credit/advantage_max": Max(max(tokens)),
        "credit/advantage_min": Min(min(tokens)),
        # Population deviation of the turns' mean advantages; 0 where every turn gets the same credit.
        "credit/turn_spread": Mean.of(spreads),
    }


def _environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in _finite(trajectory.metrics).items():
            values.setdefault(f"rollout/env/{name}", []).append(value)
    return {name: Mean.of(listed) for name, listed in values.items()}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _num_tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.observation_tokens) + len(turn.action_tokens) for turn in trajectory.turns)
