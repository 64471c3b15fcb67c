"""Frozen scorers on a real SGLang server: it says what a plain forward pass and the tree say, and its cache shares."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.config.engines import ActorConfig, LayoutConfig
from megatrl.mcore.queries import target_logprobs
from megatrl.meter.prompt import MeterText, build_meter_prompt
from megatrl.rollout.control import ServerControl
from megatrl.rollout.ports import free_port
from megatrl.rollout.server import RolloutServer
from megatrl.scoring.backends import server_backend
from megatrl.scoring.branches import BranchBackend, TrunkQuery, answer_branch
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.meter import CandidateMeter
from megatrl.scoring.reference_probe import ReferenceProbe
from megatrl.scoring.server_backend import FROZEN_VERSION, ServerBackend
from megatrl.scoring.tree import TreeBackend
from tests.fakes.frozen_models import TransformersRunner, WordCodec, make_group, make_trajectory
from tests.fakes.random_trees import random_trees

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 512
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server(sglang_server: RolloutServer) -> Iterator[ServerBackend]:
    """The session's server under a frozen model's version, put back afterwards."""
    with ServerControl(sglang_server.url) as control:
        version = control.weight_version()
        control.update_weight_version(str(FROZEN_VERSION))
        control.flush_cache()
        yield server_backend([sglang_server.url], VOCABULARY, request_timeout_s=120.0)
        control.update_weight_version(version)


@pytest.fixture(scope="module")
def independent(tiny_moe_path: Path) -> BranchBackend:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_path, dtype=torch.float32).eval()
    return IndependentBackend(runner=TransformersRunner(model), microbatch_tokens=4096)


@pytest.fixture(scope="module")
def tree(tiny_moe_path: Path) -> Iterator[BranchBackend]:
    """Megatron on the same weights, one process."""
    actor = ActorConfig(layout=LayoutConfig(), precision="fp32", device="cpu", timeout_s=60.0)
    spec = WorkerSpec(
        rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), actor=actor,
        model_path=str(tiny_moe_path), seed=1, num_steps=1,
    )  # fmt: skip
    worker = ActorWorker(spec)
    yield TreeBackend(runner=lambda packs: target_logprobs(worker.models, worker.layout, packs), microbatch_tokens=4096)
    worker.close()


def flat(results: Any) -> np.ndarray:
    def values(node: Any) -> list[float]:
        return [node] if isinstance(node, float) else [value for part in node for value in values(part)]

    return np.asarray(values(results))


def test_the_three_backends_agree_on_random_trunks_and_the_cache_shares(
    server: ServerBackend, independent: BranchBackend, tree: BranchBackend
) -> None:
    """A group with a common prompt and a lone trunk; boundaries at 0 and the end; empty, short and long branches."""
    asked = [query for seed in (3, 4) for query in random_trees(seed, vocabulary=VOCABULARY)]
    answers = {"server": server, "independent": independent, "tree": tree}
    seen = {name: flat(backend.score(asked)) for name, backend in answers.items()}
    largest = {name: float(np.abs(seen[name] - seen["independent"]).max()) for name in ("server", "tree")}
    print(len(seen["server"]), "logprobs, largest difference to transformers", largest, server.reuse)
    assert max(largest.values()) <= TOLERANCE
    assert seen["independent"].std() > 0.05, "the answers hardly differ, so agreement would prove nothing"
    assert server.reuse.share == 1.0
    assert server.reuse.num_requests == len(asked) + sum(len(here) for q in asked for here in q.branches)


def test_a_long_trajectory_costs_its_tokens_once(server: ServerBackend, independent: BranchBackend) -> None:
    rng = np.random.default_rng(0)
    trunk = tuple(rng.integers(3, VOCABULARY, 600).tolist())
    boundaries = tuple(range(40, 601, 40))
    branch = answer_branch((5, 6), (7, VOCABULARY - 1, 8))
    query = TrunkQuery(trunk=trunk, boundaries=boundaries, branches=((branch,),) * len(boundaries))
    got, expected = flat(server.score([query])), flat(independent.score([query]))
    assert np.abs(got - expected).max() <= TOLERANCE
    assert server.reuse.prompt_tokens == 600 + sum(n + 5 for n in boundaries)
    assert server.reuse.cached == sum(boundaries)  # every prefix, whole, out of the cache


def test_the_probe_gives_the_same_answers_and_policy_tokens_through_a_server(
    server: ServerBackend, independent: BranchBackend
) -> None:
    codec = WordCodec([f"w{i}" for i in range(40)], wrapper="w30 w31")
    rng = np.random.default_rng(1)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCABULARY, rng.integers(1, most)).tolist())

    prompt = ids(30)
    members = [
        make_trajectory(
            [(prompt, ids(9)), (ids(12), ids(9)), (ids(12), ids(9))],
            index=index,
            gold_answers=("w3", "w4 w5"),
            trailing=ids(9) if index else (),
            segment_starts=[2] if index == 2 else (),
        )
        for index in range(4)
    ]
    group = make_group(*members)
    read = []
    for backend in (server, independent):
        probe = ReferenceProbe(
            codec=codec, backend=backend, max_sequence_tokens=1000, use_aliases=True, reads_policy=True
        )
        answers, _ = probe.score([group])
        policy = probe.reference_logprobs([group])
        values = [list(score.logprobs) for score in answers.values()]
        read.append(flat([values, [[a.tolist() for a in arrays] for arrays in policy.values()]]))
    assert np.abs(read[0] - read[1]).max() <= TOLERANCE
    assert np.abs(read[1]).max() > 1


def test_this_server_ignores_the_temperature_of_given_tokens_which_is_why_only_1_is_asked(
    sglang_server: RolloutServer,
) -> None:
    def given(temperature: float) -> list[float]:
        body = {
            "input_ids": [7, 8, 9, 10, 11],
            "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = httpx.post(f"{sglang_server.url}/generate", json=body, timeout=60, trust_env=False).json()
        return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]

    assert given(0.5) == given(1.0)


def test_a_meters_candidates_read_the_same_through_a_server(server: ServerBackend, independent: BranchBackend) -> None:
    answers = ('{"completion":', "0,", "1,", '"tokens_to_go":', "null}", "3}", "20}", "100}")
    codec = WordCodec([*(f"w{i}" for i in range(30)), *answers, "header", "how"])
    prompt = build_meter_prompt(codec, (3, 20, 100), MeterText(header="header", question="how"))
    group = make_group(*(make_trajectory([((7, 8, 9), (10 + i, 11)), ((12,), (13, i))], index=i) for i in range(3)))
    read = []
    for backend in (server, independent):
        meter = CandidateMeter(
            prompt=prompt,
            backend=backend,
            failure_cost=200.0,
            policy_fingerprint=codec.fingerprint,
            max_sequence_tokens=500,
        )
        scores, _ = meter.score([group])
        read.append([(f.completion_prob, f.tokens_to_go / 100) for score in scores.values() for f in score.forecasts])
    assert np.abs(np.asarray(read[0]) - np.asarray(read[1])).max() <= TOLERANCE
    assert len(read[0]) == 6
