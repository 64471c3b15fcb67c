"""Publisher: make the weights just trained live in every rollout server, and prove it."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from megatrl.errors import MegatrlError, WeightSyncError
from megatrl.rollout.control import ServerControl
from megatrl.weight_sync.buckets import Bucket, into_buckets
from megatrl.weight_sync.expected import ExpectedTensors, checked, with_untied_head
from megatrl.weight_sync.fanout import Failures, on_each
from megatrl.weight_sync.plan import PublishPlan
from megatrl.weight_sync.report import PublishReport
from megatrl.weight_sync.transport import Transport
from megatrl.weight_sync.verify import ExpectedChecksums, checksum_differences

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, Tensor]]


class Publisher:
    """Publishes complete sets of weights to the servers of one rollout pool.

    Built on every actor rank, because the iterator it consumes is collective. Only the rank that was given
    servers talks to them; the others drain the iterator and return.
    """

    def __init__(self, plan: PublishPlan, servers: Sequence[ServerControl], transport: Transport | None = None) -> None:
        if servers and transport is None:
            raise WeightSyncError("a publisher with servers needs a transport; see megatrl/weight_sync/routes.py")
        self._plan = plan
        self._servers = tuple(servers)
        self._transport = transport
        self._unusable: Failures = {}

    @property
    def expected(self) -> ExpectedTensors:
        return self._plan.expected

    @property
    def unusable(self) -> dict[str, str]:
        """Server url -> why it may hold mixed weights; cleared by the next publish that reaches it in full.

        Such a server stays paused and reports the version `partial-N`, so nothing it might still answer is
        taken for a sample of a real policy version.
        """
        return dict(self._unusable)

    def check_usable(self) -> None:
        """Raise WeightSyncError where a server was left with unproven weights by an earlier publish."""
        if self._unusable:
            listed = "; ".join(f"{url}: {reason}" for url, reason in self._unusable.items())
            raise WeightSyncError(
                f"servers without a complete set of weights: {listed}. Publish again, or restart them"
            )

    def use_servers(self, urls: Sequence[str]) -> None:
        """From now on publish to the servers at `urls`; others are forgotten. For the rank that has servers."""
        if self._transport is None:
            raise WeightSyncError("this rank was built without servers; only rank 0 talks to them")
        known = {server.url: server for server in self._servers}
        wanted = [url.rstrip("/") for url in urls]
        for url in known.keys() - set(wanted):
            known.pop(url).close()
            self._unusable.pop(url, None)
        timeout_s = self._plan.config.timeout_s
        self._servers = tuple(known.get(url) or ServerControl(url, timeout_s=timeout_s) for url in wanted)

    def publish(self, named: NamedTensors, policy_version: int) -> PublishReport:
        """As `publish_to_reachable`, but raises WeightSyncError, naming server, bucket and phase, where one failed."""
        report = self.publish_to_reachable(named, policy_version)
        report.check()
        return report

    def publish_to_reachable(self, named: NamedTensors, policy_version: int) -> PublishReport:
        """Consume `named` to its end, send it, prove it, and only then name it `policy_version`.

        Collective over the actor ranks: every rank consumes its whole iterator even when sending fails, so
        no rank is left waiting in a gather. A server that fails is left out from there on, and the report says
        where and why. Raises WeightSyncError where our own side refuses: such a name never reaches a server;
        when the weights fit in one bucket, nothing does.
        """
        remaining = iter(named)
        if self._transport is None:
            _drain(remaining)
            return PublishReport(policy_version=policy_version)
        attempt = _Attempt(self._plan, self._servers, self._transport, policy_version)
        try:
            attempt.run(remaining)
        except BaseException:
            self._transport.abandon()
            self._unusable |= attempt.mixed("the publish was refused half-way")
            _drain_after_error(remaining)
            raise
        report = attempt.complete()
        if not attempt.live:
            self._transport.abandon()
        for url in report.served:
            self._unusable.pop(url, None)
        self._unusable |= report.mixed
        logger.info(
            "published policy_version=%d route=%s servers=%d failed=%d tensors=%d bytes=%d buckets=%d "
            "largest_bucket_bytes=%d bytes_ratio=%.3f proven=%s %s",
            policy_version, self._plan.config.route, len(report.served), len(report.failures), report.num_tensors,
            report.num_bytes, report.num_buckets, report.largest_bucket_bytes, report.bytes_ratio, report.is_proven,
            " ".join(f"{phase}_s={seconds:.3f}" for phase, seconds in report.phase_s.items()),
        )  # fmt: skip
        return report

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Attempt:
    """One publish to servers that may drop out one by one; the healthy ones are brought to the end."""

    def __init__(
        self, plan: PublishPlan, servers: Sequence[ServerControl], transport: Transport, policy_version: int
    ) -> None:
        self._plan = plan
        self._transport = transport
        self.live = list(servers)
        self._checksums = ExpectedChecksums(plan.layout) if plan.config.verify else None
        self._deadline = time.monotonic() + plan.config.timeout_s
        self._is_over = False
        self.touched: list[ServerControl] = []
        """Servers that were paused: their weights may be mixed until this attempt completes."""
        self.failures: Failures = {}
        self.report = PublishReport(policy_version=policy_version, model_bytes=plan.num_bytes)
        self._body_bytes = {server.url: server.num_body_bytes for server in servers}
        transport.bytes_beside_http.clear()

    def run(self, named: Iterator[tuple[str, Tensor]]) -> None:
        """Raises where our side refuses; servers that fail are in `failures` afterwards."""
        transport, has_started = self._transport, False
        for bucket in self._buckets(named):
            if not has_started:
                if transport.changes_weights_while_sending:
                    self._pause()
                self._phase("start", transport.start)
                has_started = True
            self._phase("send", lambda live, bucket=bucket: transport.send(live, bucket), bucket)
        if not transport.changes_weights_while_sending:
            self._pause()
        self._phase("finish", transport.finish)
        # Without a waiting time: SGLang would wait for its queue to empty, where retracted requests stay paused.
        self._each("flush", lambda server: server.flush_cache(timeout_s=0.0))
        if self._checksums is not None:
            expected = self._checksums.table()
            self._each("verify", lambda server: _verify(server, expected))
        version = str(self.report.policy_version)
        self._each("version", lambda server: server.update_weight_version(version))
        self._each("continue", lambda server: server.continue_generation())
        self._is_over = True

    def mixed(self, reason: str) -> Failures:
        """Servers whose weights may be neither the old nor the published ones, each with its own reason if known."""
        complete = {server.url for server in self.live} if self._is_over else set()
        return {
            server.url: self.failures.get(server.url, reason) for server in self.touched if server.url not in complete
        }

    def complete(self) -> PublishReport:
        """The report of an attempt that ran to its end."""
        report = self.report
        report.served = tuple(server.url for server in self.live)
        report.failures, report.mixed = self.failures, self.mixed("")
        report.is_proven = self._checksums is not None and bool(self.live)
        beside = self._transport.bytes_beside_http
        report.moved_bytes = {
            server.url: server.num_body_bytes - self._body_bytes[server.url] + beside[server.url]
            for server in self.live
        }
        return report

    def _buckets(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
        complete = checked(with_untied_head(named, self._plan.model), self._plan.expected)
        buckets = into_buckets(complete, self._plan.config.bucket_bytes)
        while True:
            with self._timed("export"):
                bucket = next(buckets, None)
            if bucket is None:
                return
            if self._checksums is not None:
                with self._timed("checksum"):
                    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                        self._checksums.add(name, tensor)
            self.report.num_buckets += 1
            self.report.num_tensors += len(bucket.names)
            self.report.num_bytes += bucket.num_bytes
            self.report.largest_bucket_bytes = max(self.report.largest_bucket_bytes, bucket.num_bytes)
            yield bucket

    def _pause(self) -> None:
        self.touched = list(self.live)
        self._each("pause", lambda server: server.pause_generation("retract"))
        mixed = f"partial-{self.report.policy_version}"
        self._each("mark", lambda server: server.update_weight_version(mixed))

    def _each(self, phase: str, call: Callable[[ServerControl], object]) -> None:
        self._phase(phase, lambda live: on_each(live, call))

    def _phase(
        self, phase: str, call: Callable[[Sequence[ServerControl]], Failures], bucket: Bucket | None = None
    ) -> None:
        if not self.live:
            return
        if time.monotonic() > self._deadline:
            late = f"publish.timeout_s={self._plan.config.timeout_s:g} was over"
            failures = {server.url: late for server in self.live}
        else:
            with self._timed(phase):
                failures = call(self.live)
        where = f"phase {phase}" if bucket is None else f"phase {phase}, bucket {bucket.index} ({bucket.names[0]} ...)"
        for url, reason in failures.items():
            logger.warning("publish failed server=%s %s reason=%s", url, where, reason)
            self.failures[url] = f"{where}: {reason}"
        self.live = [server for server in self.live if server.url not in failures]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.report.phase_s[phase] = self.report.phase_s.get(phase, 0.0) + time.perf_counter() - started


def _verify(server: ServerControl, expected: dict[str, str]) -> None:
    problems = checksum_differences(expected, server.weights_checksum())
    if problems:
        raise WeightSyncError(
            f"{len(problems)} of {len(expected)} tensors differ from what was published: {'; '.join(problems[:3])}"
            f"{' ...' if len(problems) > 3 else ''}. (A server that repacks expert weights, such as "
            "moe_runner_backend flashinfer_*, cannot be compared: use triton, or set publish.verify=false)"
        )


def _drain(named: Iterator[tuple[str, Tensor]]) -> None:
    for _ in named:
        pass


def _drain_after_error(named: Iterator[tuple[str, Tensor]]) -> None:
    """The other ranks still gather; a second error of the iterator must not hide the first."""
    try:
        _drain(named)
    except MegatrlError as error:
        logger.warning("the export failed too while it was drained reason=%s", error.message)
