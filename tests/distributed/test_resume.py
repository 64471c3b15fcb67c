"""A run that is saved and continued takes bit for bit the steps of the run that was not interrupted."""

from pathlib import Path
from typing import Any

import pytest
from oracle import make_case
from world import free_port, run_world

pytestmark = pytest.mark.slow


def run_of(case: Path, out: Path, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "case": str(case),
        "source": str(case.parent / "model"),
        "out": str(out),
        "layout": layout,
        "ports": [free_port() for _ in range(10)],
        **more,
    }


@pytest.fixture(scope="module")
def moe_case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("moe"), "qwen3_moe")


DAMAGES = {
    "no shard": "shards/__0_0.distcp is missing",
    "cut shard": "shards/__0_0.distcp is cut at",
    "cut index": "the index shards/.metadata is missing or not readable",
    "other shards": "belongs to another save",
    "other shard": "shards/__0_0.distcp belongs to another save",
    "no generators": "rank-00000.pt (random generators) is missing",
    "other generators": "rank-00000.pt belongs to another save",
    "no description": "holds no actor state (actor.json is missing)",
    "no moments": "it has weights but no optimizer moments",
}


def assert_resumes_exactly(result: dict[str, Any]) -> None:
    whole = result["uninterrupted"]
    assert len({entry["hash"] for entry in whole}) == 4, "every step has to move the weights"
    assert result["resumed_at_2"] == whole[2:]
    assert result["resumed_at_0"] == whole[:2]


def test_one_process_resumes_bitwise_and_says_what_it_cannot_resume(moe_case: Path, tmp_path: Path) -> None:
    runs = [
        run_of(moe_case, tmp_path / "distributed", {}, refused={"other precision": {"precision": "bf16"}}),
        run_of(moe_case, tmp_path / "plain", {}, distributed=False, background=True),
        run_of(moe_case, tmp_path / "bf16", {}, precision="bf16"),
    ]
    for directory in ("distributed", "plain", "bf16"):
        (tmp_path / directory).mkdir()
    (results,) = run_world("resume_rank.py", 1, {"runs": runs}, tmp_path / "world", timeout_s=240)
    for result in results:
        assert_resumes_exactly(result)
        weights_only = result["weights_only"][0]
        assert weights_only["hash"] != result["uninterrupted"][2]["hash"], "moments make a difference"
    assert "saved with actor.precision=fp32, this run has bf16" in results[0]["other precision"]


def test_two_processes_resume_bitwise_and_change_between_tensor_and_pipeline(moe_case: Path, tmp_path: Path) -> None:
    tensor = {"world_size": 2, "tensor": 2, "sequence_parallel": True}
    pipeline = {"world_size": 2, "pipeline": 2}
    as_pipeline = {"tensor": 1, "pipeline": 2, "sequence_parallel": False}
    expert = {"world_size": 2, "expert": 2}
    runs = [
        run_of(moe_case, tmp_path / "expert", expert, background=True, resharded={"one expert rank": {"expert": 1}}),
        run_of(moe_case, tmp_path / "tensor", tensor, resharded={"as pipeline": as_pipeline}),
        run_of(moe_case, tmp_path / "pipeline", pipeline, damaged=True),
    ]  # fmt: skip
    for directory in ("expert", "tensor", "pipeline"):
        (tmp_path / directory).mkdir()
    ranks = run_world("resume_rank.py", 2, {"runs": runs}, tmp_path / "world", timeout_s=280)
    for results in ranks:
        for result in results:
            assert_resumes_exactly(result)
            assert result["weights_only"][0]["hash"] != result["uninterrupted"][2]["hash"]
        # One rank's disk fails or is late: all ranks say so, and none waits for another.
        assert "are not all written after" in results[0]["late"]
        assert "did not write the actor's state" in results[0]["failed"]
    assert "rank 0: Worker failure: [Errno 20] Not a directory" in ranks[0][0]["failed"]
    assert ranks[1][0]["failed"].endswith("another rank failed")
    for results in ranks:
        for name, reason in DAMAGES.items():
            assert results[2]["damaged"][name].startswith("DamagedCheckpointError"), results[2]["damaged"][name]
            assert reason in results[2]["damaged"][name]
            assert "AFTER CHANGING WEIGHTS" not in results[2]["damaged"][name]
        # Another layout sums in another order, so equal up to rounding.
        for result, name in ((results[0], "one expert rank"), (results[1], "as pipeline")):
            for resumed, wanted in zip(result[name], result["uninterrupted"][2:], strict=True):
                assert resumed["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
                assert resumed["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
