"""Do the actor and the rollout servers agree on the tokens just sampled?"""

from megatrl.batching.packing import mismatch
from megatrl.data.samples import FloatArray, PackedBatch
from megatrl.errors import WeightSyncError
from megatrl.orchestration.progress import Progress


class MismatchMonitor:
    """Mean and maximum of |actor logprob - server logprob|, logged every step, enforced at the first.

    A large value before any update means wrong weights, a wrong temperature or a wrong template, and
    would otherwise show only as slow learning.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._is_first = True
        self.metrics: dict[str, float] = {}
        """Of the last step; empty where no token was computed: no agreement was measured then."""

    def check(self, progress: Progress, batch: PackedBatch, old_logprobs: dict[int, FloatArray]) -> None:
        """Raises WeightSyncError where the first batch of this process disagrees by more than the limit."""
        mean, maximum = mismatch(batch, old_logprobs)
        self.metrics = {"mismatch/mean": mean, "mismatch/max": maximum} if old_logprobs else {}
        if self._is_first and mean > self._limit:
            raise WeightSyncError(
                f"step {progress.step + 1}: actor and rollout server disagree by {mean:.4f} nats for each token "
                f"(largest {maximum:.4f}); train.max_mismatch is {self._limit}. Before the first update "
                "this means other weights (name map, pipeline order), another temperature, or another precision of the "
                "router"
            )
        self._is_first = self._is_first and not old_logprobs
