"""The frozen reference of a run: the start policy, swapped into the actor's module or on a server of its own."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrl.config.credit import TraceCredit
from megatrl.config.model_shape import read_model_shape
from megatrl.config.recipe import Recipe
from megatrl.mcore.weights_directory import DESCRIPTION, is_weights_directory
from megatrl.observability.label_store import file_hash
from megatrl.orchestration.actor_group import ActorGroup
from megatrl.orchestration.frozen_server import FrozenServer
from megatrl.rendering.renderer import Renderer
from megatrl.scoring.backends import branch_backend, server_backend
from megatrl.scoring.branches import BranchBackend
from megatrl.scoring.reference_probe import ReferenceProbe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReference:
    """A reference that answers, and how to let go of what it holds."""

    probe: ReferenceProbe
    identity: str  # of its weights; stored in every checkpoint and compared on resume
    close: Callable[[], None]


def open_reference(
    recipe: Recipe, *, actor: ActorGroup, renderer: Renderer, start: Path, log_dir: Path
) -> OpenReference:
    """The reference that credit rule and loss ask for. The actor must hold the start policy.

    With `scoring.backend: sglang` it runs on a server of its own; the rollout's weights move and never serve here.
    """
    shape = read_model_shape(start)
    backend: BranchBackend
    if recipe.scoring.backend == "sglang":
        weights = start
        if is_weights_directory(start):  # no file there that a server can load
            weights = log_dir.parent / "reference"
            actor.save_hf(weights, start)
        server = FrozenServer(recipe, weights, log_dir, role="reference", remedy="set scoring.backend: tree")
        timeout_s = recipe.rollout.servers.request_timeout_s
        backend, close = server_backend(server.urls, shape.vocab_size, request_timeout_s=timeout_s), server.close
    else:
        actor.freeze_reference()
        runner, budget = actor.query_runner("reference"), recipe.batch.microbatch_tokens
        backend, close = branch_backend(recipe.scoring.backend, runner=runner, microbatch_tokens=budget), _nothing
    identity = weights_identity(start)
    logger.info("reference identity=%s backend=%s", identity, recipe.scoring.backend)
    credit = recipe.credit
    probe = ReferenceProbe(
        codec=renderer,
        backend=backend,
        max_sequence_tokens=shape.max_positions,
        policy_temperature=recipe.rollout.sampling.temperature,
        use_aliases=isinstance(credit, TraceCredit) and credit.use_aliases,
        reads_policy=recipe.loss.kl_coefficient > 0,
        max_cached_states=0,  # a resumed run would not have them, and recompute them with other last bits
    )
    return OpenReference(probe=probe, identity=identity, close=close)


def weights_identity(directory: Path) -> str:
    """Hash of a model directory's config.json and weights, 16 hex digits; no layout or backend enters.

    Of a converted directory the description is hashed, which holds the hash of every shard.
    """
    weights = [directory / DESCRIPTION] if is_weights_directory(directory) else sorted(directory.glob("*.safetensors"))
    files = [directory / "config.json", *weights]
    text = "\n".join(f"{path.name} {file_hash(path)}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _nothing() -> None:
    """A swapped reference lives in the ranks and ends with them."""
