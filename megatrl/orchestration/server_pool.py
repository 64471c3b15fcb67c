"""Which rollout servers take requests, which are being restarted, and how many restarts a run allows."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from megatrl.errors import DeadlineError, MegatrlError, RolloutError
from megatrl.observability.progress import waiting

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 5.0
"""A request fails at once when its server dies; the process that watches the server needs a moment to say why."""


class ServerProcess(Protocol):
    """One server process that can be started again. Calls may come from any thread."""

    name: str

    def launch(self) -> None:
        """Start it, on a free port; whatever an earlier start left is ended first."""
        ...

    def wait_ready(self) -> str:
        """The url once it answers. Has a deadline; raises MegatrlError with the log's last lines."""
        ...

    def check(self) -> None:
        """Raise MegatrlError, with exit code and log, where it is gone."""
        ...

    def stop(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Member:
    process: ServerProcess
    url: str = ""
    is_serving: bool = False
    """Holds the current policy version and gets requests."""
    starting: Future[str] | None = None
    loss: str = ""
    """Why it is gone, until it is started again."""

    @property
    def is_reachable(self) -> bool:
        return self.starting is None and not self.loss


class ServerPool:
    """The servers of a run through their deaths: taken out, restarted, and back only after a publish has served them.

    The caller publishes to `wait_reachable()` and hands the outcome to `take_note`; requests go to `urls`.
    """

    def __init__(
        self,
        processes: Sequence[ServerProcess],
        *,
        max_restarts: int,
        start_timeout_s: float,
        restarts_beside_work: bool = True,
    ) -> None:
        """Without `restarts_beside_work` only `wait_reachable` restarts: for servers that share the actor's devices."""
        self._members = [_Member(process) for process in processes]
        self._max_restarts = max_restarts
        self.start_timeout_s = start_timeout_s
        self._restarts_beside_work = restarts_beside_work
        self.num_restarts = 0
        self._is_up = False
        # Two for each server: one may wait for its start while another is asked whether it lives.
        self._threads = ThreadPoolExecutor(max_workers=2 * len(self._members) + 1, thread_name_prefix="server pool")

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers that hold the current policy version."""
        return tuple(member.url for member in self._members if member.is_serving)

    @property
    def is_starting(self) -> bool:
        return any(member.starting is not None for member in self._members)

    def launch(self) -> None:
        """Start all processes, side by side, and return when they exist. They may still be loading."""
        list(self._threads.map(lambda member: member.process.launch(), self._members))
        for member in self._members:
            member.starting = self._threads.submit(member.process.wait_ready)

    def wait_ready(self) -> tuple[str, ...]:
        """Block until every server of the first start answers. Raises at the first that does not: no restart helps.

        Later calls return at once.
        """
        if self._is_up:
            return self.urls
        starting = [member.starting for member in self._members if member.starting is not None]
        for future in wait(starting, return_when=FIRST_EXCEPTION).done:
            future.result()
        for member, future in zip(self._members, starting, strict=True):
            member.url, member.starting, member.is_serving = future.result(), None, True
        self._is_up = True
        return self.urls

    def tend(self) -> None:
        """Look after all servers without waiting: note deaths, start again, note who is back.

        Raises RolloutError where a server is gone and no restart is left.
        """
        for member in self._members:
            if member.starting is not None and member.starting.done():
                self._end_start(member)
        self._note_deaths([member for member in self._members if member.is_reachable])
        if self._restarts_beside_work:
            self._restart_lost()

    def notice(self) -> bool:
        """After a failure: True where a server that took requests turns out to be gone, within a moment's wait.

        Raises RolloutError where it is gone and no restart is left.
        """
        serving = [member for member in self._members if member.is_serving]
        deadline = time.monotonic() + DEATH_NOTICE_S
        while True:
            self.tend()
            if not all(member.is_serving for member in serving):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def wait_reachable(self) -> tuple[str, ...]:
        """Urls to publish to: of the servers at work and of those that were restarted in the meantime.

        Blocks only while there is none, or while one that shares the actor's devices is loading.
        """
        deadline = time.monotonic() + self.start_timeout_s * (1 + self._max_restarts)
        self.tend()
        self._restart_lost()
        while self._must_wait():
            starting = [member for member in self._members if member.starting is not None]
            names = ", ".join(member.process.name for member in starting)
            with waiting(f"restart of {names}", deadline_s=self.start_timeout_s):
                left = max(0.0, deadline - time.monotonic())
                wait([m.starting for m in starting if m.starting], timeout=left, return_when=FIRST_COMPLETED)
            if time.monotonic() > deadline:
                raise DeadlineError(f"{names} did not come back in {self.start_timeout_s:g} s for each restart")
            self.tend()
            self._restart_lost()
        return tuple(member.url for member in self._members if member.is_reachable)

    def take_note(self, served: Iterable[str], failures: Mapping[str, str]) -> set[str]:
        """Who was served takes requests. Who failed does not, and the dead among them are restarted.

        Returns the urls of the dead. Why the living failed is the caller's to judge. Raises RolloutError where
        no restart is left.
        """
        served = set(served)
        for member in self._members:
            member.is_serving = member.url in served and member.is_reachable
        failed = [member for member in self._members if member.url in failures and member.is_reachable]
        deadline = time.monotonic() + DEATH_NOTICE_S
        self._note_deaths(failed)
        while failed and not any(member.loss for member in failed) and time.monotonic() < deadline:
            time.sleep(0.1)
            self._note_deaths(failed)
        dead = {member.url for member in failed if member.loss}
        if self._restarts_beside_work:
            self._restart_lost()
        return dead

    def stop(self) -> None:
        """End all servers, side by side; one that cannot be ended in order is logged. Idempotent."""
        if not self._members:
            return
        for member, error in zip(self._members, self._threads.map(_stop, self._members), strict=True):
            if error:
                logger.warning("stopping %s: %s", member.process.name, error)
        self._members = []
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _must_wait(self) -> bool:
        return self.is_starting and not (self._restarts_beside_work and any(m.is_reachable for m in self._members))

    def _note_deaths(self, members: Sequence[_Member]) -> None:
        for member, loss in zip(members, self._threads.map(_loss, members), strict=True):
            if loss:
                logger.warning("server taken out name=%s url=%s reason=%s", member.process.name, member.url, loss)
                member.loss, member.is_serving = loss, False

    def _restart_lost(self) -> None:
        for member in self._members:
            if not member.loss:
                continue
            if self.num_restarts >= self._max_restarts:
                raise RolloutError(
                    f"{member.process.name} is gone and no restart is left (rollout.servers.max_restarts="
                    f"{self._max_restarts} for the whole run). {member.loss}"
                )
            self.num_restarts += 1
            logger.warning("restarting %s (%d of %d)", member.process.name, self.num_restarts, self._max_restarts)
            member.loss = ""
            member.starting = self._threads.submit(_start_again, member.process)

    def _end_start(self, member: _Member) -> None:
        assert member.starting is not None, "the caller looked"
        future, member.starting = member.starting, None
        try:
            member.url = future.result()
        except MegatrlError as error:
            logger.warning("%s did not start again: %s", member.process.name, error.message)
            member.loss = error.message
        else:
            logger.info("%s is back url=%s; it waits for the next publish", member.process.name, member.url)


def _start_again(process: ServerProcess) -> str:
    process.launch()
    return process.wait_ready()


def _loss(member: _Member) -> str:
    try:
        member.process.check()
    except MegatrlError as error:
        return error.message
    return ""


def _stop(member: _Member) -> str:
    try:
        member.process.stop()
    except MegatrlError as error:  # gone already, or its host is: nothing is left to stop there
        return error.message
    return ""
