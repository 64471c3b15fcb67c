"""What every loss promises: shards add up, masked tokens are inert, reductions and metrics are exact."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrl.algorithms.objective import policy_objective, sequence_ids
from megatrl.algorithms.off_policy import exclude_rejected, mismatch_weights
from megatrl.algorithms.policy_losses import clipped_policy_loss, mean_log_ratio, sequence_policy_loss, supervised_loss
from megatrl.config.credit import ClippedLoss, LossConfig, OffPolicyConfig, SequenceLoss
from megatrl.data.samples import Microbatch, Minibatch, PackedBatch
from megatrl.errors import ConfigError

NAN = float("nan")
INPUTS = ("logprobs_T", "old_logprobs_T", "behavior_logprobs_T", "advantages_T", "reference_logprobs_T", "entropies_T")
CONFIGS = {
    "clipped": LossConfig(kl_coefficient=0.1, entropy_coefficient=0.01),
    "gspo": LossConfig(policy=SequenceLoss(), kl_coefficient=0.1, entropy_coefficient=0.01),
    "tis": LossConfig(off_policy=OffPolicyConfig(kind="tis", high=1.1)),
    "icepop": LossConfig(off_policy=OffPolicyConfig(kind="icepop", low=0.9, high=1.1), kl_coefficient=0.2),
}


def sequences(lengths, seed=0) -> dict[str, Any]:
    """Random flat tensors for sequences of these lengths; about half of the tokens are actions."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tensors = {name: torch.randn(total, generator=generator, dtype=torch.float64) for name in INPUTS}
    tensors["logprobs_T"] = -tensors["logprobs_T"].abs()
    for name in ("old_logprobs_T", "behavior_logprobs_T", "reference_logprobs_T"):
        tensors[name] = tensors["logprobs_T"] + 0.3 * tensors[name]
    mask = torch.rand(total, generator=generator) < 0.5
    mask[0], mask[-1] = False, True
    return tensors | {"action_mask_T": mask, "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)])}


def objective(config, tensors, **denominators):
    """Returns the output and the gradients of logprobs and entropies."""
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("logprobs_T", "entropies_T")}
    count = float(tensors["action_mask_T"].sum())
    output = policy_objective(
        config, **{**tensors, **leaves}, **{"loss_denominator": count, "num_action_tokens": count, **denominators}
    )
    output.loss.backward()
    return output, {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("name", CONFIGS)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99), st.data())
def test_losses_gradients_and_metrics_of_shards_sum_to_those_of_the_batch(name, lengths, seed, draw):
    tensors = sequences(lengths, seed)
    count = float(tensors["action_mask_T"].sum())
    denominators = {"loss_denominator": count, "num_action_tokens": count}
    whole, gradients = objective(CONFIGS[name], tensors, **denominators)
    cut = draw.draw(st.integers(0, len(lengths)))
    bounds = tensors["cu_seqlens"].tolist()
    parts = []
    for first, last in ((0, cut), (cut, len(lengths))):
        if first == last:
            continue
        span = slice(bounds[first], bounds[last])
        shard = {k: v[span] for k, v in tensors.items() if k != "cu_seqlens"}
        shard["cu_seqlens"] = tensors["cu_seqlens"][first : last + 1] - bounds[first]
        parts.append(objective(CONFIGS[name], shard, **denominators))
    assert sum(float(o.loss.detach()) for o, _ in parts) == pytest.approx(float(whole.loss.detach()), abs=1e-12)
    for leaf, gradient in gradients.items():
        torch.testing.assert_close(torch.cat([g[leaf] for _, g in parts]), gradient, atol=1e-12, rtol=0)
    for metric, value in whole.metrics.items():
        assert sum(float(o.metrics[metric]) for o, _ in parts) == pytest.approx(float(value), abs=1e-12), metric


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_stands_outside_the_mask_is_inert(name, garbage):
    tensors = sequences([5, 7, 3])
    mask = tensors["action_mask_T"]
    clean, clean_gradients = objective(CONFIGS[name], tensors)
    dirty = {k: torch.where(mask, v, garbage) if k in INPUTS else v for k, v in tensors.items()}
    dirty["loss_weights_T"] = torch.where(mask, 1.0, garbage).double()
    output, gradients = objective(CONFIGS[name], dirty)
    assert float(output.loss.detach()) == float(clean.loss.detach())
    for leaf, gradient in gradients.items():
        torch.testing.assert_close(gradient, clean_gradients[leaf], atol=0, rtol=0)
        assert (gradient[~mask] == 0).all()
    for metric, value in output.metrics.items():
        assert float(value) == float(clean.metrics[metric]), metric


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shard_without_action_tokens_adds_exactly_zero(name):
    tensors = sequences([4, 4])
    tensors["action_mask_T"] = torch.zeros(8, dtype=torch.bool)
    output, gradients = objective(CONFIGS[name], tensors, loss_denominator=10.0, num_action_tokens=10.0)
    assert float(output.loss) == 0
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert all(float(value) == 0 for value in output.metrics.values())
    empty = supervised_loss(tensors["logprobs_T"].requires_grad_(), tensors["action_mask_T"], loss_denominator=3.0)
    empty.loss.backward()
    assert (tensors["logprobs_T"].grad == 0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_metrics_do_not_depend_on_how_often_a_sample_is_repeated(name):
    tensors = sequences([6])
    once, _ = objective(CONFIGS[name], tensors)
    thrice = {k: v.repeat(3) for k, v in tensors.items() if k != "cu_seqlens"}
    repeated, _ = objective(CONFIGS[name], thrice | {"cu_seqlens": torch.tensor([0, 6, 12, 18])})
    for metric, value in once.metrics.items():
        assert float(repeated.metrics[metric]) == pytest.approx(float(value), abs=1e-12), metric


@pytest.mark.parametrize("policy", [ClippedLoss(), SequenceLoss()])
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(policy):
    tensors = sequences([5, 6])
    tensors["old_logprobs_T"] = tensors["logprobs_T"].clone()
    mask = tensors["action_mask_T"]
    _, gradients = objective(LossConfig(policy=policy), tensors)
    expected = torch.where(mask, -tensors["advantages_T"], 0.0) / mask.sum()
    torch.testing.assert_close(gradients["logprobs_T"], expected)


@pytest.mark.parametrize("policy", [ClippedLoss(), SequenceLoss()])
def test_zero_advantages_have_zero_gradient(policy):
    tensors = sequences([5, 6])
    tensors["advantages_T"] = torch.zeros(11, dtype=torch.float64)
    output, gradients = objective(LossConfig(policy=policy), tensors)
    assert float(output.loss) == 0
    assert (gradients["logprobs_T"] == 0).all()


def test_gradients_match_finite_differences():
    tensors = sequences([4, 5], seed=3)
    fixed = {k: v for k, v in tensors.items() if k not in ("logprobs_T", "entropies_T")}

    def loss(logprobs, entropies):
        kwargs: dict[str, Any] = {"loss_denominator": 9.0, "num_action_tokens": 9.0}
        config = CONFIGS["clipped"]
        return policy_objective(config, logprobs_T=logprobs, entropies_T=entropies, **fixed, **kwargs).loss

    leaves = (tensors["logprobs_T"].requires_grad_(), tensors["entropies_T"].requires_grad_())
    assert torch.autograd.gradcheck(loss, leaves)


def test_the_sequence_loss_has_the_gradient_of_its_sequence_ratio():
    """With one advantage for a sequence, d loss / d logprob_t = -A s / |y| inside the clip range."""
    log_ratios, advantage = [1e-4, 2e-4, -2e-4], 0.7
    logprobs = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    output = sequence_policy_loss(
        logprobs,
        torch.zeros(3, dtype=torch.float64),
        torch.full((3,), advantage, dtype=torch.float64),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.long),
        num_sequences=1,
        clip_low=3e-4,
        clip_high=4e-4,
        loss_denominator=1.0,
        num_action_tokens=3.0,
        loss_weights_T=torch.full((3,), 1 / 3, dtype=torch.float64),
    )
    output.loss.backward()
    ratio = math.exp(sum(log_ratios) / 3)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.full((3,), -advantage * ratio / 3, dtype=torch.float64))


def test_packed_sequences_have_their_own_length_mean_and_ignore_masked_tokens():
    log_ratios = torch.tensor([0.1, 0.3, 99.0, 0.5, NAN, -0.2], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, False, True])
    means = mean_log_ratio(log_ratios, mask, torch.tensor([0, 0, 0, 1, 1, 3]), num_sequences=4)
    torch.testing.assert_close(means, torch.tensor([0.2, 0.5, 0.0, -0.2], dtype=torch.float64))
    assert float(means[0].exp()) == pytest.approx(1.2214, abs=1e-4)
    assert sequence_ids(torch.tensor([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("advantage, expected", [(-1.0, 3.0), (1.0, -1.2)])
def test_dual_clip_bounds_negative_advantages_only(advantage, expected):
    output = clipped_policy_loss(
        torch.log(torch.tensor([20.0, 20.0])),
        torch.zeros(2),
        torch.tensor([advantage, advantage]),
        torch.tensor([True, False]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
        loss_denominator=1.0,
        num_action_tokens=1.0,
    )
    assert float(output.loss) == pytest.approx(expected)
    assert float(output.metrics["dual_clip_fraction"]) == (advantage < 0)
    assert float(output.metrics["clip_fraction"]) == (advantage > 0)


@given(st.floats(-30, 30), st.floats(-3, 3), st.floats(0, 5))
def test_the_token_loss_is_bounded_by_clip_multiplier_and_advantage(log_ratio, advantage, multiplier):
    output = clipped_policy_loss(
        torch.tensor([log_ratio], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage * multiplier], dtype=torch.float64),
        torch.ones(1, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        loss_denominator=1.0,
        num_action_tokens=1.0,
    )
    assert abs(float(output.loss)) <= 3.0 * 5.0 * abs(advantage) + 1e-9


def test_extreme_log_ratios_stay_finite_in_fp32():
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    output = clipped_policy_loss(
        logprobs,
        torch.tensor([-200.0, 0.0]),
        torch.tensor([-1.0, -1.0]),
        torch.ones(2, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        loss_denominator=2.0,
        num_action_tokens=2.0,
    )
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_every_term_uses_the_same_weights_and_denominator():
    """Two sequences of 1 and 9 tokens; seq_mean_token_mean weighs them alike in policy, KL and entropy."""
    lengths = [2, 10]
    tensors = sequences(lengths)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[0, 2]] = False
    tensors["action_mask_T"] = mask
    weights = torch.where(torch.arange(12) < 2, 1.0, 1 / 9).double()
    config = CONFIGS["clipped"]
    whole, _ = objective(config, tensors, loss_denominator=2.0, num_action_tokens=10.0, loss_weights_T=weights)
    parts = []
    for start, stop in ((0, 2), (2, 12)):
        one = {k: v[start:stop] for k, v in tensors.items() if k != "cu_seqlens"}
        count = float(stop - start - 1)
        one["cu_seqlens"] = torch.tensor([0, stop - start])
        parts.append(objective(config, one, loss_denominator=count, num_action_tokens=count)[0])
    assert float(whole.loss) == pytest.approx(sum(float(p.loss) for p in parts) / 2)


def test_kl_and_entropy_are_not_multiplied_by_off_policy_weights():
    tensors = sequences([6])
    tensors["advantages_T"] = torch.zeros(6, dtype=torch.float64)
    plain = LossConfig(kl_coefficient=0.3, entropy_coefficient=0.1)
    corrected = LossConfig(
        kl_coefficient=0.3, entropy_coefficient=0.1, off_policy=OffPolicyConfig(kind="tis", high=1.0)
    )
    assert float(objective(plain, tensors)[0].loss) == float(objective(corrected, tensors)[0].loss)


def test_off_policy_weights_multiply_the_token_loss_without_a_gradient_of_their_own():
    tensors = sequences([40])
    mask = tensors["action_mask_T"]
    tensors["old_logprobs_T"] = tensors["logprobs_T"].clone()
    _, gradients = objective(CONFIGS["icepop"].model_copy(update={"kl_coefficient": 0.0}), tensors)
    mismatch = mismatch_weights(
        tensors["old_logprobs_T"], tensors["behavior_logprobs_T"], mask, kind="icepop", low=0.9, high=1.1
    )
    expected = torch.where(mask, -tensors["advantages_T"] * mismatch.weights_T, 0.0) / mask.sum()
    torch.testing.assert_close(gradients["logprobs_T"], expected)
    assert 0 < int(mismatch.is_rejected_T.sum()) < int(mask.sum())
    assert not mismatch.weights_T.requires_grad


def test_rejected_tokens_leave_the_denominator_only_where_configured():
    ratios = np.array([0.2, 1.0, 1.0, 9.0, 9.0])
    microbatch = Microbatch(
        tokens=np.zeros(5, dtype=np.int64),
        cu_seqlens=np.array([0, 5]),
        action_mask=np.array([True, True, True, True, False]),
        per_token={"old_logprobs": np.log(ratios), "behavior_logprobs": np.zeros(5)},
    )
    minibatch = Minibatch(microbatches=((microbatch,), (microbatch,)), loss_denominator=10.0, num_sequences=2)
    batch = PackedBatch(minibatches=(minibatch,), samples=())

    def denominator(**switches):
        kind = switches.pop("kind", "icepop")
        off_policy = OffPolicyConfig(kind=kind, keep_rejected_in_denominator=switches.pop("keep", False))
        return exclude_rejected(batch, LossConfig(off_policy=off_policy, **switches)).minibatches[0].loss_denominator

    assert denominator() == 6.0
    assert denominator(keep=True) == denominator(kind="tis") == 10.0
    with pytest.raises(ConfigError, match="got seq_mean_token_sum"):
        denominator(reduction="seq_mean_token_sum")


def test_huge_kl_at_observation_tokens_changes_nothing():
    tensors = sequences([8])
    mask = tensors["action_mask_T"]
    config = CONFIGS["clipped"]
    before, _ = objective(config, tensors)
    tensors["reference_logprobs_T"] = torch.where(mask, tensors["reference_logprobs_T"], -1e9)
    after, _ = objective(config, tensors)
    assert float(before.metrics["kl"]) == float(after.metrics["kl"])
    assert float(before.loss) == float(after.loss)


def test_a_term_that_is_on_without_its_input_is_refused():
    tensors = sequences([4])
    count: dict[str, Any] = {"loss_denominator": 1.0, "num_action_tokens": 1.0}
    without_reference = {k: v for k, v in tensors.items() if k != "reference_logprobs_T"}
    with pytest.raises(ConfigError, match=r"kl_coefficient=0\.1 needs reference_logprobs"):
        policy_objective(CONFIGS["clipped"], **without_reference, **count)
    without_entropy = {k: v for k, v in tensors.items() if k != "entropies_T"}
    with pytest.raises(ConfigError, match=r"entropy_coefficient=0\.01 needs entropies"):
        policy_objective(CONFIGS["clipped"], **without_entropy, **count)


def test_kl_and_entropy_are_reported_even_when_they_cost_nothing():
    output, gradients = objective(LossConfig(), sequences([6]))
    assert {"kl", "entropy", "clip_fraction", "dual_clip_fraction", "approx_kl", "policy_loss"} <= set(output.metrics)
    assert float(output.loss.detach()) == float(output.metrics["policy_loss"])
    assert (gradients["entropies_T"] == 0).all()
