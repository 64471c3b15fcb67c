"""The meter's weights in memory: a second Megatron model on the actor's process groups, forward only."""

from collections.abc import Sequence
from pathlib import Path

from megatrl.actor.memory import DeviceMemory
from megatrl.config.engines import ActorConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.config.plan import check_layout
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray
from megatrl.errors import LayoutError, ScoringError
from megatrl.mcore.bridge import load_hf_weights
from megatrl.mcore.layout import Layout, activate
from megatrl.mcore.model import build_model
from megatrl.mcore.queries import target_logprobs
from megatrl.scoring.weight_swap import combined_hash, state_hashes


class MeterModel:
    """This rank's part of the meter. It has no gradients, no optimizer and never changes."""

    def __init__(self, path: str | Path, *, layout: Layout, actor: ActorConfig) -> None:
        """Builds the model on the existing process groups and loads the Hugging Face directory `path`.

        Raises LayoutError when the meter's sizes do not fit the actor's degrees, ModelError for bad files.
        """
        shape = read_model_shape(path)
        if violations := check_layout(actor.layout, shape):
            raise LayoutError(f"the actor's layout does not fit the meter {path}:\n- " + "\n- ".join(violations))
        activate(layout.device)
        self._path = path
        self._layout = layout
        self._memory = DeviceMemory(f"the meter {path}", layout.torch_device)
        self._models = build_model(shape, layout, precision=actor.precision)
        load_hf_weights(self._models, path)
        for model in self._models:
            model.requires_grad_(False).eval()
        self.identity = combined_hash(state_hashes(self._models))
        """Hash of this rank's weights as loaded."""

    def target_logprobs(self, queries: Sequence[PackedQueries], *, temperature: float = 1.0) -> list[FloatArray]:
        """Log-probabilities of the queries' targets; see `mcore.queries.target_logprobs`. Collective."""
        self._memory.require()
        return target_logprobs(self._models, self._layout, queries, temperature=temperature)

    def verify(self) -> None:
        """Raises ScoringError when the weights in memory are no longer those that were loaded."""
        self._memory.require()
        seen = combined_hash(state_hashes(self._models))
        if seen != self.identity:
            raise ScoringError(f"the weights of the meter {self._path} changed: loaded {self.identity}, now {seen}")

    def offload(self) -> None:
        """Hands this rank's part of the meter over to host memory, for a colocated rollout server."""
        activate(self._layout.device)
        self._memory.hand_over({"meter": self._models})

    def onload(self) -> None:
        """Takes it back. Raises DeviceMemoryError naming the tensors that did not come back as they were."""
        activate(self._layout.device)
        self._memory.take_back()
