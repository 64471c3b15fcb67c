"""The meter as a scorer: how many tokens each state still has to go, read from candidate answers.

Every answer the meter could give is teacher-forced after `header + history + question`. With a the
answers of completion (one for each grid value T_a), f the answer of failure, and the token at which
they part called the bit:

    p(completion) = p(bit_a) / (p(bit_a) + p(bit_f))
    tokens_to_go  = sum_a w_a T_a,   w = softmax over a of the logprob of a's tokens after the bit

There is nothing to parse and one forward pass is enough.
"""

import math
from collections.abc import Sequence

from megatrl.data.meter_prompt import MeterPrompt
from megatrl.data.scores import Forecast
from megatrl.data.states import segment_tokens, shortened_history
from megatrl.errors import ScoringError
from megatrl.rendering.retokenize import TrajectoryView
from megatrl.scoring.branches import BranchBackend, BranchLogprobs, CandidatePlan, TrunkQuery, plan_candidates
from megatrl.scoring.group_meter import AskedStates, GroupMeter, StateForecasts


class AnswerReadout:
    """Turns the candidates' logprobs at one state into a Forecast."""

    def __init__(self, prompt: MeterPrompt) -> None:
        """Raises ScoringError where failure and completion do not part at one and the same token."""
        failure, *completions = [answer.tokens for answer in prompt.answers]
        bit = _common_length(failure, completions[0])
        leads = {answer[: bit + 1] for answer in completions if len(answer) > bit}
        if len(failure) <= bit or len(leads) != 1 or any(len(answer) <= bit for answer in completions):
            raise ScoringError(
                "the meter's answers do not tell completion from failure at one token; check the answer format "
                f"and the tokenizer (failure {list(failure)}, first completion {list(completions[0])})"
            )
        self._bit = bit
        self._grid = prompt.grid
        # The failure answer is read up to the bit only; its rest cannot change the forecast.
        self.plan: CandidatePlan = plan_candidates(
            prompt.question,
            [answer.tokens for answer in prompt.answers],
            is_wanted=lambda candidate, token: candidate > 0 or token <= bit,
        )

    def forecast(self, results: Sequence[BranchLogprobs]) -> Forecast:
        """The forecast from the results of `plan.branches` at one state."""
        failure, *completions = self.plan.read(results)
        no, yes = failure[self._bit], completions[0][self._bit]
        completion_prob = 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
        logits = [math.fsum(answer[self._bit + 1 :]) for answer in completions]
        top = max(logits)
        weights = [math.exp(logit - top) for logit in logits]
        tokens_to_go = math.fsum(w * t for w, t in zip(weights, self._grid, strict=True)) / math.fsum(weights)
        return Forecast(
            is_valid=True,
            completion=completion_prob >= 0.5,
            completion_prob=completion_prob,
            tokens_to_go=tokens_to_go,
        )


class CandidateMeter(GroupMeter):
    """A frozen meter behind a BranchBackend."""

    def __init__(
        self,
        *,
        prompt: MeterPrompt,
        backend: BranchBackend,
        failure_cost: float,
        policy_fingerprint: str,
        max_sequence_tokens: int,
        with_terminal: bool = False,
        view: TrajectoryView | None = None,
    ) -> None:
        """Raises ScoringError when the trajectories' token ids, or those of `view`, are of another tokenizer."""
        super().__init__(
            prompt=prompt,
            failure_cost=failure_cost,
            policy_fingerprint=policy_fingerprint,
            with_terminal=with_terminal,
            view=view,
        )
        self._backend = backend
        self._max_history = max_sequence_tokens - prompt.num_extra_tokens
        self._readout = AnswerReadout(prompt)

    def forecast_states(self, asked: Sequence[AskedStates]) -> StateForecasts:
        """One forward pass over all of it. Collective over the backend."""
        queries: list[TrunkQuery] = []
        places: list[list[tuple[int, int] | None]] = []  # [item][state] -> (query, boundary)
        shortened = 0
        for item in asked:
            item_places, num_shortened = self._ask(item, queries)
            places.append(item_places)
            shortened += num_shortened
        results = self._backend.score(queries)
        invalid = Forecast(is_valid=False)
        return StateForecasts(
            forecasts=tuple(
                tuple(
                    invalid if place is None else self._readout.forecast(results[place[0]][place[1]])
                    for place in item_places
                )
                for item_places in places
            ),
            num_shortened=shortened,
        )

    def _ask(self, item: AskedStates, queries: list[TrunkQuery]) -> tuple[list[tuple[int, int] | None], int]:
        """Append the queries of one trajectory's states; returns where each state's answer will be."""
        header, branches = self._prompt.header, self._readout.plan.branches
        places: list[tuple[int, int] | None] = [None] * len(item.states)
        num_shortened = 0
        for index, segment in enumerate(item.trajectory.segments):
            boundaries: list[int] = []
            trunk_number = len(queries)
            alone: list[tuple[int, TrunkQuery]] = []
            for place, state in enumerate(item.states):
                if state.segment_index != index:
                    continue
                if state.length <= self._max_history:
                    places[place] = (trunk_number, len(boundaries))
                    boundaries.append(len(header) + state.length)
                    continue
                num_shortened += 1
                history = shortened_history(segment, state.length, self._max_history)
                if history is not None:  # no prefix of the trunk: it is asked about on its own
                    trunk = header + history
                    query = TrunkQuery(trunk=trunk, boundaries=(len(trunk),), branches=(branches,))
                    alone.append((place, query))
            if boundaries:
                trunk = header + segment_tokens(segment)[: max(boundaries) - len(header)]
                queries.append(
                    TrunkQuery(trunk=trunk, boundaries=tuple(boundaries), branches=(branches,) * len(boundaries))
                )
            for place, query in alone:
                places[place] = (len(queries), 0)
                queries.append(query)
        return places, num_shortened


def _common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Number of leading tokens that two sequences share."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
