"""Rules that need more than one field. One function each; all of them run, and all problems are reported.

A check yields Problems and never changes a value. Rules of a single field stand on the field.
"""

from collections.abc import Callable, Iterator

from megatrl.config.credit import DeltaTTGCredit, TraceCredit
from megatrl.config.engine_checks import (
    check_chat_format,
    check_context_fits_model,
    check_devices,
    check_layout_fits,
    check_learning_rate,
    check_model_files,
    check_precision,
    check_scoring_backend,
    check_server_degree,
    check_sglang_arguments,
    check_tiny_model,
    check_token_limits,
    check_turn_limits,
)
from megatrl.config.environments import TextWorldConfig
from megatrl.config.meter_checks import (
    check_label_files,
    check_meter_prompts,
    check_oracle_meter,
    check_readout,
)
from megatrl.config.recipe import NoMeter, Recipe, TrainedMeter
from megatrl.config.router_checks import check_expert_bias, check_load_balancing, check_router_model
from megatrl.config.violations import Problem

Check = Callable[[Recipe], Iterator[Problem]]


def check_sampling_filters(recipe: Recipe) -> Iterator[Problem]:
    """top_p and top_k sample from another distribution than the one whose logprobs the actor computes."""
    sampling = recipe.rollout.sampling
    if sampling.top_k == 0:
        yield Problem(
            paths=("rollout.sampling.top_k",), message="0 would leave no token", remedy="write -1 for no filter"
        )
    filters = [name for name, on in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k > 0)) if on]
    for name in filters:
        is_corrected = recipe.loss.off_policy.kind != "none"
        yield Problem(
            paths=(f"rollout.sampling.{name}", "loss.off_policy.kind"),
            message="a filtered sampler is not the policy that is trained: recorded logprobs and the actor's differ",
            remedy=f"remove {name}" + ("" if is_corrected else ", or correct it with loss.off_policy.kind: icepop"),
            is_warning=is_corrected,
        )


def check_group_size(recipe: Recipe) -> Iterator[Problem]:
    """A group of one has no baseline: its advantage is 0 whatever it did."""
    if recipe.batch.group_size == 1:
        is_trace = isinstance(recipe.credit, TraceCredit)
        rest = "only TRACE's local credit remains" if is_trace else "nothing would be learned"
        yield Problem(
            paths=("batch.group_size", "credit.kind"),
            message=f"advantages are relative to the group, and a group of one has none: {rest}",
            remedy="set batch.group_size to 2 or more",
            is_warning=is_trace,
        )
    if recipe.selection.min_group_size > recipe.batch.group_size:
        yield Problem(
            paths=("selection.min_group_size", "batch.group_size"),
            message="is more than batch.group_size, so every group would get zero weight",
            remedy=f"set it to at most {recipe.batch.group_size}",
        )


def check_trace_selection(recipe: Recipe) -> Iterator[Problem]:
    """Groups with equal rewards still carry TRACE's turn credit."""
    if recipe.selection.drop_equal_rewards and isinstance(recipe.credit, TraceCredit):
        yield Problem(
            paths=("selection.drop_equal_rewards", "credit.kind"),
            message="TRACE learns from groups whose rewards are all equal; dropping them throws that away",
            remedy="set selection.drop_equal_rewards: false, or use another credit",
        )


def check_gold_answers(recipe: Recipe) -> Iterator[Problem]:
    """TRACE scores the gold answer, so the environment has to have one."""
    if isinstance(recipe.credit, TraceCredit) and isinstance(recipe.env, TextWorldConfig):
        yield Problem(
            paths=("credit.kind", "env.kind"),
            message="TRACE scores states by the gold answer, and TextWorld games have none",
            remedy="use another credit (gigpo, deltattg), or an environment with answers",
        )


def check_meter(recipe: Recipe) -> Iterator[Problem]:
    """DeltaTTG and a meter need each other."""
    needs_meter = isinstance(recipe.credit, DeltaTTGCredit)
    has_meter = not isinstance(recipe.meter, NoMeter)
    if needs_meter and not has_meter:
        yield Problem(
            paths=("credit.kind", "meter.kind"),
            message="DeltaTTG reads a meter, and the recipe has none",
            remedy="set meter.kind to trained, or to frozen with meter.path",
        )
    if has_meter and not needs_meter:
        yield Problem(
            paths=("meter.kind", "credit.kind"),
            message="only credit.kind: deltattg reads a meter",
            remedy="set meter.kind: none, or credit.kind: deltattg",
        )


def check_meter_training(recipe: Recipe) -> Iterator[Problem]:
    """A trained meter needs episodes, and detour rates that are probabilities."""
    meter = recipe.meter
    if not isinstance(meter, TrainedMeter):
        return
    if meter.num_policy_episodes + meter.num_scripted_episodes == 0:
        yield Problem(
            paths=("meter.num_policy_episodes", "meter.num_scripted_episodes"),
            message="both are 0, so the meter has nothing to learn from",
            remedy="set one of them above 0",
        )
    if meter.num_scripted_episodes > 0 and not meter.detours:
        yield Problem(
            paths=("meter.detours", "meter.num_scripted_episodes"),
            message="is empty, but scripted episodes are asked for",
            remedy="give at least one rate, or set meter.num_scripted_episodes: 0",
        )
    for detour in meter.detours:
        if not 0 <= detour <= 1:
            yield Problem(
                paths=("meter.detours",), message=f"{detour} is not a probability", remedy="give values from 0 to 1"
            )


def check_loss_options(recipe: Recipe) -> Iterator[Problem]:
    """Options of the loss that contradict each other."""
    loss = recipe.loss
    if loss.reduction == "constant" and loss.constant_length is None:
        yield Problem(
            paths=("loss.constant_length", "loss.reduction"),
            message="loss.reduction: constant divides by it, and it is not given",
            remedy="set loss.constant_length, in tokens: it alone divides the sum over a minibatch's action tokens",
        )
    if loss.reduction != "constant" and loss.constant_length is not None:
        yield Problem(
            paths=("loss.constant_length", "loss.reduction"),
            message="is read by loss.reduction: constant only",
            remedy="delete it, or set loss.reduction: constant",
        )
    if loss.policy.kind == "gspo" and loss.reduction != "seq_mean_token_mean":
        yield Problem(
            paths=("loss.reduction", "loss.policy.kind"),
            message="GSPO is defined as a mean over sequences",
            remedy="set loss.reduction: seq_mean_token_mean",
            is_warning=True,
        )
    if loss.off_policy.kind == "icepop" and loss.off_policy.low >= loss.off_policy.high:
        yield Problem(
            paths=("loss.off_policy.low", "loss.off_policy.high"),
            message=f"the band {loss.off_policy.low} to {loss.off_policy.high} is empty: every token would be rejected",
            remedy="set low below 1 and high above 1",
        )


def check_overlong(recipe: Recipe) -> Iterator[Problem]:
    """The buffer of the length penalty lies inside its limit."""
    overlong = recipe.reward.overlong
    if overlong is not None and overlong.buffer_tokens > overlong.max_tokens:
        yield Problem(
            paths=("reward.overlong.buffer_tokens", "reward.overlong.max_tokens"),
            message="is more than max_tokens, so every trajectory would be penalised",
            remedy=f"set it to at most {overlong.max_tokens}",
        )


def check_minibatches(recipe: Recipe) -> Iterator[Problem]:
    """Optimizer steps of one batch see equally many trajectories."""
    batch = recipe.batch
    size = batch.num_groups * batch.group_size
    if size % batch.num_minibatches:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        nearest = sorted(divisors, key=lambda n: (abs(n - batch.num_minibatches), n))[:2]
        yield Problem(
            paths=("batch.num_minibatches", "batch.num_groups", "batch.group_size"),
            message=f"does not divide num_groups x group_size = {batch.num_groups} x {batch.group_size} = {size}",
            remedy=f"nearest values: {' or '.join(str(n) for n in sorted(nearest))}",
        )


def check_unused_kl_options(recipe: Recipe) -> Iterator[Problem]:
    """Options that no formula reads under the others."""
    if recipe.loss.kl_coefficient == 0 and recipe.loss.kl_estimator != "k3":
        yield Problem(
            paths=("loss.kl_estimator", "loss.kl_coefficient"),
            message="has no effect while loss.kl_coefficient is 0",
            remedy="set loss.kl_coefficient above 0, or delete it",
            is_warning=True,
        )


def check_selection_rounds(recipe: Recipe) -> Iterator[Problem]:
    """Dropping groups needs rounds to refill the batch."""
    if recipe.selection.drop_equal_rewards and recipe.selection.max_rounds == 1:
        yield Problem(
            paths=("selection.max_rounds", "selection.drop_equal_rewards"),
            message="one round cannot refill a batch from which groups are dropped",
            remedy="set selection.max_rounds to 2 or more",
            is_warning=True,
        )


FILE_CHECKS: tuple[Check, ...] = (check_model_files, check_label_files)
"""Checks that depend on this machine's disk; only `train` and `compare` insist on them."""

CHECKS: tuple[Check, ...] = (
    check_sampling_filters,
    check_group_size,
    check_trace_selection,
    check_gold_answers,
    check_meter,
    check_meter_training,
    check_meter_prompts,
    check_oracle_meter,
    check_readout,
    check_loss_options,
    check_unused_kl_options,
    check_overlong,
    check_minibatches,
    check_turn_limits,
    check_token_limits,
    check_learning_rate,
    check_devices,
    check_precision,
    check_scoring_backend,
    check_server_degree,
    check_sglang_arguments,
    check_tiny_model,
    check_layout_fits,
    check_chat_format,
    check_context_fits_model,
    check_selection_rounds,
    check_router_model,
    check_load_balancing,
    check_expert_bias,
)
