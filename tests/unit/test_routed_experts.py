"""Expert choices from a server's reply to a packed microbatch: every token keeps its own."""

import asyncio
import base64
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrl.batching.flatten import flatten_groups
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.credit import LossConfig, RewardConfig
from megatrl.config.engines import RolloutConfig, ServerConfig, TinyModel
from megatrl.config.model_shape import tiny_model_shape
from megatrl.data.messages import Message
from megatrl.data.routed_experts import RoutedExperts
from megatrl.data.samples import TrainingSample
from megatrl.data.trajectories import Prompt, PromptGroup, Segment, Termination, Trajectory, TrajectoryId, Turn
from megatrl.data.wire import decode_record, encode_record, record_group
from megatrl.envs.protocol import StepResult
from megatrl.errors import RolloutError, ServerRejectedError, TrajectoryError
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.client import SGLangSampler
from megatrl.rollout.episode import play_episode
from megatrl.rollout.replies import read_reply, request_body
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.rollout.server import ServerSpec, server_arguments
from tests.fakes.episodes import ScriptedEnvironment, ScriptedReplies, tool_result
from tests.fakes.recorded_groups import make_group
from tests.fakes.sglang_stub import SGLangStub, good_reply
from tests.fakes.tiny_tokenizer import word_tokenizer

SHAPE = tiny_model_shape(TinyModel(num_layers=3, num_experts=8, num_experts_per_token=2), vocab_size=512)
REQUEST = SampleRequest(input_ids=(1, 5, 6, 7, 8, 9), max_new_tokens=6, temperature=1.0, deadline_s=10.0)


def choices_of(tokens: Any, *, salt: int = 0) -> np.ndarray:
    """[T, 3, 2] ids that a function of the tokens alone gives, so that a shifted row shows."""
    tokens = np.asarray(tokens)
    first = (tokens[:, None] + 3 * np.arange(3) + salt) % 7
    return np.stack([first, 7 - first % 2], axis=-1)


def encoded(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize("num_experts, dtype", [(8, "int8"), (128, "int8"), (129, "int16"), (512, "int16")])
def test_ids_take_one_byte_up_to_128_experts_and_come_back_unchanged(num_experts: int, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(-1, num_experts, (5, 3, 2))
    ids[0, 0, 0] = num_experts - 1
    stored = RoutedExperts.of(ids, num_experts=num_experts)
    assert stored.array.dtype == dtype
    assert (stored.array == ids).all()
    longer = stored.with_unrecorded_end()
    assert (longer.array[:-1] == ids).all()
    assert (longer.array[-1] == -1).all()
    assert (longer.with_last_of(stored).array[-1] == ids[0]).all()
    assert (stored.without_first().array == ids[1:]).all()


def test_ids_outside_the_model_and_wrong_sizes_are_refused() -> None:
    with pytest.raises(TrajectoryError, match=r"ids 0..8; the model has experts 0 to 7"):
        RoutedExperts.of(np.array([[[0, 8]]]), num_experts=8)
    with pytest.raises(TrajectoryError, match=r"hold 3 bytes, \[1, 2, 2\] in 1 bytes each need 4"):
        RoutedExperts(num_tokens=1, num_layers=2, top_k=2, item_bytes=1, data=b"abc")


def routed_reply(**changes: Any) -> bytes:
    reply = good_reply(json.loads(request_body(REQUEST, "r")), "0")
    tokens = [*REQUEST.input_ids, *reply["output_ids"]][REQUEST.first_routed : -1]
    reply["meta_info"] |= {"routed_experts": encoded(choices_of(tokens)), **changes}
    return json.dumps(reply).encode()


def test_request_asks_for_choices_only_where_they_are_recorded() -> None:
    assert "return_routed_experts" not in json.loads(request_body(REQUEST, "r"))
    body = json.loads(request_body(dataclasses.replace(REQUEST, first_routed=4), "r", record_routing=True))
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 4)


def test_a_server_records_only_where_its_spec_says_so() -> None:
    plain = ServerSpec(model_path="/m", config=ServerConfig(device="cpu"), log_path=Path("log"))
    assert "enable_return_routed_experts" not in server_arguments(plain, 1)
    recording = server_arguments(dataclasses.replace(plain, record_routing=True), 1)
    assert recording["enable_return_routed_experts"] is True


def test_a_reply_brings_a_row_for_each_token_but_the_last() -> None:
    sample = read_reply(routed_reply(), REQUEST, "r", 512, routed_shape=SHAPE)
    assert sample.routed_experts is not None
    assert (sample.routed_experts.array == choices_of([1, 5, 6, 7, 8, 9, 10, 11])).all()


@pytest.mark.parametrize(
    "experts, message",
    [
        (choices_of(range(7)), "hold 42 numbers; 8 tokens x 3 layers x 2 experts need 48"),
        (choices_of(range(8)) + 1, r"ids 1..8; the model has experts 0 to 7"),
        (choices_of(range(8)) - 1, r"ids -1..6; the model has experts 0 to 7"),
        (np.zeros((8, 3, 2)), "name one expert twice"),
    ],
)
def test_choices_of_the_wrong_shape_or_range_are_refused(experts: np.ndarray, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        read_reply(routed_reply(routed_experts=encoded(experts)), REQUEST, "r", 512, routed_shape=SHAPE)


def test_choices_that_are_not_base64_are_refused() -> None:
    with pytest.raises(RolloutError, match="not base64 of 32-bit numbers"):
        read_reply(routed_reply(routed_experts="?"), REQUEST, "r", 512, routed_shape=SHAPE)


async def test_a_server_that_does_not_record_is_an_error_at_the_first_request() -> None:
    async with SGLangStub().serve() as stub, SGLangSampler([stub.url], vocab_size=512, routed_shape=SHAPE) as sampler:
        with pytest.raises(ServerRejectedError, match="started with enable_return_routed_experts"):
            await sampler.sample(REQUEST)
    assert len(stub.bodies) == 1


class RoutedReplies(ScriptedReplies):
    """Scripted replies with choices that differ between requests, as after a prefix was computed again."""

    async def sample(self, request: SampleRequest) -> Sample:
        sample = await super().sample(request)
        tokens = [*request.input_ids, *sample.output_ids][request.first_routed : -1]
        experts = choices_of(tokens, salt=len(self.requests))
        return dataclasses.replace(sample, routed_experts=RoutedExperts.of(experts, num_experts=8))


def test_an_episode_takes_each_row_from_the_request_that_first_processed_the_token() -> None:
    renderer = Renderer(word_tokenizer(("hello", "door", "open", "key", "Action:")), 40, "chatml", "react")
    action = (*renderer.encode("Action: open door"), renderer.stop_token_ids[0])
    sampler = RoutedReplies([action, action, action])
    trajectory = asyncio.run(
        play_episode(
            ScriptedEnvironment([tool_result(), tool_result(), StepResult(done=True, reward=1.0, success=True)]),
            sampler,
            renderer,
            id=TrajectoryId(prompt_id="p", group_id="g", index=0),
            limits=RolloutConfig(tool_format="react", max_action_tokens=8, context_tokens=200),
            reward=RewardConfig(),
            policy_version=0,
            seed=0,
        )
    )
    (segment,) = trajectory.segments
    bounds = np.cumsum([0] + [len(t.observation_tokens) + len(t.action_tokens) for t in segment.turns])
    assert [request.first_routed for request in sampler.requests] == [0, bounds[1] - 1, bounds[2] - 1]
    expected = np.full((bounds[3], 3, 2), -1)
    for turn in range(3):
        first = max(0, bounds[turn] - 1)
        rows = slice(first, bounds[turn + 1] - 1)
        expected[rows] = choices_of(segment.tokens[rows], salt=turn + 1)
    assert segment.routed_experts is not None
    assert (segment.routed_experts == expected).all()


def routed_turn(observation: list[int], action: list[int], *, is_last: bool = False) -> Turn:
    experts = choices_of([*observation, *action])
    if is_last:
        experts[-1] = -1
    return Turn(
        observation_tokens=tuple(observation),
        action_tokens=tuple(action),
        behavior_logprobs=(-0.5,) * len(action),
        policy_version=0,
        routed_experts=RoutedExperts.of(experts, num_experts=8),
    )


def group_of(segments: list[Segment]) -> PromptGroup:
    trajectory = Trajectory(
        id=TrajectoryId(prompt_id="p", group_id="g", index=0),
        segments=tuple(segments),
        reward=1.0,
        success=True,
        termination=Termination.COMPLETED,
    )
    return PromptGroup(
        prompt=Prompt(prompt_id="p", task={"about": Message(role="user", content="")}, seed=0),
        group_id="g",
        trajectories=(trajectory,),
    )


def flat(group: PromptGroup) -> tuple[TrainingSample, ...]:
    (trajectory,) = group.trajectories
    return flatten_groups([group], {trajectory.id: tuple(np.ones(len(t.action_tokens)) for t in trajectory.turns)})


_tokens = st.lists(st.integers(0, 500), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(_tokens, _tokens), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(1, 3),
)
def test_packing_keeps_every_row_with_its_token(
    shapes: list[list[tuple[list[int], list[int]]]], num_ranks: int, capacity: int, num_minibatches: int
) -> None:
    segments = [
        Segment(turns=tuple(routed_turn(o, a, is_last=i == len(s) - 1) for i, (o, a) in enumerate(s))) for s in shapes
    ]
    samples = flat(group_of(segments))
    batch = pack(
        samples,
        num_data_ranks=num_ranks,
        num_minibatches=num_minibatches,
        microbatch_tokens=capacity,
        loss=LossConfig(),
    )
    batch = attach_old_logprobs(batch, {i: np.zeros(len(s.tokens)) for i, s in enumerate(samples)})
    num_rows = 0
    for microbatch in (m for b in batch.minibatches for rank in b.microbatches for m in rank):
        assert microbatch.routed_experts is not None
        expected = choices_of(microbatch.tokens)
        expected[microbatch.cu_seqlens[1:] - 1] = -1
        assert (microbatch.routed_experts == expected).all()
        num_rows += len(microbatch.tokens) if microbatch.sample_indices != (-1,) else 0
    assert num_rows == sum(len(s.tokens) for s in samples)


def test_a_hole_in_the_record_names_the_token() -> None:
    holed = routed_turn([1, 2], [3], is_last=True)  # nothing filled its last row in
    with pytest.raises(TrajectoryError, match=r"p/g/0\.0 segment 0: the expert choices of token 2 of 5 were not rec"):
        flat(group_of([Segment(turns=(holed, routed_turn([4], [5])))]))


def test_turns_and_samples_with_and_without_choices_do_not_mix() -> None:
    routed = routed_turn([1, 2], [3])
    plain = dataclasses.replace(routed, routed_experts=None)
    with pytest.raises(TrajectoryError, match="1 of the 2 turns of a segment have routed_experts"):
        flat(group_of([Segment(turns=(routed, plain))]))
    samples = flat(group_of([Segment(turns=(routed,)), Segment(turns=(plain,))]))
    with pytest.raises(TrajectoryError, match="1 of 2 samples have routed_experts"):
        pack(samples, num_data_ranks=1, num_minibatches=1, microbatch_tokens=99, loss=LossConfig())
    with pytest.raises(TrajectoryError, match="turn has 4 tokens but routed_experts for 3"):
        dataclasses.replace(routed, observation_tokens=(1, 2, 2))


def test_choices_are_stored_and_read_back_and_files_without_them_stay_readable() -> None:
    group = group_of([Segment(turns=(routed_turn([1, 2], [3] * 400),))])
    line = encode_record(record_group(group, step=1))
    assert decode_record(line, where="f:1").group == group
    body = json.loads(line)
    turn = body["group"]["trajectories"][0]["segments"][0]["turns"][0]
    assert len(turn["routed_experts"]["data"]) < 402 * 6 / 4, "rows that repeat should be compressed"
    turn["routed_experts"]["data"] = base64.b64encode(zlib.compress(b"x")).decode()
    with pytest.raises(TrajectoryError, match=r"f:1: .*hold 1 bytes"):
        decode_record(json.dumps(body), where="f:1")
    turn["routed_experts"]["data"] = "plain"
    with pytest.raises(TrajectoryError, match=r"f:1: .*data is not base64 of zlib data"):
        decode_record(json.dumps(body), where="f:1")


def test_a_file_of_wire_version_1_is_still_read() -> None:
    group = make_group()
    body = json.loads(encode_record(record_group(group, step=1)))
    for trajectory in body["group"]["trajectories"]:
        for turn in trajectory["segments"][0]["turns"]:
            del turn["routed_experts"]
    with pytest.raises(TrajectoryError, match=r"missing fields \['routed_experts'\]"):
        decode_record(json.dumps(body), where="f:1")
    assert decode_record(json.dumps(body | {"version": 1}), where="f:1").group == group
    with pytest.raises(TrajectoryError, match="f:1: record is not a group of trajectories"):
        decode_record(json.dumps({"version": 1, "group": 3}), where="f:1")
