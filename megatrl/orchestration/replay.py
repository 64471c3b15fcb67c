"""Recorded trajectories in the place of a rollout: the same loop, without a server."""

from collections.abc import Sequence

from megatrl.batching.selection import DroppedGroup
from megatrl.data.prompts import PromptStream
from megatrl.data.wire import GroupRecord
from megatrl.errors import TrajectoryError
from megatrl.observability.trajectories import TrajectoryStore
from megatrl.orchestration.filling import FilledBatch


class RecordedRollout:
    """Gives the groups of each stored step, in order, as if they had just been played."""

    def __init__(self, store: TrajectoryStore, first_step: int) -> None:
        self._store = store
        self._step = first_step

    def fill(self, prompts: PromptStream, policy_version: int) -> FilledBatch:
        """Returns the stored step's batch and takes the same prompts from the stream.

        Raises TrajectoryError where the step is not stored, where the stream gives other prompts than
        were played, or where the step was sampled from another policy version.
        """
        records = self._store.read(self._step)
        taken = sorted(prompt.prompt_id for prompt in prompts.take(len(records)))
        played = sorted(record.group.prompt.prompt_id for record in records)
        if taken != played:
            raise TrajectoryError(
                f"step {self._step} was played on other prompts ({played[:3]}…) than this recipe takes ({taken[:3]}…); "
                "replay a run with its own recipe and seed"
            )
        _check_version(records, policy_version, self._step)
        self._step += 1
        return FilledBatch(
            kept=tuple(record.group for record in records if not record.dropped),
            dropped=tuple(DroppedGroup(group=r.group, reason=r.dropped) for r in records if r.dropped),
            rounds=1,
        )


def _check_version(records: Sequence[GroupRecord], policy_version: int, step: int) -> None:
    versions = {turn.policy_version for r in records for t in r.group.trajectories for turn in t.turns}
    if versions - {policy_version}:
        raise TrajectoryError(
            f"step {step} was sampled from policy versions {sorted(versions)}, the replay is at {policy_version}; "
            "start the replay at a checkpoint of the same run"
        )
