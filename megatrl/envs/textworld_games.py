"""Games made on the spot by the TextWorld engine, kept in a cache directory by content.

TextWorld is imported here and in `textworld.py` only, and only when a game is needed.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from megatrl.config.environments import TextWorldConfig
from megatrl.errors import ConfigError

Split = Literal["train", "eval"]

DEFAULT_CACHE = Path.home() / ".cache" / "megatrl" / "textworld"
LAYOUT_VERSION = 1  # part of every cache key; raise it when the settings below change

_HIGHEST_LEVEL = {"coin_collector": 100, "treasure_hunter": 30, "cooking": 4, "simple": 1}

# The generator works on modules' global random state and on Inform 7's own folders.
_generating = threading.Lock()


def import_textworld(module: str = "textworld") -> ModuleType:
    """A module of TextWorld; ConfigError that names the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"env.kind=textworld needs the package textworld, which cannot be imported ({error}); "
            'install the extra: pip install "megatrl[textworld]" (its dependency jericho is GPL), '
            "or choose env.kind=evidence_hunt"
        ) from error


def check_config(config: TextWorldConfig) -> None:
    """ConfigError where the challenge has no such level."""
    highest = _HIGHEST_LEVEL[config.challenge]
    if config.level > highest:
        raise ConfigError(f"env.level={config.level}; {config.challenge} has the levels 1 to {highest}")


def game_seed(seed: int, split: Split, index: int) -> int:
    """Seed of one game of a split: odd for eval and even for train, so that the splits share none."""
    digest = hashlib.sha256(f"textworld {split} {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:3], "big") * 2 + (split == "eval")


def game_file(config: TextWorldConfig, seed: int, *, cache: Path = DEFAULT_CACHE) -> Path:
    """Path of the compiled game; generated where the cache lacks it, which takes some seconds.

    Blocking. A game appears in the cache by a rename, whole or not at all, so that several processes
    may generate the same game at the same time.
    """
    check_config(config)
    engine = import_textworld()
    key = json.dumps([config.challenge, config.level, seed, engine.__version__, LAYOUT_VERSION])
    folder = cache / f"{config.challenge}-{config.level}-{seed}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    compiled = folder / "game.z8"
    if compiled.exists():
        return compiled
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    try:
        with _generating:
            if not compiled.exists():
                _generate(config, seed, building / "game.z8")
        # A folder that is not empty cannot be replaced: another process was first, with an equal game.
        with contextlib.suppress(OSError):
            os.replace(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if not compiled.exists():
        raise ConfigError(f"cannot keep generated games in {cache}; make it a writable directory")
    return compiled


def _generate(config: TextWorldConfig, seed: int, path: Path) -> None:
    challenges = import_textworld("textworld.challenges")
    generator = import_textworld("textworld.generator")
    options = import_textworld("textworld").GameOptions()
    options.seeds = seed
    options.path = str(path)
    make = challenges.CHALLENGES[f"tw-{config.challenge}"][1]
    generator.compile_game(make(_settings(config, seed), options), options)


def _settings(config: TextWorldConfig, seed: int) -> dict[str, Any]:
    if config.challenge == "cooking":
        return {
            "recipe": config.level,
            "take": config.level,
            "go": 1 if config.level == 1 else 6,
            "open": config.level >= 3,
            "cook": config.level >= 2,
            "cut": config.level >= 3,
            "drop": False,
            "recipe_seed": seed,
            "split": "test" if seed % 2 else "train",  # foods of eval games are not seen in training
        }
    if config.challenge == "simple":
        return {"rewards": "dense", "goal": "detailed", "test": False}
    return {"level": config.level}
