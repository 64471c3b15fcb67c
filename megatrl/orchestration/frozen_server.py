"""A server of its own for a frozen model. It holds the same weights for the whole run; nobody publishes to it."""

import logging
import time
from pathlib import Path

from ray.util.placement_group import placement_group, remove_placement_group

from megatrl.config.recipe import Recipe
from megatrl.errors import DeadlineError, MegatrlError
from megatrl.observability.progress import waiting
from megatrl.orchestration.servers import LOOPBACK, ServerHost
from megatrl.orchestration.worker_group import WorkerGroup
from megatrl.rollout.server import ServerSpec
from megatrl.scoring.server_backend import FROZEN_VERSION

logger = logging.getLogger(__name__)


class FrozenServer:
    """One SGLang server beside the rollout's, on devices of its own, within the Ray cluster of the run."""

    def __init__(
        self, recipe: Recipe, path: Path, log_dir: Path, *, role: str, remedy: str, constrains: bool = False
    ) -> None:
        """Starts it like one of `rollout.servers` and returns once it answers.

        `role` names it in logs and errors, `remedy` says what else would do where no device is left for it.
        Raises DeadlineError where no device is free, RolloutError where it does not start.
        """
        config = recipe.rollout.servers
        gpus = float(config.tensor) if config.device == "cuda" else 0.0
        bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        begin = time.monotonic()
        self._role = role
        self._placement = placement_group([bundle])
        self._host: WorkerGroup | None = None
        try:
            if not self._placement.wait(recipe.placement.ready_timeout_s):
                raise DeadlineError(
                    f"the {role}'s server did not get {bundle} within {recipe.placement.ready_timeout_s:g} s; it needs "
                    f"devices beside those of the actor and the rollout. Add some, or {remedy}"
                )
            spec = ServerSpec(
                model_path=str(path),
                config=config,
                host=LOOPBACK if config.device == "cpu" else "0.0.0.0",
                log_path=log_dir / f"{role}-server.log",
                seed=recipe.seed,
                policy_version=FROZEN_VERSION,
                constrains=constrains,
            )
            timeout_s = config.start_timeout_s + 30
            self._host = WorkerGroup.start(
                f"{role} server",
                ServerHost,
                [(spec,)],
                placement=self._placement,
                bundles=(0,),
                cpus=1,
                gpus=gpus,
                environment={},
                timeout_s=timeout_s,
            )
            self._host.call("start")
            with waiting(f"the {role}'s server", deadline_s=timeout_s):
                self.urls: tuple[str, ...] = tuple(self._host.call("wait_ready", timeout_s=timeout_s))
        except BaseException:
            self.close()
            raise
        logger.info("%s server up url=%s seconds=%.1f", role, self.urls[0], time.monotonic() - begin)

    def close(self) -> None:
        """Ends the server and gives its devices back; idempotent."""
        if self._host is not None:
            try:
                self._host.call("stop", timeout_s=30)
            except MegatrlError as error:  # gone already: nothing is left to stop there
                logger.warning("stopping the %s's server: %s", self._role, error)
            self._host.stop()
            self._host = None
            remove_placement_group(self._placement)
