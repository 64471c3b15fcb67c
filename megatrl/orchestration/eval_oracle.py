"""An oracle that chooses among candidate actions: an upper bound for studies, in environments that know the way.

It carries every candidate out on a copy of the environment, which a meter never does.
"""

import copy
from collections.abc import Callable, Sequence

from megatrl.algorithms.deltattg import select_action
from megatrl.data.trajectories import FinishReason
from megatrl.rendering.renderer import Renderer, ToolFormatName
from megatrl.rendering.tool_calls import parse_action
from megatrl.rollout import environment_calls
from megatrl.rollout.sampler import Sample
from megatrl.rollout.selection import Situation

_FAILED = 1e9  # tokens; more than any plan has


class OracleChooser:
    """A Chooser by the tokens of the best plan after each candidate; failure where too few turns are left for it."""

    def __init__(
        self,
        plan: Callable[[str], tuple[str, ...]],
        renderer: Renderer,
        *,
        tool_format: ToolFormatName,
        max_turns: int,
    ) -> None:
        """`plan` gives the texts of the best actions from a state's observation key to the end."""
        self._plan, self._renderer = plan, renderer
        self._tool_format: ToolFormatName = tool_format
        self._max_turns = max_turns

    async def choose(self, situation: Situation, candidates: Sequence[Sample]) -> int:
        return select_action([await self._cost(situation, candidate) for candidate in candidates])

    async def _cost(self, situation: Situation, candidate: Sample) -> float:
        if candidate.finish_reason is FinishReason.LENGTH:  # it would not be carried out
            return _FAILED
        assert situation.env is not None, "an oracle needs the environment of the episode"
        env = copy.deepcopy(situation.env)
        action = parse_action(self._renderer.action_text(candidate.output_ids), self._tool_format)
        result = await environment_calls.step(env, action)
        if result.done:
            return 0.0 if result.success else _FAILED
        plan = self._plan(result.observation_key)
        if len(plan) > self._max_turns - len(situation.turns) - 1:
            return _FAILED
        return float(sum(len(self._renderer.encode(text)) + 1 for text in plan))
