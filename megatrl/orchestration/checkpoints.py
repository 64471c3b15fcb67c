"""Checkpoints of a run: the actor's shards and the driver's position, saved and restored together."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from megatrl.checkpoint.state import DriverState, check_same_run, read_driver_state, write_driver_state
from megatrl.checkpoint.store import CheckpointStore
from megatrl.config.recipe import Recipe
from megatrl.data.prompts import PromptStream
from megatrl.errors import CheckpointError
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.progress import Progress
from megatrl.orchestration.run_directory import identity_of

logger = logging.getLogger(__name__)

_DRIVER_STATE = "driver.json"
_ACTOR = "actor"


def recipe_hash(recipe: Recipe) -> str:
    """Hash of everything that decides what a run computes; where it writes and how long it runs is left out."""
    return hashlib.sha256(json.dumps(identity_of(recipe), sort_keys=True).encode()).hexdigest()[:16]


class RunCheckpoints:
    """Saves and restores one run. Restoring is asked for; a new run starts from nothing."""

    def __init__(
        self,
        directory: Path,
        recipe: Recipe,
        *,
        actor: ActorGroup,
        prompts: PromptStream,
        frozen_models: dict[str, str],
        restore_from: Path | None,
        restore_step: int | None = None,
    ) -> None:
        """`restore_from` is what to resume from, None for a beginning; `restore_step` None takes its newest."""
        self._source = (
            CheckpointStore(restore_from, run_id=recipe.name, keep=recipe.checkpoint.keep) if restore_from else None
        )
        self._restore_step = restore_step
        self._store = CheckpointStore(directory, run_id=recipe.name, keep=recipe.checkpoint.keep)
        self._actor, self._prompts = actor, prompts
        self._config_hash = recipe_hash(recipe)
        self._frozen_models = frozen_models

    def restore_latest(self) -> Progress:
        """Returns the progress of the newest complete checkpoint, weights and optimizer restored.

        A new run gets the beginning. Raises CheckpointError where a resume finds no usable checkpoint,
        or one that another recipe or other frozen models made: never a silent start from step 0.
        """
        if self._source is None:
            return Progress()
        checkpoint = self._source.latest() if self._restore_step is None else self._source.open(self._restore_step)
        if checkpoint is None:
            raise CheckpointError(
                f"nothing to resume in {self._source.directory}: no complete checkpoint. Start without --resume"
            )
        state = read_driver_state(checkpoint.path / _DRIVER_STATE)
        check_same_run(state, config_hash=self._config_hash, frozen_models=self._frozen_models)
        self._actor.load_checkpoint(checkpoint.path / _ACTOR)
        self._prompts.seek(state.prompt_position)
        logger.info("resumed step=%d policy_version=%d from %s", state.step, state.policy_version, checkpoint.path)
        return Progress(
            step=state.step,
            optimizer_steps=state.optimizer_step,
            policy_version=state.policy_version,
            prompt_position=state.prompt_position,
        )

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint that appears whole or not at all."""
        with self._store.writing(progress.step) as directory:
            actor = directory / _ACTOR
            actor.mkdir()
            self._actor.save_checkpoint(actor)
            state = DriverState(
                step=progress.step,
                optimizer_step=progress.optimizer_steps,
                prompt_position=progress.prompt_position,
                policy_version=progress.policy_version,
                config_hash=self._config_hash,
                frozen_models=self._frozen_models,
            )
            write_driver_state(directory / _DRIVER_STATE, state)


def latest_step(directory: Path, recipe: Recipe) -> int:
    """Step of the newest complete checkpoint, 0 where there is none. Reads files only."""
    checkpoint = CheckpointStore(directory, run_id=recipe.name, keep=recipe.checkpoint.keep).latest()
    return checkpoint.step if checkpoint is not None else 0


def run_config(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as JSON values, for the manifest."""
    return recipe.model_dump(mode="json")
