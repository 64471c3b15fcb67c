"""PublishReport: what one publish did, to whom, and at what cost."""

from dataclasses import dataclass, field

from megatrl.errors import WeightSyncError
from megatrl.weight_sync.fanout import Failures


@dataclass(slots=True, kw_only=True)
class PublishReport:
    """On ranks without servers only the version is meaningful."""

    policy_version: int
    num_tensors: int = 0
    num_bytes: int = 0  # of all buckets
    num_buckets: int = 0
    largest_bucket_bytes: int = 0  # above publish.bucket_bytes only where one tensor is larger than that
    model_bytes: int = 0  # every tensor once, as a server holds it
    is_proven: bool = False
    """Every server in `served` reported exactly the expected checksums."""
    served: tuple[str, ...] = ()
    """Servers that hold the new weights under their new name and answer requests."""
    failures: Failures = field(default_factory=dict)
    """Server url -> phase, bucket and reason."""
    mixed: Failures = field(default_factory=dict)
    """Those of `failures` whose weights may be neither the old nor the new ones; they stay paused."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Served url -> bytes moved for it: HTTP bodies both ways, checksums included, and what went beside HTTP."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase. `export` is the time spent in the caller's iterator and in the checks of its names."""

    @property
    def bytes_ratio(self) -> float:
        """Bytes moved for the server that took most, over the model's; 0 where none was served."""
        return max(self.moved_bytes.values(), default=0) / max(1, self.model_bytes)

    def check(self) -> None:
        """Raises WeightSyncError, naming server, phase and bucket, where a server failed."""
        if not self.failures:
            return
        listed = "; ".join(
            f"server {url} ({'paused, unusable until a whole publish succeeds' if url in self.mixed else 'old weights'}"
            f"): {reason}"
            for url, reason in self.failures.items()
        )
        raise WeightSyncError(
            f"policy version {self.policy_version} was not published to {len(self.failures)} of "
            f"{len(self.failures) + len(self.served)} servers: {listed}"
        )
