"""Credit rules. Checks of one module each, on worked examples with published or hand-computed numbers.

A check takes the module under test, so that test_mutations can hand it a broken copy. Names in
parentheses are the examples' names in docs/algorithms.md.
"""

import numpy as np

from megatrl.data.scores import Forecast, MeterScore
from tests.numerics.tolerance import close


def completes(*tokens_to_go):
    return MeterScore(forecasts=tuple(Forecast(is_valid=True, completion=True, tokens_to_go=t) for t in tokens_to_go))


def fails(count):
    return MeterScore(forecasts=(Forecast(is_valid=True, completion=False),) * count)


def rule(module, **changes):
    defaults = {
        "target": "ttg",
        "terminal": "outcome",
        "cost_transform": "identity",
        "parse_failure": "failure_cost",
        "net_of_spent": False,
        "failure_cost": 2000.0,
    }
    return module.SignalRule(**{**defaults, **changes})


def redistribute(module, score, num_tokens, advantage, *, success, **changes):
    switches = {"rho": 0.2, "max_multiplier": 5.0, "sign_aware": True, "spread": "broadcast"}
    switches |= {name: changes.pop(name) for name in list(changes) if name in switches}
    return module.redistribute(
        score,
        num_tokens,
        advantage=advantage,
        success=success,
        reward=float(success),
        rule=rule(module, **changes),
        **switches,
    )


# --- group statistics -------------------------------------------------------------------------


def step_expanded_statistics(module):
    """(D6)"""

    def advantages(**switches):
        defaults = {"std": "bessel", "norm_std": True, "step_expanded": True, "eps": 1e-6}
        return module.group_advantages(
            [10, 0, 0, 10], num_actions=[5, 20, 50, 8], **{**defaults, **switches}
        ).trajectory

    close(advantages(), [2.306456, -0.428342, -0.428342, 2.306456])
    close(advantages(std="population"), [2.320477, -0.430946, -0.430946, 2.320477])
    close(advantages(step_expanded=False), [0.866025, -0.866025, -0.866025, 0.866025])


def estimators_of_the_standard_deviation(module):
    """(B1)"""

    def first_two(**switches):
        defaults = {"std": "bessel", "norm_std": True, "step_expanded": False, "eps": 1e-6}
        rewards = [1, 0, 0, 1, 0, 0, 0, 0]
        return module.group_advantages(rewards, num_actions=[1] * 8, **{**defaults, **switches}).trajectory[:2]

    close(first_two(), [1.620182, -0.540061])
    close(first_two(std="population"), [1.732047, -0.577349])
    close(first_two(norm_std=False), [0.75, -0.25])


def spread_of_evaluations(module):
    """(M1)"""
    close(module.mean_and_std([70, 72.86, 75.1], "population")[1], 2.087188)


def unknown_rewards_leave_the_statistics(module):
    result = module.group_advantages(
        [1, None, 0, float("nan")], num_actions=[1] * 4, std="bessel", norm_std=True, step_expanded=False, eps=0.0
    )
    close(result.trajectory, [np.sqrt(0.5), 0, -np.sqrt(0.5), 0])


def near_equal_rewards_give_zero(module):
    for rewards in ([1, 1, 1, 1 + 1e-7], [0.1] * 4, [1e6, 1e6 + 0.1]):
        result = module.group_advantages(
            rewards, num_actions=[1] * len(rewards), std="bessel", norm_std=True, step_expanded=False, eps=1e-6
        )
        assert not result.trajectory.any()


# --- DeltaTTG ---------------------------------------------------------------------------------


def progress_shares_the_advantage(module):
    """(D2)"""
    score, n = completes(900, 700, 760, 300), [10, 5, 20, 5]
    spread = redistribute(module, score, n, 0.8, success=True)
    close(spread.signal, [200, -60, 460, 300])
    close(module.step_shares(spread.signal, direction=1.0, rho=0.0), [0.208333, 0, 0.479167, 0.3125])
    close(module.step_shares(spread.signal, direction=1.0, rho=0.2), [0.216667, 0.05, 0.433333, 0.3])
    close(spread.multipliers, [0.688742, 0.158940, 1.377483, 0.953642])
    close(0.8 * spread.multipliers, [0.550993, 0.127152, 1.101987, 0.762914])
    close(spread.multipliers @ np.asarray(n) / sum(n), 1.0)


def regression_takes_the_blame(module):
    """The rollout of D2, failed and blamed: the costs rise at step 2 and at the failed end."""
    spread = redistribute(module, completes(900, 700, 760, 300), [10, 5, 20, 5], -0.8, success=False)
    close(spread.signal, [200, -60, 460, -1700])
    close(module.step_shares(spread.signal, direction=-1.0, rho=0.0), [0, 60 / 1760, 0, 1700 / 1760])
    assert int(np.argmax(spread.multipliers)) == 3
    assert spread.multipliers[1] > spread.multipliers[0] == spread.multipliers[2]


def sign_blind_ablation_keeps_progress_weights(module):
    """Multipliers of a blamed trajectory equal those of a praised one."""
    blamed = redistribute(module, completes(900, 700, 760, 300), [10, 5, 20, 5], -1.0, success=True, sign_aware=False)
    close(blamed.multipliers, [0.688742, 0.158940, 1.377483, 0.953642])


def divided_spread(module):
    """(D14)"""
    spread = redistribute(module, completes(900, 700, 760, 300), [10, 5, 20, 5], 0.8, success=True, spread="divide")
    close(spread.multipliers, [0.866667, 0.4, 0.866667, 2.4])


def water_filling_needs_a_second_round(module):
    """(D13)"""
    u = np.array([0.5, 0.115, 0.085] + [0.3 / 27] * 27)
    n = [1] * 30
    close(module.token_multipliers(u, n, max_multiplier=1e9)[:4], [15, 3.45, 2.55, 0.333333])
    at_5 = module.token_multipliers(u, n, max_multiplier=5.0)
    close(at_5[:4], [5, 5, 4.415584, 0.577201])
    close(at_5.mean(), 1.0)
    close(module.token_multipliers(u, n, max_multiplier=3.0)[:4], [3, 3, 3, 0.777778])


def water_filling_weighs_steps_by_their_tokens(module):
    """shares [.9,.1] of 1 and 9 tokens: capped [5, 5/9]; mean over 10 tokens is 1."""
    close(module.token_multipliers(np.array([0.9, 0.1]), [1, 9], max_multiplier=5.0), [5, 5 / 9])


def infeasible_cap_spills_over(module):
    """rho = 0, all progress in one of ten tokens, M = 5: 5 there, (10 - 5) / 9 elsewhere."""
    close(module.token_multipliers(np.array([1.0, 0.0]), [1, 9], max_multiplier=5.0), [5, 5 / 9])


def failure_forecasts_cost_c(module):
    """All forecasts fail but the rollout succeeds: only the last step has a signal, of C."""
    spread = redistribute(module, fails(4), [10, 10, 10, 10], 1.0, success=True)
    close(spread.costs, [2000, 2000, 2000, 2000, 0])
    close(spread.signal, [0, 0, 0, 2000])
    close(module.step_shares(spread.signal, direction=1.0, rho=0.2), [0.05, 0.05, 0.05, 0.85])
    close(redistribute(module, fails(3), [1, 2, 3], -1.0, success=False).multipliers, [1, 1, 1])


def costs_are_clamped_to_c(module):
    spread = redistribute(module, completes(9000, -5, 10), [1, 1, 1], 1.0, success=True)
    close(spread.costs, [2000, 0, 10, 0])


def terminal_variants(module):
    score = MeterScore(
        forecasts=completes(900, 300).forecasts, terminal=Forecast(is_valid=True, completion=True, tokens_to_go=50)
    )
    for terminal, end in (("outcome", 2000), ("meter", 50), ("carry", 300)):
        costs = redistribute(module, score, [1, 1], -1.0, success=False, terminal=terminal).costs
        close(costs, [900, 300, end])


def unparseable_answers(module):
    broken = Forecast(is_valid=False)
    score = MeterScore(forecasts=(broken, *completes(900).forecasts, broken, *completes(300).forecasts))
    close(redistribute(module, score, [1] * 4, 1.0, success=True).costs, [2000, 900, 2000, 300, 0])
    carried = redistribute(module, score, [1] * 4, 1.0, success=True, parse_failure="carry")
    close(carried.costs, [900, 900, 900, 300, 0])
    close(carried.signal, [0, 0, 600, 300])


def value_targets(module):
    probabilities = (0.25, 0.5, 0.4)
    score = MeterScore(
        forecasts=tuple(Forecast(is_valid=True, completion=p >= 0.5, completion_prob=p) for p in probabilities)
    )
    for target, expected in (
        ("outcome", [0.25, -0.1, 0.6]),
        ("completion_prob", [0.25, -0.1, 0.6]),
        ("binary", [1, -1, 1]),
    ):
        close(redistribute(module, score, [1] * 3, 1.0, success=True, target=target).signal, expected)
    failed = redistribute(module, score, [1] * 3, -1.0, success=False, target="binary")
    close(failed.signal, [1, -1, 0])


def log_costs_and_net_of_spent(module):
    logs = redistribute(module, completes(99, 9), [1, 1], -1.0, success=False, cost_transform="log1p")
    close(logs.costs, np.log([100, 10, 2001]))
    net = redistribute(module, completes(100, 40), [60, 40], 1.0, success=True, net_of_spent=True)
    close(net.signal, [0, 0])


def guided_selection(module):
    """(D10)"""
    assert module.select_action([610, 480, 2000, 480]) == 1
    assert module.select_action([2000, 2000, 2000, 2000]) == 0


def meter_rewards(module):
    """(D7)"""
    valid = [(True, 450), (True, 225), (False, 0), None, None, (True, 0), (True, 900)]
    forecasts = [
        Forecast(is_valid=False)
        if answer is None
        else Forecast(is_valid=True, completion=answer[0], tokens_to_go=answer[1])
        for answer in valid
    ]

    def rewards(completion, tokens_to_go, **switches):
        return [module.meter_reward(f, completion=completion, tokens_to_go=tokens_to_go, **switches) for f in forecasts]

    close(rewards(True, 450), [1, 0.750554, 0, 0, 0, 0.501109, 0.750277])
    close(rewards(True, 450, form="relative"), [1, 0.75, 0, 0, 0, 0.5, 0.5])
    close(rewards(False, None), [0, 0, 1, 0, 0, 0, 0])
    close(rewards(False, None, failure_earns_ttg_weight=False), [0, 0, 0.5, 0, 0, 0, 0])


def meter_reward_advantages(module):
    """(D7)"""
    rewards = [1, 0.7505543237, 0, 0, 0, 0.5011086475, 0.7502774695]
    result = module.group_advantages(
        rewards, num_actions=[1] * 7, std="bessel", norm_std=True, step_expanded=True, eps=1e-6
    )
    close(result.trajectory, [1.340036, 0.754786, -1.006165, -1.006165, -1.006165, 0.169537, 0.754137])


# --- TRACE ------------------------------------------------------------------------------------

TRACE_DEFAULTS = {
    "window": 3,
    "gamma": 0.8,
    "eps": 0.1,
    "terminal_weight": 2.0,
    "alpha_outcome": 1.0,
    "alpha_turn": 0.2,
}


def published_pairs(module):
    """(T1)"""
    for pair, expected in (([-5.1187, -1.5712], 1.180620), ([-10.657, -7.1061], 0.405216)):
        close(module.temporal_differences(pair, eps=0.001), [expected])


def state_value_table(module):
    """(T2)"""
    logprobs = [-4.5, -3.2, -1.8, -0.9, -0.2]
    close(module.distances(logprobs, 0.1), [4.6, 3.3, 1.9, 1.0, 0.3])
    close(module.state_values(logprobs, 0.1), [0, 0.332134, 0.884202, 1.526056, 2.730029])
    close(module.temporal_differences(logprobs, eps=0.1), [0.332134, 0.552069, 0.641854, 1.203973])


def window_and_fill(module):
    """(T3)"""
    logprobs = [-4.5, -3.2, -1.8, -0.9, -0.2]
    success = module.turn_credit(logprobs, 1 / np.sqrt(3), **TRACE_DEFAULTS)
    failure = module.turn_credit(logprobs, -np.sqrt(3), **TRACE_DEFAULTS)
    close(success.credit, [0.485482, 0.752498, 0.891685, 1.203973])
    close(success.fill, [0, 0.591207, 0.739008, 0.923760])
    close(failure.fill, [0, -1.773620, -2.217025, -2.771281])
    close(success.advantages, [0.674447, 0.846091, 0.903489, 1.002897])
    close(failure.advantages, [-1.634954, -1.936275, -1.997119, -2.045513])


def zero_variance_group_still_learns(module):
    """(T7)"""
    close(module.turn_credit([-4, -2], 0.0, **TRACE_DEFAULTS).advantages, [0.133810])
    close(module.turn_credit([-4, -3.5], 0.0, **TRACE_DEFAULTS).advantages, [0.026011])


def answer_token_means(module):
    """(T9)"""
    tokens = [[-6, -2, -1], [-3, -0.5, -0.1], [-0.9, -0.2, 0]]
    logprobs = [module.mean_answer_logprob(t) for t in tokens]
    close(logprobs, [-3, -1.2, -0.366667])
    close(module.state_values(logprobs, 0.1), [0, 0.869038, 1.893542])


def single_transition(module):
    """(T13)"""
    turns = module.turn_credit([-2, -0.5], 1.2, **TRACE_DEFAULTS)
    close(turns.credit + turns.fill, [3.172763])
    close(turns.advantages, [1.834553])


def window_zero_fills_the_last_turn(module):
    turns = module.turn_credit([-3, -2, -1], 1.0, **{**TRACE_DEFAULTS, "window": 0})
    close(turns.credit, [0, 0])
    close(turns.fill, [0, 1.6])


def credit_forms(module):
    logprobs = [-3.9, -1.9, -0.9]
    forms = {"raw": [2, 1], "remaining_gap": [0.5, 0.5], "initial_gap": [0.5, 0.25], "log_ratio": [np.log(2)] * 2}
    for form, expected in forms.items():
        close(module.temporal_differences(logprobs, eps=0.1, form=form), expected)
