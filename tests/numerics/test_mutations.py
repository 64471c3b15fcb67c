"""Faults that were made in systems like this one, put back on purpose: an example must notice each.

A mutation replaces one passage of a module's source and compiles the copy beside the original.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import pytest

from megatrl.errors import MegatrlError
from tests.numerics.worked_examples import EXAMPLES, full_name


@dataclass(frozen=True, slots=True)
class Mutation:
    fault: str
    module: str
    passage: str
    replacement: str
    noticed_by: str


MUTATIONS = (
    # group statistics
    Mutation(
        "population divisor for bessel",
        "group_statistics",
        'total - 1 if std == "bessel" else total',
        "total",
        "step_expanded_statistics",
    ),
    Mutation(
        "bessel divisor for population",
        "group_statistics",
        'total - 1 if std == "bessel" else total',
        "total - 1",
        "estimators_of_the_standard_deviation",
    ),
    Mutation(
        "steps do not weigh the mean",
        "group_statistics",
        "counts[members] if step_expanded else np.ones(len(members))",
        "np.ones(len(members))",
        "step_expanded_statistics",
    ),
    Mutation(
        "Dr.GRPO still divides",
        "group_statistics",
        "scale = deviation + eps if norm_std else 1.0",
        "scale = deviation + eps",
        "estimators_of_the_standard_deviation",
    ),
    Mutation(
        "a missing reward counts as zero",
        "group_statistics",
        "values = np.full(len(rewards), np.nan)",
        "values = np.zeros(len(rewards))",
        "unknown_rewards_leave_the_statistics",
    ),
    Mutation(
        "near-equal rewards are divided by their noise",
        "group_statistics",
        "EQUAL_REWARDS_STD = 1e-6",
        "EQUAL_REWARDS_STD = 0.0",
        "near_equal_rewards_give_zero",
    ),
    # DeltaTTG
    Mutation(
        "sign rule swapped",
        "deltattg",
        "directed = direction * np",
        "directed = -direction * np",
        "progress_shares_the_advantage",
    ),
    Mutation(
        "sign of the advantage ignored",
        "deltattg",
        "float(np.sign(advantage)) if sign_aware else 1.0",
        "1.0",
        "regression_takes_the_blame",
    ),
    Mutation(
        "sign-aware switch ignored",
        "deltattg",
        "float(np.sign(advantage)) if sign_aware else 1.0",
        "float(np.sign(advantage))",
        "sign_blind_ablation_keeps_progress_weights",
    ),
    Mutation(
        "cap, then renormalise once",
        "deltattg",
        "        capped |= exceeds\n",
        "        capped |= exceeds\n"
        "        level = (total - max_multiplier * n[capped].sum()) / (n[~capped] * u[~capped]).sum()\n"
        "        return np.where(capped, max_multiplier, level * u)\n",
        "water_filling_needs_a_second_round",
    ),
    Mutation(
        "cap without renormalising",
        "deltattg",
        "        capped |= exceeds\n",
        "        return np.minimum(level * u, max_multiplier)\n",
        "water_filling_needs_a_second_round",
    ),
    Mutation(
        "normalised over padding or observations",
        "deltattg",
        "total = n.sum()",
        "total = n.sum() + 7",
        "progress_shares_the_advantage",
    ),
    Mutation(
        "mean over steps instead of tokens",
        "deltattg",
        "n = np.asarray(num_tokens, dtype=np.float64)\n    u",
        "n = np.ones(len(num_tokens))\n    u",
        "progress_shares_the_advantage",
    ),
    Mutation(
        "terminal cost forgotten",
        "deltattg",
        "costs.append(0.0 if success else transform(rule.failure_cost))",
        "costs.append(costs[-1])",
        "progress_shares_the_advantage",
    ),
    Mutation(
        "failed end costs nothing",
        "deltattg",
        "0.0 if success else transform(rule.failure_cost)",
        "0.0",
        "regression_takes_the_blame",
    ),
    Mutation(
        "a failure forecast has zero tokens to go",
        "deltattg",
        "completion):\n        return failure_cost",
        "completion):\n        return 0.0",
        "failure_forecasts_cost_c",
    ),
    Mutation(
        "cost not clamped to C",
        "deltattg",
        "min(max(forecast.tokens_to_go, 0.0), failure_cost)",
        "max(forecast.tokens_to_go, 0.0)",
        "costs_are_clamped_to_c",
    ),
    Mutation(
        "no uniform share",
        "deltattg",
        "return (1.0 - rho) * shares + rho / num_turns",
        "return shares",
        "progress_shares_the_advantage",
    ),
    Mutation("divided spread ignored", "deltattg", 'if spread == "divide":', "if False:", "divided_spread"),
    Mutation("infeasible remainder dropped", "deltattg", "max(rest, 0.0)", "0.0", "infeasible_cap_spills_over"),
    Mutation(
        "ties go to the last candidate",
        "deltattg",
        "int(np.argmin(values))",
        "len(values) - 1 - int(np.argmin(values[::-1]))",
        "guided_selection",
    ),
    Mutation(
        "meter reward measures error linearly in log",
        "meter_reward",
        "math.exp(-abs(math.log((1.0 + forecast) / (1.0 + label))) / tau)",
        "1.0 - abs(math.log((1.0 + forecast) / (1.0 + label))) / tau",
        "meter_rewards",
    ),
    # TRACE
    Mutation("eps added after the logarithm", "trace", "eps - np.minimum(values, 0.0)", "-values", "state_value_table"),
    Mutation(
        "fill without gamma^(T-k)", "trace", "weight * gamma ** (num_transitions - k)", "weight", "window_and_fill"
    ),
    Mutation(
        "fill one exponent off",
        "trace",
        "gamma ** (num_transitions - k)",
        "gamma ** (num_transitions - k - 1)",
        "window_and_fill",
    ),
    Mutation(
        "fill reaches one turn too few",
        "trace",
        "max(window, 1) >= num_transitions",
        "max(window, 1) > num_transitions",
        "window_and_fill",
    ),
    Mutation(
        "fill reaches one turn too many",
        "trace",
        "k + max(window, 1) >= num_transitions",
        "k + max(window, 1) + 1 >= num_transitions",
        "window_and_fill",
    ),
    Mutation(
        "turn credit normalised",
        "trace",
        "advantages = alpha_outcome",
        "credit = (credit - credit.mean()) / (credit.std() + 1e-6)\n    advantages = alpha_outcome",
        "zero_variance_group_still_learns",
    ),
    Mutation("window summed, not averaged", "trace", " / weights.sum()", "", "window_and_fill"),
    Mutation("window one too long", "trace", "deltas[k : k + window]", "deltas[k : k + window + 1]", "window_and_fill"),
    Mutation(
        "window looks backwards",
        "trace",
        "deltas[k : k + window]",
        "deltas[max(0, k - window + 1) : k + 1]",
        "window_and_fill",
    ),
    Mutation(
        "credit sign flipped",
        "trace",
        "np.log(d[:-1]) - np.log(d[1:])",
        "np.log(d[1:]) - np.log(d[:-1])",
        "published_pairs",
    ),
    Mutation("answer logprob summed", "trace", "float(np.mean(", "float(np.sum(", "answer_token_means"),
    # scorers and the meter's labels
    Mutation(
        "first answer token lost",
        "scoring.branches",
        "for position in result[len(wrapper) :]",
        "for position in result[len(wrapper) + 1 :]",
        "every_answer_token_is_scored_at_every_state",
    ),
    Mutation(
        "answer tokens predicted from their own row",
        "scoring.branches",
        "targets=((),) * len(wrapper) + tuple((token,) for token in answer))",
        "targets=((),) * (len(wrapper) + 1) + tuple((token,) for token in answer))",
        "every_answer_token_is_scored_at_every_state",
    ),
    Mutation(
        "values computed with the current policy",
        "scoring.weight_swap",
        "_fill(modules, self._copies)",
        "self._hashes = state_hashes(modules)",
        "the_reference_scores_with_its_own_weights",
    ),
    Mutation(
        "a failed state has zero tokens to go",
        "meter.labels",
        "to_go[state.turn_index] if is_success else None",
        "to_go[state.turn_index] if is_success else 0",
        "labels_of_a_success_and_a_failure",
    ),
    Mutation(
        "observations count as tokens to go",
        "meter.labels",
        "[len(turn.action_tokens) for turn in trajectory.turns]",
        "[len(turn.action_tokens) + len(turn.observation_tokens) for turn in trajectory.turns]",
        "labels_of_a_success_and_a_failure",
    ),
    Mutation(
        "the present action is not counted",
        "meter.labels",
        "to_go = remaining[::-1]",
        "to_go = remaining[-2::-1]",
        "labels_of_a_success_and_a_failure",
    ),
    # losses
    Mutation(
        "per-microbatch token mean",
        "policy_losses",
        "loss = -_weighted(logprobs_T, action_mask_T, loss_weights_T, None) / loss_denominator",
        "loss = -_weighted(logprobs_T, action_mask_T, loss_weights_T, None) / action_mask_T.sum() / 2",
        "shards_add_up",
    ),
    Mutation(
        "normalised over masked tokens too",
        "policy_losses",
        "return torch.where(action_mask_T, values_T, 0.0).sum()",
        "return torch.where(action_mask_T, values_T, 0.0).sum() * action_mask_T.sum() / len(values_T)",
        "hand_checked_surrogate",
    ),
    Mutation(
        "masked tokens multiplied by zero instead of left out",
        "policy_losses",
        "return torch.where(action_mask_T, values_T, 0.0).sum()",
        "return (values_T * action_mask_T).sum()",
        "supervised_nan_is_inert",
    ),
    Mutation(
        "dual clip for positive advantages",
        "policy_losses",
        "(advantages_T < 0) & (losses_T > bound_T)",
        "losses_T > bound_T",
        "clip_and_dual_clip_table",
    ),
    Mutation(
        "no dual clip",
        "policy_losses",
        "(advantages_T < 0) & (losses_T > bound_T)",
        "(advantages_T < 0) & (losses_T > 9e9)",
        "clip_and_dual_clip_table",
    ),
    Mutation(
        "sequence ratio is a product",
        "policy_losses",
        "return sums_S / counts_S.clamp(min=1)",
        "return sums_S",
        "sequence_ratio",
    ),
    Mutation("loss weights ignored", "policy_losses", "if loss_weights_T is not None:", "if False:", "reductions"),
    Mutation(
        "k3 with the sign of the gap swapped",
        "kl",
        "(reference_logprobs_T - logprobs_T)",
        "(logprobs_T - reference_logprobs_T)",
        "kl_estimators",
    ),
    Mutation(
        "IcePop clips instead of rejecting",
        "off_policy",
        "torch.where(is_rejected_T, 0.0, ratio_T)",
        "ratio_T.clamp(low, high)",
        "off_policy_weights",
    ),
    Mutation("TIS not truncated", "off_policy", "ratio_T.clamp(max=high)", "ratio_T", "off_policy_weights"),
    Mutation(
        "overlong penalty without floor",
        "dapo",
        "(min(excess, 1.0) if floor else excess)",
        "excess",
        "overlong_shaping",
    ),
)


def compiled(module_name: str, source: str, label: str) -> ModuleType:
    """Returns a module made of `source`, registered while its dataclasses are built."""
    name = f"mutant_of_{module_name}"
    mutant = ModuleType(name)
    sys.modules[name] = mutant
    try:
        exec(compile(source, label, "exec"), mutant.__dict__)
    finally:
        del sys.modules[name]
    return mutant


def source_of(module_name: str) -> str:
    path = import_module(full_name(module_name)).__file__
    assert path is not None
    with open(path, encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.module}: {mutation.fault}")
def test_example_notices(mutation):
    source = source_of(mutation.module)
    assert source.count(mutation.passage) == 1, f"{mutation.passage!r} must occur exactly once in {mutation.module}"
    check = next(check for check in EXAMPLES[mutation.module] if check.__name__ == mutation.noticed_by)
    check(compiled(mutation.module, source, "unmutated copy"))
    mutant = compiled(mutation.module, source.replace(mutation.passage, mutation.replacement), mutation.fault)
    # A fault may also trip a check of the code itself, or leave a result without its last element.
    with pytest.raises((AssertionError, MegatrlError, IndexError)):
        check(mutant)
