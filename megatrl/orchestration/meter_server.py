"""A server of its own for a meter that answers in words."""

from pathlib import Path

from megatrl.config.recipe import Recipe
from megatrl.orchestration.frozen_server import FrozenServer


class MeterServer(FrozenServer):
    """It constrains what it samples; otherwise any frozen model's server."""

    def __init__(self, recipe: Recipe, path: Path, log_dir: Path) -> None:
        super().__init__(
            recipe,
            path,
            log_dir,
            role="meter",
            remedy="use credit.readout: candidates, which reads the meter on the actor's ranks",
            constrains=True,
        )
