"""Checkpoints of a run: the actor's shards and the driver's position, saved and restored together."""

import hashlib
import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrl.checkpoint.state import DriverState, check_same_run, read_driver_state, write_driver_state
from megatrl.checkpoint.store import Checkpoint, CheckpointStore
from megatrl.config.recipe import Recipe
from megatrl.data.prompts import PromptStream
from megatrl.errors import CheckpointError, DamagedCheckpointError, DeadlineError, MegatrlError
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.journal import GroupJournal
from megatrl.orchestration.progress import Progress
from megatrl.orchestration.run_directory import identity_of

logger = logging.getLogger(__name__)

_DRIVER_STATE = "driver.json"
_ACTOR = "actor"
_IN_FLIGHT = "in_flight.jsonl"


def recipe_hash(recipe: Recipe) -> str:
    """Hash of everything that decides what a run computes; where it writes and how long it runs is left out."""
    return hashlib.sha256(json.dumps(identity_of(recipe), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is captured and not yet visible: its files are written, then it is committed."""

    step: int
    commit: Future[None] | None = None  # None while the ranks still write


@dataclass(frozen=True, slots=True)
class _Source:
    """What to resume from: found, intact, and of this run."""

    checkpoint: Checkpoint
    state: DriverState


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
        """`restore_from` is what to resume from, None for a beginning; `restore_step` None takes its newest.

        Raises CheckpointError where a resume finds no usable checkpoint, or one that another recipe or other frozen
        models made: never a silent start from step 0. Damaged ones are named in the log and skipped.
        """
        self._recipe, self._config = recipe, recipe.checkpoint
        self._actor, self._prompts = actor, prompts
        self._frozen_models = frozen_models
        self.journal = GroupJournal(directory.parent / _IN_FLIGHT, config_hash=recipe_hash(recipe))
        """Of the step that is being played; a checkpoint in the middle of a step takes its groups along."""
        self._store = CheckpointStore(
            directory, run_id=recipe.name, keep=self._config.keep, pin_every=self._config.pin_every
        )
        self._pending: _Pending | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._source = self._find(restore_from, restore_step) if restore_from is not None else None

    @property
    def resume_step(self) -> int:
        """Step of the checkpoint that `restore_latest` restores, 0 for a beginning."""
        return self._source.checkpoint.step if self._source is not None else 0

    def restore_latest(self) -> Progress:
        """Returns the progress of the checkpoint that was found, weights and optimizer restored; a new run's is 0."""
        if self._source is None:
            return Progress()
        checkpoint, state = self._source.checkpoint, self._source.state
        self._actor.load_checkpoint(checkpoint.path / _ACTOR)
        self._prompts.seek(state.prompt_position)
        progress = Progress(
            step=state.step,
            optimizer_steps=state.optimizer_step,
            policy_version=state.policy_version,
            prompt_position=state.prompt_position,
        )
        if state.in_flight:
            self.journal.adopt(checkpoint.path / _IN_FLIGHT, progress)
        logger.info("resumed step=%d policy_version=%d from %s", state.step, state.policy_version, checkpoint.path)
        return progress

    def step_done(self, progress: Progress) -> None:
        """To be called at the end of every step: completes the last save, saves where one is due.

        Raises CheckpointError, with the step that was to be saved, where the disk fails; the earlier checkpoints
        stay whole. After the last step everything is on disk when this returns.
        """
        is_last = progress.step == self._recipe.train.num_steps
        self._advance()
        if self._config.is_due(progress.step) or is_last:
            self.save(progress, in_background=self._config.asynchronous and not is_last)

    def save(self, progress: Progress, *, in_background: bool = False) -> None:
        """Writes a checkpoint that appears whole or not at all; in the background it appears at a later `step_done`.

        At most one is being written: an earlier one is completed first.
        """
        self._complete()
        step = progress.step
        directory = self._store.begin(step)
        with self._abandoning(step):
            self._capture(progress, directory, in_background)
            if not in_background:
                self._actor.finish_checkpoint(self._config.timeout_s)
                self._store.commit(step)
                return
        self._pending = _Pending(step)

    def close(self) -> None:
        """Completes a save that is under way; what goes wrong is logged, since the run is ending anyway."""
        try:
            self._complete()
        except MegatrlError as error:
            logger.error("checkpoint lost at the end of the run: %s", error.message)
        self._committer.shutdown(wait=False)
        self.journal.close()

    def _capture(self, progress: Progress, directory: Path, in_background: bool) -> None:
        in_flight = self.journal.in_flight(progress)
        if in_flight:
            self.journal.copy_to(directory / _IN_FLIGHT)
        state = DriverState(
            step=progress.step,
            optimizer_step=progress.optimizer_steps,
            prompt_position=progress.prompt_position,
            policy_version=progress.policy_version,
            config_hash=recipe_hash(self._recipe),
            num_steps=self._recipe.train.num_steps,
            frozen_models=self._frozen_models,
            in_flight=in_flight,
        )
        write_driver_state(directory / _DRIVER_STATE, state)
        actor = directory / _ACTOR
        actor.mkdir()
        self._actor.begin_checkpoint(actor, in_background=in_background, timeout_s=self._config.timeout_s)

    def _advance(self) -> None:
        """Takes a save one stage on: from written by the ranks to hashed and renamed by a thread of the driver."""
        pending = self._pending
        if pending is None:
            return
        if pending.commit is None:
            with self._abandoning(pending.step):
                self._actor.finish_checkpoint(self._config.timeout_s)
            pending.commit = self._committer.submit(self._store.commit, pending.step)
        elif pending.commit.done():
            self._settle(pending.step, pending.commit)

    def _complete(self) -> None:
        if self._pending is not None and self._pending.commit is None:
            self._advance()
        if self._pending is not None and self._pending.commit is not None:
            self._settle(self._pending.step, self._pending.commit)

    def _settle(self, step: int, commit: Future[None]) -> None:
        with self._abandoning(step):
            try:
                commit.result(timeout=self._config.timeout_s)
            except TimeoutError as error:
                raise DeadlineError(
                    f"it was not hashed and renamed within {self._config.timeout_s:g} s; raise checkpoint.timeout_s"
                ) from error
        self._pending = None

    @contextmanager
    def _abandoning(self, step: int) -> Iterator[None]:
        """Removes what was written of a checkpoint where the block raises, and names its step in the error."""
        try:
            yield
        except BaseException as error:
            is_background = self._pending is not None
            self._pending = None
            if (full := self._store.abandon(step, error)) is not None:
                raise full from error
            if is_background and isinstance(error, MegatrlError):
                raise CheckpointError(
                    f"the checkpoint of step {step} was not saved in the background: {error.message}. Intact: steps "
                    f"{list(self._store.steps())}"
                ) from error
            raise

    def _find(self, restore_from: Path, restore_step: int | None) -> _Source:
        store = CheckpointStore(restore_from, run_id=self._recipe.name, keep=self._config.keep)
        reasons: list[str] = []
        candidates = store.usable(reasons) if restore_step is None else iter([store.open(restore_step)])
        for checkpoint in candidates:
            try:
                state = _readable_state(checkpoint)
                self._actor.check_checkpoint(checkpoint.path / _ACTOR)
            except DamagedCheckpointError as error:
                logger.warning("checkpoint skipped step=%d reason=%s", checkpoint.step, error.message)
                reasons.append(error.message)
                continue
            check_same_run(state, config_hash=recipe_hash(self._recipe), frozen_models=self._frozen_models)
            self._warn_of_another_horizon(state)
            return _Source(checkpoint, state)
        if reasons:
            raise store.unusable(reasons)
        raise CheckpointError(f"nothing to resume in {restore_from}: no complete checkpoint. Start without --resume")

    def _warn_of_another_horizon(self, state: DriverState) -> None:
        optimizer, num_steps = self._recipe.actor.optimizer, self._recipe.train.num_steps
        if optimizer.decay != "constant" and optimizer.decay_steps is None and state.num_steps != num_steps:
            logger.warning(
                "train.num_steps was %d and is %d: the learning rate falls towards another last step from here on",
                state.num_steps,
                num_steps,
            )


def _readable_state(checkpoint: Checkpoint) -> DriverState:
    try:
        return read_driver_state(checkpoint.path / _DRIVER_STATE)
    except CheckpointError as error:
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {error.message}") from error


def run_config(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as JSON values, for the manifest."""
    return recipe.model_dump(mode="json")
