"""The frozen scorers on Megatron in several layouts against transformers, and the weight swap's promises."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring_case import build_meter, build_probe, group
from tiny_models import write_tiny_model
from world import free_port, run_world

from tests.fakes.frozen_models import TransformersRunner

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
TP2 = {"world_size": 2, "tensor": 2, "sequence_parallel": True}
PP2 = {"world_size": 2, "pipeline": 2}
EP2 = {"world_size": 2, "expert": 2}
PROMISES = [
    "same_weights",
    "same_storage",
    "same_random_state",
    "same_mode",
    "identity_differs",
    "twice_equal",
    "meter_change_seen",
    "restored_after_exception",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """Paths of a reference, a trained policy and a meter, and what transformers says of reference and meter."""
    base = tmp_path_factory.mktemp("scoring")
    paths = {name: str(base / name) for name in ("reference", "policy", "meter")}
    reference = write_tiny_model(base / "reference", "qwen3_moe", seed=1)
    write_tiny_model(base / "policy", "qwen3_moe", seed=2)
    meter = write_tiny_model(base / "meter", "qwen3_moe", seed=3, num_hidden_layers=2)
    probe = build_probe(TransformersRunner(reference))
    answers, _ = probe.score([group()])
    references = probe.reference_logprobs([group()])
    forecasts, _ = build_meter(TransformersRunner(meter)).score([group()])
    expected = {
        "answers": [list(score.logprobs) for score in answers.values()],
        "references": [[array.tolist() for array in arrays] for arrays in references.values()],
        "forecasts": [[[f.completion_prob, f.tokens_to_go] for f in s.forecasts] for s in forecasts.values()],
    }
    return paths, expected


def flat(nested: Any) -> list[float]:
    return [nested] if isinstance(nested, float | int) else [value for item in nested for value in flat(item)]


def test_probe_and_meter_agree_with_transformers_and_the_actor_comes_back(
    models: tuple[dict[str, str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths, expected = models
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs = [{"layout": layout, "port": free_port(), **paths} for layout in (TP2, PP2, EP2)]
    results = run_world("scoring_rank.py", 2, {"runs": runs}, tmp_path, timeout_s=180)
    largest = dict.fromkeys(expected, 0.0)
    for rank, rank_results in enumerate(results):
        for run, result in zip(runs, rank_results, strict=True):
            assert [name for name in PROMISES if not result[name]] == [], f"rank {rank} {run['layout']}"
            for name, values in expected.items():
                got, wanted = np.asarray(flat(result[name])), np.asarray(flat(values))
                assert got.shape == wanted.shape
                error = np.abs(got - wanted) / np.maximum(np.abs(wanted), 1.0)
                largest[name] = max(largest[name], float(error.max()))
                assert error.max() < TOLERANCE, f"rank {rank} {run['layout']} {name}: {error.max():.2e}"
    print("largest relative error", {name: f"{error:.1e}" for name, error in largest.items()})
