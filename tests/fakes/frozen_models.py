"""Small exact models behind the QueryRunner protocol, a word codec, and trajectories made from words."""

import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray, IntArray
from megatrl.data.trajectories import (
    Prompt,
    PromptGroup,
    Segment,
    Termination,
    Trajectory,
    TrajectoryId,
    Turn,
)


class WordCodec:
    """Whitespace-separated words <-> ids, in the order given; unknown words are errors, unknown ids left out."""

    def __init__(self, words: Sequence[str], *, wrapper: str = "", stop: str = "<end>") -> None:
        self.words = [*dict.fromkeys([*words, *wrapper.split(), stop])]
        self._ids = {word: index for index, word in enumerate(self.words)}
        self._wrapper = wrapper
        self.stop_token_ids = (self._ids[stop],)
        self.fingerprint = f"words-{zlib.crc32(chr(10).join(self.words).encode()):08x}"

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._ids[word] for word in text.split())

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        return " ".join(self.words[i] for i in ids if i < len(self.words))

    def answer_wrapper(self) -> tuple[int, ...]:
        return self.encode(self._wrapper)


class PrefixRunner:
    """A QueryRunner from a function (whole prefix, target) -> logprob. Counts what it was asked."""

    def __init__(self, logprob: Callable[[tuple[int, ...], int], float]) -> None:
        self._logprob = logprob
        self.calls: list[tuple[PackedQueries, ...]] = []

    def __call__(self, queries: Sequence[PackedQueries]) -> list[FloatArray]:
        self.calls.append(tuple(queries))
        return [
            np.asarray([self._answer(q, int(r), int(t)) for r, t in zip(q.rows, q.targets, strict=True)])
            for q in queries
        ]

    def _answer(self, packed: PackedQueries, row: int, target: int) -> float:
        return self._logprob(tuple(path_of(packed, row)), target)

    @property
    def num_sequences(self) -> int:
        return sum(len(q.cu_seqlens) - 1 for call in self.calls for q in call)

    @property
    def temperatures(self) -> set[float]:
        """Of all questions so far."""
        return {t for call in self.calls for q in call for t in temperatures_of(q)}


def temperatures_of(packed: PackedQueries) -> list[float]:
    """Of each question."""
    return [1.0] * packed.num_questions if packed.temperatures is None else packed.temperatures.tolist()


def path_of(packed: PackedQueries, row: int) -> list[int]:
    """Every token that a row sees, itself included: of its sequence, or along its path through a forest."""
    node = int(np.searchsorted(packed.cu_seqlens, row, side="right")) - 1
    start = int(packed.cu_seqlens[node])
    own = packed.tokens[start : row + 1].tolist()
    if packed.parents is None or packed.prefix_lengths is None or packed.parents[node] < 0:
        return own
    parent = int(packed.parents[node])
    whole = path_of(packed, int(packed.cu_seqlens[parent + 1]) - 1)
    return whole[: int(packed.prefix_lengths[node])] + own


class TransformersRunner:
    """A QueryRunner over a transformers causal model: one plain forward for each sequence, float64 softmax."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self, queries: Sequence[PackedQueries]) -> list[FloatArray]:
        results = []
        for packed in queries:
            result = np.full(packed.num_questions, np.nan)
            temperatures = np.asarray(temperatures_of(packed))
            for start, end in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True):
                mine = (packed.rows >= start) & (packed.rows < end)
                for temperature in np.unique(temperatures[mine]):
                    logprobs = next_token_logprobs(self._model, packed.tokens[start:end].tolist(), float(temperature))
                    these = mine & (temperatures == temperature)
                    result[these] = logprobs[packed.rows[these] - start, packed.targets[these]].numpy()
            results.append(result)
        return results


def next_token_logprobs(model: torch.nn.Module, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[T, vocabulary] float64: row t is the distribution of the token after tokens[:t+1]."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0].double()
    return torch.log_softmax(logits / temperature, dim=-1)


def make_trajectory(
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    index: int = 0,
    prompt_id: str = "p",
    group_id: str = "g",
    reward: float | None = 1.0,
    success: bool | None = None,
    termination: Termination = Termination.COMPLETED,
    gold_answers: tuple[str, ...] = (),
    trailing: Sequence[int] = (),
    segment_starts: Sequence[int] = (),
    observation_keys: Sequence[str] = (),
) -> Trajectory:
    """A trajectory from (observation ids, action ids) pairs; `segment_starts` are turns that open a segment."""
    bounds = [0, *segment_starts, len(turns)]
    segments = [
        Segment(
            turns=tuple(
                Turn(
                    observation_tokens=tuple(observation),
                    action_tokens=tuple(action),
                    behavior_logprobs=(-0.5,) * len(action),
                    policy_version=0,
                    observation_key=observation_keys[place] if observation_keys else "",
                )
                for place, (observation, action) in enumerate(turns[start:end], start=start)
            ),
            trailing_observation_tokens=tuple(trailing) if end == len(turns) else (),
        )
        for start, end in pairwise(bounds)
    ]
    if success is None and reward is not None:
        success = reward >= 1.0
    return Trajectory(
        id=TrajectoryId(prompt_id=prompt_id, group_id=group_id, index=index),
        segments=tuple(segments),
        reward=reward,
        success=success,
        termination=termination,
        gold_answers=gold_answers,
    )


def make_group(*trajectories: Trajectory) -> PromptGroup:
    """One prompt group around trajectories that share their ids' prompt and group."""
    first = trajectories[0].id
    prompt = Prompt(prompt_id=first.prompt_id, task={}, seed=0)
    return PromptGroup(prompt=prompt, group_id=first.group_id, trajectories=trajectories)
