"""The trackers we know: wandb and TensorBoard. Both are imported only where one is used."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

ONLINE_TIMEOUT_S = 60.0


class WandbTracker:
    """One wandb run for each start of ours; a resumed run is a linked one in the same wandb group.

    wandb drops points whose own step does not grow, and a resumed offline run overwrites what it
    had. So every start is a run of its own, and `step` is an ordinary field used as the x axis.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: Literal["offline", "online"],
        name: str,
        resume_step: int = 0,
        run_config: Mapping[str, Any] | None = None,
        project: str = "megatrl",
    ) -> None:
        """Connects. An unreachable service is no error: the run is then kept offline, for `wandb sync`."""
        import wandb

        started = f"{name}@{resume_step}" if resume_step else name
        common = {
            "dir": str(run_dir),
            "project": project,
            "name": started,
            "group": name,
            "config": {**(run_config or {}), "resumed_from_step": resume_step},
        }
        if mode == "online" and not wandb.api.api_key:
            # Asked to connect without a key, wandb would prompt for one on the terminal.
            logger.warning("wandb has no API key (`wandb login`); keeping this run offline")
            mode = "offline"
        try:
            self._run = wandb.init(**common, mode=mode, settings=_settings(wandb))
        except Exception as error:
            # wandb raises its own UsageError, CommError and others for one and the same missing network.
            if mode == "offline":
                raise
            logger.warning("wandb is not reachable (%s); keeping this run offline", f"{error!r}"[:300])
            self._run = wandb.init(**common, mode="offline", settings=_settings(wandb))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def _settings(wandb: Any) -> Any:
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_stats=True,
        init_timeout=ONLINE_TIMEOUT_S,
        login_timeout=ONLINE_TIMEOUT_S,
        # After this long wandb gives up sending; the local copy remains.
        finish_timeout=ONLINE_TIMEOUT_S,
        finish_timeout_raises=False,
    )


class TensorBoardTracker:
    """Scalar events under `run_dir/tensorboard`, written without torch or TensorFlow."""

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        if resume_step:
            # Tells TensorBoard to hide what an earlier start logged from this step on.
            status = SessionLog(status=SessionLog.SessionStatus.START)
            start = Event(step=resume_step + 1, wall_time=time.time(), session_log=status)
            self._writer.add_event(start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
