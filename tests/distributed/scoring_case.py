"""What the scoring tests ask of every runner: one group of trajectories, a probe and a meter over it."""

import numpy as np
from tiny_models import VOCAB_SIZE

from megatrl.data.trajectories import PromptGroup
from megatrl.meter.prompt import MeterText, build_meter_prompt
from megatrl.scoring.independent import IndependentBackend, QueryRunner
from megatrl.scoring.meter import CandidateMeter
from megatrl.scoring.reference_probe import ReferenceProbe
from tests.fakes.frozen_models import WordCodec, make_group, make_trajectory

GRID = (1, 2, 5, 12, 30)
CODEC = WordCodec(
    ["<answer>", "header", "how", "red", "blue", '{"completion":', "0,", "1,", '"tokens_to_go":', "null}"]
    + [f"{value}}}" for value in GRID],
    wrapper="<answer>",
)


def group() -> PromptGroup:
    """Three trajectories of ragged turns, one with two segments, one with a trailing observation."""
    rng = np.random.default_rng(5)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCAB_SIZE, rng.integers(1, most)).tolist())

    def turns(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(ids(9), ids(6)) for _ in range(count)]

    return make_group(
        make_trajectory(turns(4), index=0, gold_answers=("red",)),
        make_trajectory(turns(3), index=1, gold_answers=("blue red blue",), segment_starts=[2]),
        make_trajectory(turns(2), index=2, gold_answers=("red blue",), trailing=ids(9), reward=0.0),
    )


def build_probe(runner: QueryRunner) -> ReferenceProbe:
    return ReferenceProbe(
        codec=CODEC,
        backend=IndependentBackend(runner=runner, microbatch_tokens=37),
        max_sequence_tokens=256,
        policy_temperature=0.7,
    )


def build_meter(runner: QueryRunner) -> CandidateMeter:
    return CandidateMeter(
        prompt=build_meter_prompt(CODEC, GRID, MeterText(header="header", question="how")),
        backend=IndependentBackend(runner=runner, microbatch_tokens=53),
        failure_cost=40.0,
        policy_fingerprint=CODEC.fingerprint,
        max_sequence_tokens=256,
    )
