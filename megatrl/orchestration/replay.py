"""Recorded trajectories in the place of a rollout: the same loop, without a server."""

from collections.abc import Sequence

from megatrl.batching.selection import DroppedGroup
from megatrl.data.prompts import PromptStream
from megatrl.data.wire import GroupRecord
from megatrl.errors import TrajectoryError
from megatrl.observability.trajectories import TrajectoryStore
from megatrl.orchestration.filling import FilledBatch
from megatrl.orchestration.progress import Progress


class RecordedRollout:
    """Gives the groups of each stored step, in order, as if they had just been played."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store

    def fill(self, prompts: PromptStream, progress: Progress) -> FilledBatch:
        """Returns the stored step's batch and takes the same prompts from the stream.

        Raises TrajectoryError where the step is not stored, where the stream gives other prompts than
        were played, or where the step was sampled from another policy version.
        """
        step = progress.step + 1
        records = self._store.read(step)
        taken = sorted(prompt.prompt_id for prompt in prompts.take(len(records)))
        played = sorted(record.group.prompt.prompt_id for record in records)
        if taken != played:
            raise TrajectoryError(
                f"step {step} was played on other prompts ({played[:3]}…) than this recipe takes ({taken[:3]}…); "
                "replay a run with its own recipe and seed"
            )
        _check_version(records, progress.policy_version, step)
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
