"""The worked examples of each module: of megatrl.algorithms, or of the package that the name begins with."""

from collections.abc import Callable
from types import ModuleType

from tests.numerics import credit_examples as credit
from tests.numerics import loss_examples as losses
from tests.numerics import scorer_examples as scorers

EXAMPLES: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "group_statistics": (
        credit.step_expanded_statistics,
        credit.estimators_of_the_standard_deviation,
        credit.spread_of_evaluations,
        credit.unknown_rewards_leave_the_statistics,
        credit.near_equal_rewards_give_zero,
        credit.meter_reward_advantages,
    ),
    "deltattg": (
        credit.progress_shares_the_advantage,
        credit.regression_takes_the_blame,
        credit.sign_blind_ablation_keeps_progress_weights,
        credit.divided_spread,
        credit.water_filling_needs_a_second_round,
        credit.water_filling_weighs_steps_by_their_tokens,
        credit.infeasible_cap_spills_over,
        credit.failure_forecasts_cost_c,
        credit.costs_are_clamped_to_c,
        credit.terminal_variants,
        credit.unparseable_answers,
        credit.value_targets,
        credit.log_costs_and_net_of_spent,
        credit.guided_selection,
    ),
    "meter_reward": (credit.meter_rewards,),
    "trace": (
        credit.published_pairs,
        credit.state_value_table,
        credit.window_and_fill,
        credit.zero_variance_group_still_learns,
        credit.answer_token_means,
        credit.single_transition,
        credit.window_zero_fills_the_last_turn,
        credit.credit_forms,
    ),
    "dapo": (losses.overlong_shaping,),
    "off_policy": (losses.off_policy_weights,),
    "kl": (losses.kl_estimators,),
    "policy_losses": (
        losses.clip_and_dual_clip_table,
        losses.hand_checked_surrogate,
        losses.sequence_ratio,
        losses.reductions,
        losses.shards_add_up,
        losses.supervised_nan_is_inert,
    ),
    "meter.labels": (scorers.labels_of_a_success_and_a_failure,),
    "scoring.branches": (scorers.every_answer_token_is_scored_at_every_state,),
    "scoring.independent": (scorers.tokens_of_independent_scoring,),
    "scoring.weight_swap": (scorers.the_reference_scores_with_its_own_weights,),
}


def full_name(module: str) -> str:
    return f"megatrl.{module}" if "." in module else f"megatrl.algorithms.{module}"
