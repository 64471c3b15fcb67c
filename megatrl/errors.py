"""Every error megatrl raises on purpose. A message says what, seen, allowed and remedy.

All of them survive pickling, so an error raised in a Ray worker arrives at the driver as itself.
"""


class MegatrlError(Exception):
    """Base of the family. The single argument is the whole message."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(MegatrlError):
    """A recipe or an override is wrong; lists every violation at once."""


class LayoutError(MegatrlError):
    """Parallel degrees do not fit the model or the number of processes."""


class ModelError(MegatrlError):
    """Model files are missing, of an unknown family, or disagree with their config."""


class TrajectoryError(MegatrlError):
    """Recorded tokens, masks and logprobs of a trajectory contradict each other."""


class EnvironmentFault(MegatrlError):
    """An environment failed for a reason that says nothing about the policy."""


class RolloutError(MegatrlError):
    """A rollout server did not start, died, or answered something unusable."""


class ServerRejectedError(RolloutError):
    """The server refused one request for a permanent reason (4xx); never retried."""


class ScoringError(MegatrlError):
    """A frozen scorer produced a value that cannot be used."""


class WeightSyncError(MegatrlError):
    """Published weights did not arrive, or were refused on our side before sending."""


class CheckpointError(MegatrlError):
    """A checkpoint is missing, torn, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """One checkpoint is unusable in itself, whatever reads it: an older one may do."""


class NonFiniteError(MegatrlError):
    """A loss, a gradient norm or a logprob is NaN or infinite."""


class DeviceMemoryError(MegatrlError):
    """Device memory was used while it was lent to others, or did not come back as it was."""


class EmptyBatchError(MegatrlError):
    """No trajectory survived selection, so there is nothing to learn from."""


class DeadlineError(MegatrlError):
    """A wait ran past its deadline; the message says what was waited for."""


class Terminated(BaseException):
    """SIGTERM: end in order, children first. No error, like KeyboardInterrupt, so that nothing takes it for one."""
