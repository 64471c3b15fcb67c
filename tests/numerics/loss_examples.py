"""Losses and shaping. Checks of one module each, on worked examples with published or hand-computed numbers.

A check takes the module under test, so that test_mutations can hand it a broken copy. Names in
parentheses are the examples' names in docs/algorithms.md.
"""

import numpy as np
import torch

from tests.numerics.tolerance import close


def overlong_shaping(module):
    """(B5)"""
    lengths = [16000, 16384, 18432, 20480, 20481]
    values = [module.overlong_penalty(n, max_tokens=20480, buffer_tokens=4096) for n in lengths]
    close(values, [0, 0, -0.5, -1, -1])
    close(module.overlong_penalty(22528, max_tokens=20480, buffer_tokens=4096, floor=False), -1.5)


def off_policy_weights(module):
    """(B6)"""
    w = torch.tensor([0.2, 0.5, 0.9, 1, 1.8, 2, 2.5], dtype=torch.float64)
    mask = torch.ones(7, dtype=torch.bool)
    # Rounded logs, so that weights on the band's edges stay on its inside.
    old = torch.log(w).round(decimals=12)
    kwargs = {"low": 0.5 - 1e-9, "high": 2.0 + 1e-9}
    tis = module.mismatch_weights(old, torch.zeros_like(old), mask, kind="tis", **kwargs)
    close(tis.weights_T, [0.2, 0.5, 0.9, 1, 1.8, 2, 2])
    assert not tis.is_rejected_T.any()
    icepop = module.mismatch_weights(old, torch.zeros_like(old), mask, kind="icepop", **kwargs)
    close(icepop.weights_T, [0, 0.5, 0.9, 1, 1.8, 2, 0])
    assert icepop.is_rejected_T.tolist() == [True, *[False] * 5, True]


def kl_estimators(module):
    """(B7)"""
    gaps = torch.tensor([0, 0.5, -1.0], dtype=torch.float64)
    logprobs = torch.full_like(gaps, -2.0)
    close(module.kl_estimate(logprobs, logprobs + gaps, "k3"), [0, 0.148721, 0.367879])
    close(module.kl_estimate(logprobs, logprobs + gaps, "k1"), [0, -0.5, 1])
    close(module.kl_estimate(logprobs, logprobs + gaps, "k2"), [0, 0.125, 0.5])
    far = module.kl_estimate(torch.tensor([-50.0]), torch.tensor([-1.0]), "k3")
    close(far, [np.exp(10) - 11], tolerance=1e-2)


def clip_and_dual_clip_table(module):
    """(D8)"""
    ratios = torch.tensor([0.5, 0.79, 1, 1.27, 1.5, 2.9, 3.5, 6], dtype=torch.float64)
    mask = torch.ones(1, dtype=torch.bool)

    def losses(advantage):
        return [
            float(
                module.clipped_policy_loss(
                    torch.log(ratio)[None],
                    torch.zeros(1, dtype=torch.float64),
                    torch.tensor([advantage], dtype=torch.float64),
                    mask,
                    clip_low=0.2,
                    clip_high=0.28,
                    dual_clip=3.0,
                    loss_denominator=1.0,
                    num_action_tokens=1.0,
                ).loss
            )
            for ratio in ratios
        ]

    close(losses(0.6), [-0.3, -0.474, -0.6, -0.762, -0.768, -0.768, -0.768, -0.768])
    close(losses(-0.6), [0.48, 0.48, 0.6, 0.762, 0.9, 1.74, 1.8, 1.8])


def hand_checked_surrogate(module):
    """Ratios (2, 2, 1/2, 1/2), advantages (1, -1, 1, -1), and a NaN outside the mask."""
    nan = float("nan")
    logprobs = torch.tensor([2, 2, 0.5, 0.5, nan], dtype=torch.float64).log().requires_grad_()
    output = module.clipped_policy_loss(
        logprobs,
        torch.tensor([0, 0, 0, 0, nan], dtype=torch.float64),
        torch.tensor([1, -1, 1, -1, nan], dtype=torch.float64),
        torch.tensor([True] * 4 + [False]),
        clip_low=0.2,
        clip_high=0.28,
        loss_denominator=4.0,
        num_action_tokens=4.0,
    )
    output.loss.backward()
    close(output.loss.detach(), 0.255)
    close(output.metrics["clip_fraction"], 0.5)
    close(logprobs.grad, [0, 0.5, -0.125, 0, 0])


def sequence_ratio(module):
    """(B2)"""
    for log_ratios, advantage, ratio, loss in (
        ([0.02, -0.01, 0.005, -0.004], 1.2, 1.002754, -1.200480),
        ([-0.02, -0.03, 0.001, -0.004], -0.9, 0.986837, 0.899730),
    ):
        logprobs = torch.tensor(log_ratios, dtype=torch.float64)
        mask, ids = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
        mean = module.mean_log_ratio(logprobs, mask, ids, num_sequences=1)
        close(mean.exp(), [ratio])
        output = module.sequence_policy_loss(
            logprobs,
            torch.zeros(4, dtype=torch.float64),
            torch.full((4,), advantage, dtype=torch.float64),
            mask,
            ids,
            num_sequences=1,
            clip_low=3e-4,
            clip_high=4e-4,
            loss_denominator=1.0,
            num_action_tokens=4.0,
            loss_weights_T=torch.full((4,), 0.25, dtype=torch.float64),
        )
        close(output.loss, loss)


def reductions(module):
    """(B8) per-token losses [[1, 2, 3], [4]], written as logprobs of a supervised loss."""
    logprobs = -torch.tensor([1, 2, 3, 4], dtype=torch.float64)
    mask = torch.ones(4, dtype=torch.bool)
    third = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1], dtype=torch.float64)

    def loss(denominator, weights=None):
        return float(module.supervised_loss(logprobs, mask, loss_denominator=denominator, loss_weights_T=weights).loss)

    close([loss(4.0), loss(2.0, third), loss(2.0), loss(3.0)], [2.5, 3, 5, 3.333333])


def shards_add_up(module):
    """Two shards with 2 and 6 action tokens sum to the loss of one batch of 8, never to a mean of means."""
    logprobs = torch.tensor([-1.0, -1.0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    mask = torch.ones(8, dtype=torch.bool)
    parts = [
        module.supervised_loss(logprobs[part], mask[part], loss_denominator=8.0).loss
        for part in (slice(0, 2), slice(2, 8))
    ]
    close(sum(parts), 0.25)


def supervised_nan_is_inert(module):
    logprobs = torch.tensor([-1.0, float("nan")], dtype=torch.float64, requires_grad=True)
    output = module.supervised_loss(logprobs, torch.tensor([True, False]), loss_denominator=1.0)
    output.loss.backward()
    close(output.loss.detach(), 1.0)
    close(logprobs.grad, [-1, 0])
