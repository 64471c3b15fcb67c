"""A rollout that fails because its server is gone is played again where one is left or back; else it says why."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from megatrl.data.trajectories import Prompt, PromptGroup
from megatrl.errors import RolloutError
from megatrl.orchestration.players import WatchedPlayer
from megatrl.rollout.collector import PlayedGroups


@dataclass
class Player:
    errors: list[RolloutError] = field(default_factory=list)  # of the first calls, one for each
    versions: list[int] = field(default_factory=list)

    def collect(
        self, prompts: Sequence[Prompt], *, first_position: int, policy_version: int, journal: PlayedGroups
    ) -> tuple[PromptGroup, ...]:
        self.versions.append(policy_version)
        if self.errors:
            raise self.errors.pop(0)
        return ()


@dataclass
class Servers:
    """Care of servers as scripted: what each repair after a failure comes to."""

    repairs: list[bool | RolloutError] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_tended: int = 0

    def repair(self, policy_version: int) -> bool:
        self.versions.append(policy_version)
        outcome = self.repairs.pop(0)
        if isinstance(outcome, RolloutError):
            raise outcome
        return outcome

    def tend(self) -> None:
        self.num_tended += 1


def play(player: Player, servers: Servers) -> tuple[PromptGroup, ...]:
    return WatchedPlayer(player, servers).collect((), first_position=0, policy_version=4)


def test_the_post_mortem_of_a_server_that_stays_gone_joins_the_error() -> None:
    gone = RolloutError("rollout server 0 is gone: exit code 137. Log: server-0.log")
    with pytest.raises(RolloutError) as caught:
        play(Player([RolloutError("3 of 12 episodes failed")]), Servers(repairs=[gone]))
    assert "3 of 12 episodes failed" in caught.value.message
    assert "exit code 137. Log: server-0.log" in caught.value.message


def test_a_failure_with_all_servers_alive_stays_as_it_is() -> None:
    error = RolloutError("3 of 12 episodes failed")
    with pytest.raises(RolloutError) as caught:
        play(Player([error]), Servers(repairs=[False]))
    assert caught.value is error


def test_episodes_are_played_again_under_the_same_version_once_servers_are_back() -> None:
    player = Player([RolloutError("no server is alive"), RolloutError("no server is alive")])
    servers = Servers(repairs=[True, True])
    assert play(player, servers) == ()
    assert player.versions == [4, 4, 4]
    assert servers.versions == [4, 4]


def test_servers_are_looked_after_once_all_has_gone_well() -> None:
    servers = Servers()
    assert play(Player(), servers) == ()
    assert (servers.num_tended, servers.versions) == (1, [])
