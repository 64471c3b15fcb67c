"""A frozen meter chooses among candidate actions: the one after which it expects the least remaining work.

A candidate is scored after the action and before its observation, without being carried out: on the tokens of
the turns so far, the observation and the action as it was sampled, as meter data with `cut: after_action` has them.

    cost_j = C where failure is forecast or nothing can be read, else min(max(tokens to go, 0), C)
    choice = the first j with the smallest cost

Episodes ask whenever they are ready; what is asked while the meter works is scored together next.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from megatrl.algorithms.deltattg import forecast_cost, select_action
from megatrl.data.scores import Forecast
from megatrl.data.states import State, segment_tokens
from megatrl.data.trajectories import Segment, Termination, Trajectory, TrajectoryId
from megatrl.errors import DeadlineError, MegatrlError
from megatrl.rollout.sampler import Sample
from megatrl.rollout.selection import Situation, turn_of
from megatrl.scoring.group_meter import AskedStates, StateForecasts

logger = logging.getLogger(__name__)


class ForecastsStates(Protocol):
    """The part of a GroupMeter that is needed. Called from a worker thread, one call at a time."""

    def forecast_states(self, asked: Sequence[AskedStates]) -> StateForecasts: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    asked: tuple[AskedStates, ...]
    answer: "asyncio.Future[tuple[Forecast, ...]]"


@dataclass(slots=True)
class ChoiceTally:
    """What the meter was asked."""

    calls: int = 0
    choices: int = 0
    states: int = 0
    invalid: int = 0  # states whose answer could not be read
    all_at_failure_cost: int = 0  # choices without a difference to choose by

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "choice/calls": float(self.calls),
            "choice/choices_per_call": self.choices / max(self.calls, 1),
            "choice/invalid": self.invalid / max(self.states, 1),
            "choice/all_at_failure_cost": self.all_at_failure_cost / max(self.choices, 1),
        }


class MeterChooser:
    """A Chooser for all concurrent episodes. The meter must read the policy's own token ids."""

    def __init__(
        self,
        meter: ForecastsStates,
        *,
        failure_cost: float,
        timeout_s: float,
        max_choices_per_call: int = 64,
        gather_s: float = 0.02,
    ) -> None:
        """`failure_cost` is C in tokens; `timeout_s` is the longest wait for one choice, its queue included.

        An idle meter waits `gather_s` for other episodes that are ready at about the same time.
        """
        self._meter, self._failure_cost = meter, failure_cost
        self._timeout_s, self._max_choices, self._gather_s = timeout_s, max_choices_per_call, gather_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meter")
        self._waiting: list[_Waiting] = []
        self._serving: asyncio.Task[None] | None = None
        self.tally = ChoiceTally()

    async def choose(self, situation: Situation, candidates: Sequence[Sample]) -> int:
        """Raises what the meter raises, and DeadlineError past the deadline."""
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving.done() or self._serving.get_loop() is not loop:
            self._waiting = []  # what an earlier event loop left there has nobody waiting for it
            self._serving = loop.create_task(self._serve())
        waiting = _Waiting(tuple(asked_about(situation, sample) for sample in candidates), loop.create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                forecasts = await waiting.answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"the meter did not score {len(candidates)} candidate actions within {self._timeout_s:g} s; "
                f"{len(self._waiting)} choices wait for it"
            ) from None
        costs = [forecast_cost(forecast, self._failure_cost) for forecast in forecasts]
        self.tally.choices += 1
        self.tally.states += len(costs)
        self.tally.invalid += sum(not forecast.is_valid for forecast in forecasts)
        self.tally.all_at_failure_cost += min(costs) >= self._failure_cost
        return select_action(costs)

    def close(self) -> None:
        """Lets go of the thread once its call is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        """Answers until nobody waits. There is no await between the last look and the end, so nobody is missed."""
        await asyncio.sleep(self._gather_s)
        while self._waiting:
            batch = [item for item in self._waiting[: self._max_choices] if not item.answer.done()]
            del self._waiting[: self._max_choices]
            if not batch:
                continue
            asked = [state for item in batch for state in item.asked]
            self.tally.calls += 1
            try:
                call = asyncio.get_running_loop().run_in_executor(self._thread, self._meter.forecast_states, asked)
                forecasts = iter([one for (one,) in (await call).forecasts])
            except Exception as error:  # whoever waits gets it, one episode or all of them
                if not isinstance(error, MegatrlError):
                    logger.exception("the meter failed")
                _fail(batch, error)
                continue
            for item in batch:
                answers = tuple(next(forecasts) for _ in item.asked)
                if not item.answer.done():
                    item.answer.set_result(answers)


def asked_about(situation: Situation, candidate: Sample) -> AskedStates:
    """The state after a candidate and before anything answers it."""
    turns = (*situation.turns, turn_of(situation.observation_tokens, candidate))
    segment = Segment(turns=turns)
    # One id for all candidates of an episode: a server keeps its history in one place.
    id = TrajectoryId(prompt_id=situation.request.routing_key, group_id="candidate", index=0)
    trajectory = Trajectory(id=id, segments=(segment,), reward=None, success=None, termination=Termination.COMPLETED)
    state = State(segment_index=0, turn_index=len(turns), length=len(segment_tokens(segment)))
    return AskedStates(trajectory=trajectory, states=(state,))


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for item in batch:
        if not item.answer.done():
            item.answer.set_exception(error)
