"""Saved on one layout and continued on another: the same run, up to the order of sums."""

from typing import Any

import pytest
from oracle import make_case
from world import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # one fixture starts every process

LIMIT = 1e-5  # relative, after three further steps in fp32

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"world_size": 2, "tensor": 2, "sequence_parallel": True},
    "pp2": {"world_size": 2, "pipeline": 2},
    "ep2": {"world_size": 2, "expert": 2},
    "dp2": {"world_size": 2},
    "pp2 vpp2": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"world_size": 2, "context": 2},
    "tp2 pp2": {"world_size": 4, "tensor": 2, "pipeline": 2, "sequence_parallel": True},
    "pp2 ep2": {"world_size": 4, "pipeline": 2, "expert": 2},
}
# In this order: a load needs its save, and each row is one start of that many processes.
WORLDS: tuple[tuple[int, tuple[str, ...], tuple[tuple[str, str], ...]], ...] = (
    (1, ("one",), ()),
    (
        2,
        ("tp2", "pp2", "ep2", "dp2", "pp2 vpp2"),
        (
            ("one", "ep2"),
            ("tp2", "pp2"),
            ("pp2", "ep2"),
            ("ep2", "dp2"),
            ("dp2", "tp2"),
            ("pp2 vpp2", "tp2"),
            ("ep2", "pp2 vpp2"),
            ("tp2", "cp2"),
        ),
    ),
    (1, (), (("tp2", "one"), ("ep2", "one"), ("pp2 vpp2", "one"))),
    (4, (), (("ep2", "tp2 pp2"), ("one", "pp2 ep2"))),
)
PAIRS = [pair for _, _, loads in WORLDS for pair in loads]


@pytest.fixture(scope="module")
def deviations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """ "from -> to" -> what each rank found."""
    home = tmp_path_factory.mktemp("reshard")
    case = make_case(home / "moe", "qwen3_moe")
    found: dict[str, list[dict[str, float]]] = {}
    for number, (world_size, saves, loads) in enumerate(WORLDS):
        for name in saves:
            (home / name).mkdir()
        arguments = {
            "case": str(case),
            "home": str(home),
            "saves": {name: LAYOUTS[name] for name in saves},
            "loads": [(source, target, LAYOUTS[target]) for source, target in loads],
        }
        ranks = run_world("reshard_rank.py", world_size, arguments, home / f"world{number}", timeout_s=300)
        for name in ranks[0]:
            found[name] = [rank[name] for rank in ranks]
    return found


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_run_continued_on_another_layout_is_the_same_run(
    deviations: dict[str, list[dict[str, float]]], source: str, target: str
) -> None:
    for rank in deviations[f"{source} -> {target}"]:
        assert rank["moments"] == 0.0, "what was saved is what is there, before any step"
        assert rank["loss"] < LIMIT
        assert rank["grad_norm"] < LIMIT
        assert rank["parameters"] < LIMIT
