"""Supervised fine-tuning on the actor's own ranks: the same packing, the same optimizer, another loss."""

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatrl.batching.packing import pack
from megatrl.config.credit import LossConfig
from megatrl.config.recipe import SFTConfig
from megatrl.data.samples import TrainingSample
from megatrl.errors import EmptyBatchError
from megatrl.observability.progress import ProgressDisplay
from megatrl.orchestration.actor_group import ActorGroup

logger = logging.getLogger(__name__)


def supervise(
    actor: ActorGroup,
    samples: Sequence[TrainingSample],
    config: SFTConfig,
    *,
    microbatch_tokens: int,
    seed: int,
    title: str,
) -> float:
    """Takes `config.num_steps` SFT steps on `samples`; returns the mean loss of the last tenth of them.

    The caller has loaded the weights and a fresh optimizer. Loss on the action mask only, token-mean.
    Raises EmptyBatchError where no sample has a target token.
    """
    trainable = [s for s in samples if s.num_action_tokens]
    if not trainable:
        raise EmptyBatchError(f"{title}: none of {len(samples)} samples has a target token; nothing would be learned")
    order = _endless_order(len(trainable), seed)
    losses: list[float] = []
    display = ProgressDisplay(config.num_steps, title=title)
    try:
        for step in range(1, config.num_steps + 1):
            # Weight 1 everywhere: `pack` leaves out samples without an advantage.
            chosen = [trainable[next(order)] for _ in range(config.sequences_per_step)]
            weighted = [replace(s, advantages=s.action_mask.astype(np.float64)) for s in chosen]
            batch = pack(
                weighted,
                num_data_ranks=actor.num_data_ranks,
                num_minibatches=1,
                microbatch_tokens=microbatch_tokens,
                loss=LossConfig(),
            )
            losses.append(actor.supervise(batch, step).metrics["loss"])
            display.update(step, {"loss": losses[-1]})
    finally:
        display.close()
    tail = losses[-max(1, len(losses) // 10) :]
    logger.info("%s steps=%d loss=%.4f -> %.4f", title, len(losses), losses[0], sum(tail) / len(tail))
    return sum(tail) / len(tail)


def _endless_order(count: int, seed: int) -> Iterator[int]:
    """Indices in a new order for each epoch, as a function of the seed."""
    rng = random.Random(seed)
    indices = list(range(count))
    while True:
        rng.shuffle(indices)
        yield from indices
