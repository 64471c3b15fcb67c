"""DriverState: what the loop itself has to remember, as JSON."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrl.checkpoint.atomic import write_text_atomically
from megatrl.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """The driver's position in a run, captured when the save begins."""

    step: int
    """Steps of the loop that are done."""
    optimizer_step: int
    prompt_position: int
    """Prompts taken from the stream so far."""
    policy_version: int
    """Restored on resume: a server that started again at 0 would look outdated for ever."""
    config_hash: str
    num_steps: int
    """Horizon of the learning rate where decay_steps is null; the rest of its state follows from `step`."""
    frozen_models: Mapping[str, str] = field(default_factory=dict)
    """Role (meter, reference probe) -> hash of its weights."""
    in_flight: tuple[str, ...] = ()
    """Ids of groups of the next step that are played already and stored beside this; none at a step's boundary."""

    def __post_init__(self) -> None:
        for name in ("step", "optimizer_step", "prompt_position", "policy_version", "num_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CheckpointError(f"driver state has {name}={value!r}; it is an integer that counts from 0")


def write_driver_state(path: Path, state: DriverState) -> None:
    """Write the state to a file."""
    write_text_atomically(path, json.dumps(dataclasses.asdict(state), indent=1))


def read_driver_state(path: Path) -> DriverState:
    """The state in a file. Raises CheckpointError naming missing and unknown fields."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"driver state {path} is not readable: {error}") from error
    known = {entry.name for entry in dataclasses.fields(DriverState)}
    if not isinstance(content, dict) or set(content) != known:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"driver state {path} has fields {found}, expected {sorted(known)}")
    return DriverState(**{**content, "in_flight": tuple(content["in_flight"])})


def check_same_run(state: DriverState, *, config_hash: str, frozen_models: Mapping[str, str]) -> None:
    """Raise CheckpointError, listing every difference, where resuming would not continue the same run."""
    problems: list[str] = []
    if state.config_hash != config_hash:
        problems.append(f"config hash was {state.config_hash}, is {config_hash}")
    for role in sorted({*state.frozen_models, *frozen_models}):
        was, now = state.frozen_models.get(role, "absent"), frozen_models.get(role, "absent")
        if was != now:
            problems.append(f"frozen model {role} was {was}, is {now}")
    if problems:
        raise CheckpointError(
            f"the checkpoint of step {state.step} was made by a different run: {'; '.join(problems)}. "
            "Resume with the recipe and models it was made with, or give the new run another name"
        )
