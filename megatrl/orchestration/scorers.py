"""The frozen models as the loop sees them: one object, whatever the credit rule needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatrl.algorithms.advantages import groups_needing_meter
from megatrl.config.credit import CreditConfig, GroupStatisticsConfig
from megatrl.data.samples import FloatArray
from megatrl.data.scores import AnswerScore, MeterScore, Scores
from megatrl.data.trajectories import PromptGroup, TrajectoryId

SegmentLogprobs = Mapping[TrajectoryId, tuple[FloatArray, ...]]


class AnswerProbe(Protocol):
    """Scores and metrics; metrics are shares over the batch."""

    def score(
        self, groups: Sequence[PromptGroup]
    ) -> tuple[Mapping[TrajectoryId, AnswerScore], Mapping[str, float]]: ...


class MeterScorer(Protocol):
    @property
    def failure_cost(self) -> float | None: ...

    def score(self, groups: Sequence[PromptGroup]) -> tuple[Mapping[TrajectoryId, MeterScore], Mapping[str, float]]: ...


class ReferencePolicy(Protocol):
    def reference_logprobs(self, groups: Sequence[PromptGroup]) -> SegmentLogprobs | None: ...


class NullProbe:
    """For credit rules that ask for no answers: touches no device."""

    def score(self, groups: Sequence[PromptGroup]) -> tuple[Mapping[TrajectoryId, AnswerScore], Mapping[str, float]]:
        return {}, {}


class NullMeter:
    """For credit rules that ask for no forecasts."""

    failure_cost: float | None = None

    def score(self, groups: Sequence[PromptGroup]) -> tuple[Mapping[TrajectoryId, MeterScore], Mapping[str, float]]:
        return {}, {}


class NullReference:
    """For losses without a KL term."""

    def reference_logprobs(self, groups: Sequence[PromptGroup]) -> None:
        return None


@dataclass(slots=True, kw_only=True)
class Scorers:
    """Asks each frozen model for what the step needs; `metrics` holds what they reported last."""

    answers: AnswerProbe
    meter: MeterScorer
    reference: ReferencePolicy
    credit: CreditConfig
    group_statistics: GroupStatisticsConfig
    metrics: dict[str, float] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    """Ends what the frozen models hold beside the actor's ranks."""

    def score(self, groups: Sequence[PromptGroup]) -> Scores:
        """Answers for every group, forecasts only where the group's advantages are not all zero."""
        answers, answer_metrics = self.answers.score(groups)
        needing = groups_needing_meter(groups, credit=self.credit, group_statistics=self.group_statistics)
        forecasts, meter_metrics = self.meter.score(needing)
        self.metrics = {**answer_metrics, **meter_metrics}
        return Scores(answers=answers, meter=forecasts, failure_cost=self.meter.failure_cost)

    def reference_logprobs(self, groups: Sequence[PromptGroup]) -> SegmentLogprobs | None:
        """Reference logprobs of the policy's own tokens for the KL term, None where the loss has none."""
        return self.reference.reference_logprobs(groups)
