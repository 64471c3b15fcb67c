"""The meter as a scorer that answers in words: a short greedy decode on a server with its weights, read strictly.

    header + history + question  ->  {"completion": 1, "tokens_to_go": 330}

What the candidates readout computes, this one says: its bit is 0 or 1 without a probability, its number is one
number, and an answer may be unreadable. The paper's readout (spec 2.3).
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from megatrl.data.meter_answer import ANSWER_PATTERN, parse_answer
from megatrl.data.meter_prompt import MeterPrompt
from megatrl.data.scores import Forecast
from megatrl.data.states import shortened_history
from megatrl.data.trajectories import FinishReason
from megatrl.errors import RolloutError
from megatrl.rendering.renderer import Renderer
from megatrl.rendering.retokenize import TrajectoryView
from megatrl.rollout.sampler import Sampler, SampleRequest
from megatrl.scoring.group_meter import AskedStates, GroupMeter, StateForecasts

MAX_ANSWER_TOKENS = 32
_CONCURRENT_TRAJECTORIES = 64


class DecodeMeter(GroupMeter):
    """A frozen meter behind servers that hold its weights and constrain what they sample."""

    def __init__(
        self,
        *,
        prompt: MeterPrompt,
        renderer: Renderer,
        samplers: Callable[[], AbstractAsyncContextManager[Sampler]],
        failure_cost: float,
        policy_fingerprint: str,
        max_sequence_tokens: int,
        request_timeout_s: float,
        with_terminal: bool = False,
        view: TrajectoryView | None = None,
    ) -> None:
        """`renderer` is the meter's own; `samplers` opens a client of the servers inside an event loop.

        Raises ScoringError when the trajectories' token ids, or those of `view`, are of another tokenizer.
        """
        super().__init__(
            prompt=prompt,
            failure_cost=failure_cost,
            policy_fingerprint=policy_fingerprint,
            with_terminal=with_terminal,
            view=view,
        )
        self._renderer, self._samplers = renderer, samplers
        self._max_history = max_sequence_tokens - prompt.num_extra_tokens
        self._request_timeout_s = request_timeout_s

    def forecast_states(self, asked: Sequence[AskedStates]) -> StateForecasts:
        """Must not be called from inside an event loop. Raises RolloutError where a server does not answer."""
        if not asked:
            return StateForecasts(forecasts=(), num_shortened=0)
        try:
            return asyncio.run(self._forecast_all(asked))
        except* RolloutError as group:
            raise _first(group) from group

    async def _forecast_all(self, asked: Sequence[AskedStates]) -> StateForecasts:
        gate = asyncio.Semaphore(_CONCURRENT_TRAJECTORIES)
        async with (
            self._samplers() as sampler,
            asyncio.TaskGroup() as tasks,
        ):

            async def one(item: AskedStates) -> tuple[tuple[Forecast, ...], int]:
                async with gate:
                    return await self._forecast(sampler, item)

            running = [tasks.create_task(one(item)) for item in asked]
        results = [task.result() for task in running]
        return StateForecasts(
            forecasts=tuple(forecasts for forecasts, _ in results), num_shortened=sum(count for _, count in results)
        )

    async def _forecast(self, sampler: Sampler, item: AskedStates) -> tuple[tuple[Forecast, ...], int]:
        """One state after the other: each finds the history of the one before it in the server's cache."""
        forecasts: list[Forecast] = []
        num_shortened = 0
        for state in item.states:
            history = shortened_history(item.trajectory.segments[state.segment_index], state.length, self._max_history)
            num_shortened += history is None or len(history) < state.length
            if history is None:
                forecasts.append(Forecast(is_valid=False))
                continue
            request = SampleRequest(
                input_ids=(*self._prompt.header, *history, *self._prompt.question),
                max_new_tokens=MAX_ANSWER_TOKENS,
                temperature=0.0,
                stop_token_ids=self._renderer.stop_token_ids,
                pattern=ANSWER_PATTERN,
                deadline_s=self._request_timeout_s,
                routing_key=str(item.trajectory.id),
            )
            sample = await sampler.sample(request)
            # An answer that was cut may hold a whole object by chance; only one that ended is an answer.
            has_ended = sample.finish_reason is FinishReason.STOP
            text = self._renderer.action_text(sample.output_ids)
            forecasts.append(parse_answer(text) if has_ended else Forecast(is_valid=False))
        return tuple(forecasts), num_shortened


def _first(group: BaseExceptionGroup[RolloutError]) -> RolloutError:
    """The first error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RolloutError)
    return error
