"""The learning rate as a pure function of the step."""

import math
from dataclasses import dataclass

from megatrl.config.engines import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate of a loop step: linear warmup, then constant, linear or cosine towards min_lr.

    A pure function of the logical step, so packing, minibatches and restarts cannot move it, and a
    checkpoint needs no state of it.
    """

    config: OptimizerConfig
    num_steps: int

    def lr(self, step: int) -> float:
        """Returns the rate of `step`, counted from 1. min_lr is reached once decay_steps are done."""
        c = self.config
        if step <= c.warmup_steps:
            return c.lr * step / c.warmup_steps
        if c.decay == "constant":
            return c.lr
        decay_steps = c.decay_steps or self.num_steps
        progress = min(1.0, (step - 1 - c.warmup_steps) / max(1, decay_steps - c.warmup_steps))
        remaining = 1.0 - progress if c.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
        return c.min_lr + (c.lr - c.min_lr) * remaining
