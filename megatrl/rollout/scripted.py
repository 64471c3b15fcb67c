"""ScriptedSampler: the environment's own scripted policy in the place of a model."""

import random

from megatrl.data.trajectories import FinishReason
from megatrl.envs.protocol import Demonstrator
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.sampler import Sample, SampleRequest


class ScriptedSampler:
    """A Sampler for one episode of an environment that demonstrates.

    Its actions have logprob 0: it is no model, and what it did is never trained on with a policy
    loss, only by supervised fine-tuning.
    """

    def __init__(
        self,
        env: Demonstrator,
        rng: random.Random,
        renderer: Renderer,
        *,
        detour: float,
        premature: float,
        policy_version: int = 0,
    ) -> None:
        self._env = env
        self._rng = rng
        self._renderer = renderer
        self._detour = detour
        self._premature = premature
        self._policy_version = policy_version

    async def sample(self, request: SampleRequest) -> Sample:
        """The next demonstrated action and the end of turn, cut like a sampled one where it is too long."""
        text = self._env.demonstration(self._rng, detour=self._detour, premature=self._premature)
        ids = (*self._renderer.encode(text), self._renderer.stop_token_ids[0])
        is_cut = len(ids) > request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        return Sample(
            output_ids=ids,
            logprobs=(0.0,) * len(ids),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            policy_version=self._policy_version,
        )
