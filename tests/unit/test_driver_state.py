"""What the driver remembers across a restart."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatrl.checkpoint.state import (
    DriverState,
    check_same_run,
    read_driver_state,
    write_driver_state,
)
from megatrl.errors import CheckpointError


def make(**changes: object) -> DriverState:
    state = DriverState(
        step=40,
        optimizer_step=80,
        prompt_position=640,
        policy_version=40,
        config_hash="c0ffee",
        frozen_models={"meter": "aa", "reference_probe": "bb"},
        num_steps=100,
        in_flight=("640", "643"),
    )
    return dataclasses.replace(state, **changes)  # pyright: ignore[reportArgumentType]


def test_state_comes_back_equal(tmp_path: Path) -> None:
    write_driver_state(tmp_path / "state.json", make())
    assert read_driver_state(tmp_path / "state.json") == make()


@pytest.mark.parametrize("field", ["step", "optimizer_step", "prompt_position", "policy_version", "num_steps"])
@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_counters_are_non_negative_integers(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        make(**{field: value})


@pytest.mark.parametrize("content", ["", "[]", '{"step": 1}', None])
def test_unreadable_states_are_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_driver_state(tmp_path / "state.json")


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(make()) | {"stepp": 1}))
    with pytest.raises(CheckpointError, match="stepp"):
        read_driver_state(tmp_path / "state.json")


def test_resuming_the_same_run_is_accepted() -> None:
    check_same_run(make(), config_hash="c0ffee", frozen_models={"reference_probe": "bb", "meter": "aa"})


def test_every_difference_to_the_run_is_listed() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_same_run(make(), config_hash="dead", frozen_models={"meter": "xx", "judge": "cc"})
    for part in ("config hash was c0ffee, is dead", "meter was aa, is xx", "reference_probe was bb, is absent",
                 "judge was absent, is cc"):  # fmt: skip
        assert part in caught.value.message
