"""Selection, flattening and packing: identities, denominators, balance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrl.algorithms.dapo import has_equal_rewards
from megatrl.batching.bins import balanced_bins, computed_tokens, largest_differencing, longest_first
from megatrl.batching.flatten import flatten_groups
from megatrl.batching.packing import attach_old_logprobs, mismatch, pack
from megatrl.batching.selection import select_groups
from megatrl.config.credit import LossConfig, SelectionConfig
from megatrl.data.samples import TrainingSample
from megatrl.data.trajectories import Prompt, PromptGroup, Segment, Termination, Trajectory, TrajectoryId, Turn
from megatrl.errors import EmptyBatchError, TrajectoryError


def turn(observation, action):
    return Turn(
        observation_tokens=tuple(observation),
        action_tokens=tuple(action),
        behavior_logprobs=tuple(-0.1 * (i + 1) for i in range(len(action))),
        policy_version=0,
    )


def trajectory(index, reward, segments):
    return Trajectory(
        id=TrajectoryId(prompt_id="p", group_id="g", index=index),
        segments=tuple(Segment(turns=tuple(turns)) for turns in segments),
        reward=reward,
        success=None if reward is None else reward >= 1,
        termination=Termination.COMPLETED if reward is not None else Termination.ENV_ERROR,
    )


def group(*rewards):
    prompt = Prompt(prompt_id="p", task={}, seed=0)
    members = tuple(trajectory(i, r, [[turn([1, 2], [3])]]) for i, r in enumerate(rewards))
    return PromptGroup(prompt=prompt, group_id="g", trajectories=members)


def sample(index, length, num_actions, advantage=1.0, segment=0):
    mask = np.zeros(length, dtype=bool)
    mask[length - num_actions :] = True
    return TrainingSample(
        trajectory_id=TrajectoryId(prompt_id="p", group_id="g", index=index),
        segment_index=segment,
        tokens=np.arange(length),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0),
        advantages=np.where(mask, advantage, 0.0),
    )


def test_selection_names_the_reason_of_every_dropped_group():
    groups = [group(1.0, 0.0), group(1.0, 1.0), group(1.0, None), group(None, None), group(1e6, 1e6 + 0.1)]
    selection = select_groups(groups, SelectionConfig(drop_equal_rewards=True), has_equal_rewards=has_equal_rewards)
    assert selection.kept == (groups[0],)
    assert selection.reasons == {"equal_rewards": 2, "too_few_trainable": 2}


def test_a_segment_becomes_one_sample_and_unknown_outcomes_become_none():
    first = trajectory(0, 1.0, [[turn([9, 8], [7, 6]), turn([5], [4])], [turn([3, 2, 1], [0])]])
    lost = trajectory(1, None, [[turn([9], [7])]])
    members = PromptGroup(prompt=Prompt(prompt_id="p", task={}, seed=0), group_id="g", trajectories=(first, lost))
    advantages = {first.id: (np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0]))}
    samples = flatten_groups([members], advantages)
    assert [s.tokens.tolist() for s in samples] == [[9, 8, 7, 6, 5, 4], [3, 2, 1, 0]]
    assert samples[0].action_mask.tolist() == [False, False, True, True, False, True]
    assert samples[0].advantages.tolist() == [0, 0, 1, 2, 0, 3]
    assert samples[1].advantages.tolist() == [0, 0, 0, 4]
    assert samples[0].behavior_logprobs.tolist() == [0, 0, -0.1, -0.2, 0, -0.1]


def test_an_advantage_array_of_the_wrong_length_names_trajectory_and_turn():
    first = trajectory(0, 1.0, [[turn([9], [7, 6])]])
    members = PromptGroup(prompt=Prompt(prompt_id="p", task={}, seed=0), group_id="g", trajectories=(first,))
    with pytest.raises(TrajectoryError, match=r"p/g/0\.0 segment 0 turn 0: 2 action tokens"):
        flatten_groups([members], {first.id: (np.array([1.0]),)})


@given(st.lists(st.integers(1, 40), min_size=0, max_size=30), st.integers(1, 4), st.integers(1, 60), st.integers(1, 3))
def test_bins_hold_every_sequence_once_with_equal_counts_on_all_ranks(lengths, num_ranks, capacity, multiple):
    bins = balanced_bins(lengths, num_ranks, capacity, count_multiple=multiple)
    assert len(bins) == num_ranks
    assert len({len(rank) for rank in bins}) == 1
    assert len(bins[0]) % multiple == 0
    assert sorted(i for rank in bins for b in rank for i in b) == list(range(len(lengths)))
    limit = max([capacity, *lengths])
    assert all(sum(lengths[i] for i in b) <= limit for rank in bins for b in rank)
    assert bins == balanced_bins(lengths, num_ranks, capacity, count_multiple=multiple)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 60))
def test_bins_never_compute_more_than_longest_first_alone(lengths, num_ranks, capacity):
    bins = balanced_bins(lengths, num_ranks, capacity)
    num_bins = num_ranks * len(bins[0])
    sums = sorted((sum(lengths[i] for i in b) for b in longest_first(lengths, num_bins)), reverse=True)
    if sums[0] <= max([capacity, *lengths]):
        assert computed_tokens(bins, lengths) <= num_ranks * sum(max(1, total) for total in sums[::num_ranks])


def test_largest_differencing_splits_as_in_the_literature():
    # Korf's example: differencing 8, 7, 6, 5, 4 over two sets leaves a difference of 2 (16 and 14).
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in b) for b in largest_differencing([8, 7, 6, 5, 4], 2)) == [14, 16]
    # Longest first leaves 4 here.
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in b) for b in longest_first([8, 7, 6, 5, 4], 2)) == [13, 17]


def test_differencing_saves_a_microbatch_where_longest_first_does_not_fit():
    assert len(balanced_bins([8, 7, 6, 5, 4], 2, 16)[0]) == 1
    assert max(sum((8, 7, 6, 5, 4)[i] for i in b) for b in longest_first([8, 7, 6, 5, 4], 2)) > 16


def test_bins_of_like_size_meet_in_one_microbatch():
    bins = balanced_bins([9, 1, 9, 1], 2, 9)
    assert [[sum((9, 1, 9, 1)[i] for i in b) for b in rank] for rank in bins] == [[9, 1], [9, 1]]
    assert computed_tokens(bins, [9, 1, 9, 1]) == 20
    assert computed_tokens(bins, [9, 1, 9, 1], length_multiple=4) == 2 * (12 + 4)


def lognormal_lengths(num_samples, seed):
    """Tokens of trajectories: median 600, sigma 0.8, cut at 16 and 4096."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(600), 0.8, num_samples), 16, 4096).astype(int).tolist()


def first_fit(lengths, num_ranks, capacity):
    """Filled in order of arrival and dealt to the ranks in turn, as a packer without balance does."""
    bins: list[list[int]] = []
    for i, length in enumerate(lengths):
        place = next((b for b in bins if sum(lengths[j] for j in b) + length <= capacity), None)
        if place is None:
            bins.append([i])
        else:
            place.append(i)
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_samples", [64, 256])
def test_a_lognormal_mix_computes_at_most_a_twentieth_more_than_its_tokens(num_ranks, num_samples):
    balanced, unbalanced = [], []
    for seed in range(8):
        lengths = lognormal_lengths(num_samples, seed)
        balanced.append(computed_tokens(balanced_bins(lengths, num_ranks, 8192), lengths) / sum(lengths))
        unbalanced.append(computed_tokens(first_fit(lengths, num_ranks, 8192), lengths) / sum(lengths))
    assert max(balanced) <= 1.05
    if num_ranks > 2 or num_samples == 64:  # two ranks with many bins hide what order of arrival wastes
        assert np.mean(unbalanced) > 1.05, "balance would not be what makes the bound hold"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 2, 5, 17])
def test_any_number_of_samples_packs_with_one_global_denominator(num_ranks, num_samples):
    samples = [sample(i, 4 + i % 5, 1 + i % 3) for i in range(num_samples)]
    batch = pack(samples, num_data_ranks=num_ranks, num_minibatches=2, microbatch_tokens=8, loss=LossConfig())
    seen = [i for mb in batch.minibatches for rank in mb.microbatches for m in rank for i in m.sample_indices if i >= 0]
    assert sorted(seen) == list(range(num_samples))
    assert sum(mb.loss_denominator for mb in batch.minibatches) == sum(s.num_action_tokens for s in samples)


def test_weightless_samples_are_counted_but_not_computed():
    samples = [sample(0, 5, 2), sample(1, 6, 3, advantage=0.0)]
    kwargs = {"num_data_ranks": 1, "num_minibatches": 1, "microbatch_tokens": 99}
    batch = pack(samples, loss=LossConfig(), **kwargs)
    assert batch.minibatches[0].microbatches[0][0].sample_indices == (0,)
    assert batch.minibatches[0].loss_denominator == 5
    with_kl = pack(samples, loss=LossConfig(entropy_coefficient=0.1), **kwargs)
    assert with_kl.minibatches[0].microbatches[0][0].sample_indices == (0, 1)


def test_seq_mean_token_mean_weighs_a_trajectory_the_same_in_one_or_two_rows():
    loss = LossConfig(reduction="seq_mean_token_mean")
    rows = [sample(0, 5, 2), sample(0, 5, 2, segment=1), sample(1, 9, 4)]
    batch = pack(rows, num_data_ranks=1, num_minibatches=1, microbatch_tokens=99, loss=loss)
    microbatch = batch.minibatches[0].microbatches[0][0]
    weights = microbatch.per_token["loss_weights"]
    assert weights[:10].sum() == pytest.approx(1.0)
    assert weights[10:].sum() == pytest.approx(1.0)
    assert batch.minibatches[0].loss_denominator == 2


def test_constant_reduction_divides_by_its_length():
    loss = LossConfig(reduction="constant", constant_length=100)
    batch = pack([sample(0, 5, 2)], num_data_ranks=1, num_minibatches=1, microbatch_tokens=99, loss=loss)
    assert batch.minibatches[0].loss_denominator == 100
    assert [m.loss_denominator for m in pack([sample(0, 5, 2), sample(1, 5, 2)], num_data_ranks=1, num_minibatches=1,
        microbatch_tokens=99, loss=loss).minibatches] == [100]  # fmt: skip


def test_nothing_to_pack_is_an_error_and_an_overlong_sample_too():
    kwargs = {"num_data_ranks": 1, "num_minibatches": 1, "microbatch_tokens": 9, "loss": LossConfig()}
    with pytest.raises(EmptyBatchError, match="nothing to pack"):
        pack([], **kwargs)
    with pytest.raises(TrajectoryError, match="has 12 tokens, the limit is 10"):
        pack([sample(0, 12, 2)], context_tokens=10, **kwargs)


def test_old_logprobs_return_to_their_places_and_mismatch_reads_action_tokens_only():
    samples = [sample(0, 4, 2), sample(1, 3, 1)]
    batch = pack(samples, num_data_ranks=2, num_minibatches=1, microbatch_tokens=4, loss=LossConfig())
    old = {0: np.array([9.0, 9.0, -0.4, -0.7]), 1: np.array([9.0, 9.0, -0.5])}
    filled = attach_old_logprobs(batch, old)
    columns = {
        m.sample_indices: m.per_token["old_logprobs"].tolist()
        for rank in filled.minibatches[0].microbatches
        for m in rank
    }
    assert columns == {(0,): [0, 0, -0.4, -0.7], (1,): [0, 0, -0.5]}
    mean, maximum = mismatch(batch, old)
    assert mean == pytest.approx(0.1)
    assert maximum == pytest.approx(0.2)
