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
        self.mean = 0.0
        self.maximum = 0.0

    def check(self, progress: Progress, batch: PackedBatch, old_logprobs: dict[int, FloatArray]) -> None:
        """Raises WeightSyncError where the first batch of this process disagrees by more than the limit."""
        self.mean, self.maximum = mismatch(batch, old_logprobs)
        if self._is_first and self.mean > self._limit:
            raise WeightSyncError(
                f"step {progress.step + 1}: actor and rollout server disagree by {self.mean:.4f} nats for each token "
                f"(largest {self.maximum:.4f}); train.max_mismatch is {self._limit}. Before the first update "
                "this means other weights (name map, pipeline order), another temperature, or another precision of the "
                "router"
            )
        self._is_first = self._is_first and not old_logprobs
