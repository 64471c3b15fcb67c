"""A rollout that fails because its server is gone says which server, why, and where the log is."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from megatrl.data.trajectories import Prompt, PromptGroup
from megatrl.errors import RolloutError
from megatrl.orchestration import players
from megatrl.orchestration.players import WatchedPlayer
from megatrl.rollout.collector import PlayedGroups


@dataclass
class Player:
    error: RolloutError | None = None

    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int, journal: PlayedGroups
    ) -> tuple[PromptGroup, ...]:
        if self.error is not None:
            raise self.error
        return ()


@dataclass
class Servers:
    """A server whose death is noticed at the n-th look."""

    dies_at: int
    num_checks: int = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.num_checks >= self.dies_at:
            raise RolloutError("server http://127.0.0.1:1 is not running: exit code 137. Log: server-0.log")


def test_the_post_mortem_of_a_dead_server_joins_the_error_even_when_it_comes_late() -> None:
    player = WatchedPlayer(Player(RolloutError("3 of 12 episodes failed")), Servers(dies_at=3))
    with pytest.raises(RolloutError) as caught:
        player.collect((), first_position=0, policy_version=1)
    assert "3 of 12 episodes failed" in caught.value.message
    assert "http://127.0.0.1:1 is not running: exit code 137. Log: server-0.log" in caught.value.message


def test_a_failure_with_all_servers_alive_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(players, "_DEATH_NOTICE_S", 0.1)
    servers, error = Servers(dies_at=1000), RolloutError("3 of 12 episodes failed")
    with pytest.raises(RolloutError) as caught:
        WatchedPlayer(Player(error), servers).collect((), first_position=0, policy_version=1)
    assert caught.value is error
    assert servers.num_checks >= 1


def test_nothing_is_asked_of_the_servers_while_all_goes_well() -> None:
    servers = Servers(dies_at=1)
    assert WatchedPlayer(Player(), servers).collect((), first_position=0, policy_version=1) == ()
    assert servers.num_checks == 0
