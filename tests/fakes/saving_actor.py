"""An actor that saves a number instead of weights."""

from dataclasses import dataclass, field
from pathlib import Path

from megatrl.errors import CheckpointError, DamagedCheckpointError


@dataclass
class SavingActor:
    """`value` is its state. What happens to it between begin and finish must not reach the disk."""

    value: int = 0
    finish_error: CheckpointError | None = None
    refuses: CheckpointError | None = None  # of every checkpoint: this run does not fit
    begun: list[Path] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    _captured: tuple[Path, int] | None = None

    def begin_checkpoint(self, directory: Path, *, in_background: bool, timeout_s: float) -> None:
        assert self._captured is None, "one save at a time"
        self._captured = (directory, self.value)
        self.begun.append(directory)

    def finish_checkpoint(self, timeout_s: float) -> None:
        assert self._captured is not None
        (directory, value), self._captured = self._captured, None
        self.timeouts.append(timeout_s)
        if self.finish_error is not None:
            raise self.finish_error
        (directory / "value").write_text(str(value))

    def check_checkpoint(self, directory: Path) -> None:
        if self.refuses is not None:
            raise self.refuses
        if not (directory / "value").read_text().isdecimal():
            raise DamagedCheckpointError(f"actor state in {directory} is damaged: value is no number")

    def load_checkpoint(self, directory: Path) -> None:
        self.value = int((directory / "value").read_text())
