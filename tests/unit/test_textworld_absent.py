"""Without the extra, TextWorld recipes fail with the command that installs it."""

import asyncio
import sys
from pathlib import Path

import pytest

from megatrl.config.environments import TextWorldConfig
from megatrl.envs.registry import make_environment, prompt_source, vocabulary
from megatrl.errors import ConfigError


def test_a_missing_engine_is_named_with_its_extra_when_a_game_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)  # as if it were not installed
    config = TextWorldConfig()
    environment = make_environment(config, prompt_source(config, seed=0, split="train").prompt(0))
    with pytest.raises(ConfigError, match=r'pip install "megatrl\[textworld\]"'):
        asyncio.run(environment.start())
    assert environment.finish().reward == 0.0


def test_prompts_and_words_need_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    assert len(set(vocabulary(TextWorldConfig()))) == len(vocabulary(TextWorldConfig()))
    assert prompt_source(TextWorldConfig(), seed=0, split="eval").prompt(9).prompt_id.startswith("textworld-")
