"""The oracle: plain transformers + torch AdamW, one sequence at a time, one process.

Nothing of Megatron, of `mcore` or of the loss code under test is used. A case is a model directory, the
samples of one step (two minibatches), and what the oracle says about them.
"""

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB_SIZE, Kind, write_tiny_model
from torch import Tensor

from megatrl.config.credit import ClippedLoss, LossConfig, OffPolicyConfig
from megatrl.data.samples import FloatArray, IntArray, TrainingSample
from megatrl.data.trajectories import TrajectoryId

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 0.01, (0.9, 0.95), 1e-3, 0.1, 0.5
TEMPERATURE = 0.7
LOSS = LossConfig(
    policy=ClippedLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    kl_coefficient=0.05,
    entropy_coefficient=0.02,
    off_policy=OffPolicyConfig(kind="tis", high=2.0),
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the oracle computed, under Hugging Face names."""

    logprobs: list[FloatArray]  # [T] of each sample before the update
    losses: list[float]  # of each minibatch
    grad_norms: list[float]
    parameters: dict[str, Tensor]  # after two optimizer steps
    final_logprobs: list[FloatArray]  # [T, V] of each sample after the update, temperature 1
    router: dict[str, float] = field(default_factory=dict)  # metrics of auxiliary losses


@dataclass(frozen=True, kw_only=True)
class Case:
    model_path: str
    samples: tuple[TrainingSample, ...]
    old_logprobs: dict[int, FloatArray]
    num_minibatches: int
    expected: Expected


def make_case(
    directory: Path,
    kind: Kind,
    *,
    num_samples: int = 8,
    num_minibatches: int = 2,
    length: int | None = None,
    **overrides: Any,
) -> Path:
    """Returns the file of a case for a tiny model; lengths are heavy-tailed, or all `length`."""
    model_path = directory / "model"
    model = write_tiny_model(model_path, kind, **overrides)
    rng = np.random.default_rng(3)
    lengths = np.minimum(6 + (rng.pareto(1.2, num_samples) * 6).astype(int), 60)
    tokens = [rng.integers(0, VOCAB_SIZE, length or n) for n in lengths]
    logprobs = [_row_logprobs(model, t)[0].detach() for t in tokens]
    samples = tuple(_sample(i, t, p.numpy(), rng) for i, (t, p) in enumerate(zip(tokens, logprobs, strict=True)))
    old = {i: p.numpy() + 0.3 * rng.standard_normal(len(p)) for i, p in enumerate(logprobs)}
    losses, grad_norms = _train(model, samples, old, num_minibatches)
    final_path = directory / "final"
    model.save_pretrained(final_path)
    from safetensors.torch import load_file

    expected = Expected(
        logprobs=[p.double().numpy() for p in logprobs],
        losses=losses,
        grad_norms=grad_norms,
        parameters=load_file(final_path / "model.safetensors"),
        final_logprobs=[_all_logprobs(model, t).detach().double().numpy() for t in tokens],
    )
    case = Case(
        model_path=str(model_path),
        samples=samples,
        old_logprobs=old,
        num_minibatches=num_minibatches,
        expected=expected,
    )
    file = directory / "case.pickle"
    file.write_bytes(pickle.dumps(case))
    return file


def reordered(case: Case) -> Case:
    """The same minibatches with their members in another order."""
    order = [*range(case.num_minibatches, len(case.samples)), *range(case.num_minibatches)]
    return replace(
        case,
        samples=tuple(case.samples[i] for i in order),
        old_logprobs={new: case.old_logprobs[old] for new, old in enumerate(order)},
        expected=replace(
            case.expected,
            logprobs=[case.expected.logprobs[i] for i in order],
            final_logprobs=[case.expected.final_logprobs[i] for i in order],
        ),
    )


def _sample(index: int, tokens: IntArray, logprobs: FloatArray, rng: np.random.Generator) -> TrainingSample:
    mask = rng.random(len(tokens)) < 0.5
    mask[0], mask[-1] = False, True
    noise = 0.3 * rng.standard_normal((2, len(tokens)))
    return TrainingSample(
        trajectory_id=TrajectoryId(prompt_id="p", group_id="g", index=index),
        segment_index=0,
        tokens=tokens,
        action_mask=mask,
        behavior_logprobs=np.where(mask, logprobs + noise[0], 0.0),
        advantages=np.where(mask, rng.standard_normal(len(tokens)), 0.0),
        reference_logprobs=logprobs + noise[1],
    )


def _row_logprobs(model: Any, tokens: IntArray) -> tuple[Tensor, Tensor]:
    """Token-aligned logprobs at the sampling temperature and entropies, [T] each, 0 at the first token."""
    ids = torch.from_numpy(tokens)
    table = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    zero = torch.zeros(1)
    return torch.cat([zero, table.gather(1, ids[1:, None])[:, 0]]), torch.cat([zero, entropy])


def _all_logprobs(model: Any, tokens: IntArray) -> Tensor:
    return model(torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1)


def _train(
    model: Any, samples: tuple[TrainingSample, ...], old: dict[int, FloatArray], num_minibatches: int
) -> tuple[list[float], list[float]]:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for first in range(num_minibatches):
        members = range(first, len(samples), num_minibatches)
        num_tokens = sum(samples[i].num_action_tokens for i in members)
        optimizer.zero_grad()
        total = 0.0
        for i in members:
            loss = _loss(model, samples[i], old[i]) / num_tokens
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms


def _loss(model: Any, sample: TrainingSample, old_logprobs: FloatArray) -> Tensor:
    mask = torch.from_numpy(sample.action_mask)
    logprobs, entropy = (x[mask] for x in _row_logprobs(model, sample.tokens))
    old, behavior, reference, advantage = (
        torch.from_numpy(x).float()[mask]
        for x in (old_logprobs, sample.behavior_logprobs, sample.reference_logprobs, sample.advantages)
    )
    ratio = (logprobs - old).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    loss = torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss)
    loss = loss * (old - behavior).exp().clamp(max=2.0)
    drift = reference - logprobs
    kl = drift.exp() - drift - 1.0
    return (loss + LOSS.kl_coefficient * kl - LOSS.entropy_coefficient * entropy).sum()
