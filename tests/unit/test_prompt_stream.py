"""The prompt stream: its position is its whole state."""

import pytest

from megatrl.config.environments import EvidenceHuntConfig, TextWorldConfig
from megatrl.data.prompts import PromptStream
from megatrl.envs.registry import prompt_source

SOURCE = prompt_source(EvidenceHuntConfig(), seed=3, split="train")


def test_a_stream_resumed_at_its_position_goes_on_as_if_never_stopped() -> None:
    whole = PromptStream(SOURCE).take(12)
    first = PromptStream(SOURCE)
    taken = first.take(5)
    resumed = PromptStream(SOURCE, position=first.position)
    assert taken + resumed.take(7) == whole
    assert resumed.position == 12


def test_a_failed_take_does_not_move_the_position() -> None:
    class Broken:
        def prompt(self, position: int):
            if position == 2:
                raise OSError("disk")
            return SOURCE.prompt(position)

    stream = PromptStream(Broken())
    with pytest.raises(OSError, match="disk"):
        stream.take(3)
    assert stream.position == 0


def test_negative_positions_and_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="counts from 0"):
        PromptStream(SOURCE, position=-1)
    with pytest.raises(ValueError, match="0 or more"):
        PromptStream(SOURCE).take(-1)


def test_finite_sources_show_every_game_once_an_epoch_in_an_order_of_seed_and_epoch() -> None:
    config = TextWorldConfig(num_games=8)
    orders = {}
    for seed in (0, 1):
        source = prompt_source(config, seed=seed, split="train")
        for epoch in (0, 1):
            games = [source.prompt(epoch * 8 + place).task["game_seed"] for place in range(8)]
            assert len(set(games)) == 8
            orders[seed, epoch] = games
        assert set(orders[seed, 0]) == set(orders[seed, 1])
        assert orders[seed, 0] != orders[seed, 1]
    assert not set(orders[0, 0]) & set(orders[1, 0])


def test_train_and_eval_games_differ_by_seed() -> None:
    config = TextWorldConfig(num_games=50)
    games = {
        split: {prompt_source(config, seed=0, split=split).prompt(i).task["game_seed"] for i in range(50)}
        for split in ("train", "eval")
    }
    assert not games["train"] & games["eval"]
