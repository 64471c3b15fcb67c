"""Success on held-out tasks, always the same ones, under a given policy version."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatrl.config.recipe import EvaluationConfig
from megatrl.data.prompts import PromptSource
from megatrl.data.trajectories import Prompt, PromptGroup
from megatrl.errors import RolloutError
from megatrl.orchestration.devices import OwnedDevices, SharedDevices
from megatrl.orchestration.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Numbers for the metrics, and the episodes behind them."""

    metrics: dict[str, float]
    groups: tuple[PromptGroup, ...] = ()

    def report_to(self, sink: Callable[[Mapping[str, float], Sequence[PromptGroup]], None]) -> None:
        """Hands metrics and episodes to a record; nothing where nothing was played."""
        if self.metrics:
            sink(self.metrics, self.groups)


class EpisodePlayer(Protocol):
    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int
    ) -> tuple[PromptGroup, ...]: ...


class Evaluator:
    """Plays `num_episodes` held-out tasks once each. Seeds do not depend on the step."""

    def __init__(
        self,
        collector: EpisodePlayer,
        source: PromptSource,
        config: EvaluationConfig,
        devices: OwnedDevices | SharedDevices,
    ) -> None:
        self._collector, self._devices = collector, devices
        self._prompts = tuple(source.prompt(i) for i in range(config.num_episodes))

    def run(self, progress: Progress) -> Evaluation:
        """Raises RolloutError where not one episode has a known outcome."""
        with self._devices.lend_to_rollout():
            groups = self._collector.collect(self._prompts, first_position=0, policy_version=progress.policy_version)
        played = [t for group in groups for t in group.trajectories]
        known = [t for t in played if t.reward is not None]
        if not known:
            raise RolloutError(
                f"evaluation: none of {len(played)} episodes has a known outcome; first: {played[0].error}"
            )
        count = len(known)
        return Evaluation(
            metrics={
                "success": sum(bool(t.success) for t in known) / count,
                "reward": sum(t.reward or 0.0 for t in known) / count,
                "turns": sum(t.num_turns for t in known) / count,
                "action_tokens": sum(t.num_action_tokens for t in known) / count,
                "episodes": float(count),
                "unknown_outcomes": float(len(played) - count),
            },
            groups=groups,
        )


class NullEvaluator:
    """For replays: nothing is sampled."""

    def run(self, progress: Progress) -> Evaluation:
        return Evaluation(metrics={})
