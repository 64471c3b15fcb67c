"""How far a run has come: the small immutable state that a checkpoint stores beside the weights."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    step: int = 0  # finished passes of the main loop
    optimizer_steps: int = 0
    policy_version: int = 0  # generation of the weights that the servers hold
    prompt_position: int = 0  # prompts taken from the stream so far

    def advance(self, *, optimizer_steps: int, prompt_position: int) -> "Progress":
        """The progress after one more step: one more policy version, whatever was learned."""
        return replace(
            self,
            step=self.step + 1,
            optimizer_steps=self.optimizer_steps + optimizer_steps,
            policy_version=self.policy_version + 1,
            prompt_position=prompt_position,
        )
