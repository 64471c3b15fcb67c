"""The meter as a scorer: how many tokens each state still has to go, read from candidate answers.

Every answer the meter could give is teacher-forced after `header + history + question`. With a the
answers of completion (one for each grid value T_a), f the answer of failure, and the token at which
they part called the bit:

    p(completion) = p(bit_a) / (p(bit_a) + p(bit_f))
    tokens_to_go  = sum_a w_a T_a,   w = softmax over a of the logprob of a's tokens after the bit

There is nothing to parse and one forward pass is enough.
"""

import math
from collections.abc import Mapping, Sequence

from megatrl.data.meter_prompt import MeterPrompt
from megatrl.data.scores import Forecast, MeterScore
from megatrl.data.states import State, segment_tokens, shortened_history, trajectory_states, transcript_end
from megatrl.data.trajectories import PromptGroup, Trajectory, TrajectoryId
from megatrl.errors import ScoringError
from megatrl.scoring.branches import BranchBackend, BranchLogprobs, CandidatePlan, TrunkQuery, plan_candidates


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


class CandidateMeter:
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
    ) -> None:
        """Raises ScoringError when the trajectories' token ids come from another tokenizer."""
        if prompt.tokenizer_fingerprint != policy_fingerprint:
            raise ScoringError(
                f"the meter's tokenizer is {prompt.tokenizer_fingerprint} but the policy's is {policy_fingerprint}; "
                "token ids would mean other words. A meter with another tokenizer is refused in this version: "
                "train one from the policy's own model family"
            )
        self._prompt = prompt
        self._backend = backend
        self.failure_cost: float | None = failure_cost
        """The meter's own C in tokens."""
        self._max_history = max_sequence_tokens - prompt.num_extra_tokens
        self._with_terminal = with_terminal
        self._readout = AnswerReadout(prompt)

    def score(self, groups: Sequence[PromptGroup]) -> tuple[dict[TrajectoryId, MeterScore], dict[str, float]]:
        """Forecasts at s_1..s_K, and after the last action where asked for; and shares for the metrics.

        Histories that do not fit lose their middle turns, as in the meter's training set; where even
        the task and the last observation do not fit, the forecast is invalid. Pass only groups whose
        advantages are not all zero: the others need no forecast. Collective over the backend.
        """
        trajectories = [t for group in groups for t in group.trajectories if t.is_trainable]
        queries: list[TrunkQuery] = []
        places: list[list[tuple[int, int] | None]] = []  # [trajectory][state] -> (query, boundary)
        shortened = 0
        for trajectory in trajectories:
            states = [state for state in trajectory_states(trajectory) if state.turn_index < trajectory.num_turns]
            if self._with_terminal:
                states.append(transcript_end(trajectory))
            trajectory_places, num_shortened = self._ask(trajectory, states, queries)
            places.append(trajectory_places)
            shortened += num_shortened

        results = self._backend.score(queries)
        invalid = Forecast(is_valid=False)
        scores: dict[TrajectoryId, MeterScore] = {}
        for trajectory, trajectory_places in zip(trajectories, places, strict=True):
            forecasts = [
                invalid if place is None else self._readout.forecast(results[place[0]][place[1]])
                for place in trajectory_places
            ]
            terminal = forecasts.pop() if self._with_terminal else None
            scores[trajectory.id] = MeterScore(forecasts=tuple(forecasts), terminal=terminal)
        total = sum(len(p) for p in places)
        return scores, self._metrics(scores, shortened / max(total, 1))

    def _ask(
        self, trajectory: Trajectory, states: Sequence[State], queries: list[TrunkQuery]
    ) -> tuple[list[tuple[int, int] | None], int]:
        """Append the queries of one trajectory's states; returns where each state's answer will be."""
        header, branches = self._prompt.header, self._readout.plan.branches
        places: list[tuple[int, int] | None] = []
        num_shortened = 0
        for index, segment in enumerate(trajectory.segments):
            boundaries: list[int] = []
            trunk_number = len(queries)
            extra: list[TrunkQuery] = []
            for state in (s for s in states if s.segment_index == index):
                if state.length <= self._max_history:
                    places.append((trunk_number, len(boundaries)))
                    boundaries.append(len(header) + state.length)
                    continue
                num_shortened += 1
                history = shortened_history(segment, state.length, self._max_history)
                if history is None:
                    places.append(None)
                    continue
                # A shortened history is no prefix of the trunk; it is asked about on its own. States are
                # in rising order, so the shared trunk, if any, comes before all of these.
                trunk = header + history
                places.append((trunk_number + bool(boundaries) + len(extra), 0))
                extra.append(TrunkQuery(trunk=trunk, boundaries=(len(trunk),), branches=(branches,)))
            if boundaries:
                trunk = header + segment_tokens(segment)[: boundaries[-1] - len(header)]
                queries.append(
                    TrunkQuery(trunk=trunk, boundaries=tuple(boundaries), branches=(branches,) * len(boundaries))
                )
            queries.extend(extra)
        return places, num_shortened

    @staticmethod
    def _metrics(scores: Mapping[TrajectoryId, MeterScore], shortened: float) -> dict[str, float]:
        forecasts = [forecast for score in scores.values() for forecast in score.forecasts]
        total = max(len(forecasts), 1)
        valid = [forecast for forecast in forecasts if forecast.is_valid]
        return {
            "meter/invalid": (len(forecasts) - len(valid)) / total,
            "meter/shortened": shortened,
            "meter/forecast_failure": sum(not forecast.completion for forecast in valid) / max(len(valid), 1),
        }


def _common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Number of leading tokens that two sequences share."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
