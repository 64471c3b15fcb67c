"""Switchboard: bring a row of switches into the pattern that was asked for, then say so. Actions can undo progress.

Every pattern is fixed and the same in every episode, so the policy has to learn it; the state a board
starts in is random. Flipping a wrong switch is progress, flipping a right one undoes it, and the board
says nothing of which is which. The reward is 1 where the answer `done` comes while the board shows the
pattern, 0 otherwise: sparse in reward, and every turn's worth is known.

    user:      pattern p3 a:1 b:0 c:0 d:1
    assistant: Action: flip b
    tool:      a:1 b:1 c:0 d:1
    assistant: <answer> done </answer>
"""

import hashlib
import random
from typing import Any, Literal

from megatrl.config.environments import SwitchboardConfig
from megatrl.data.messages import Action, Message, ToolSpec
from megatrl.data.trajectories import Prompt
from megatrl.envs.protocol import StepResult
from megatrl.envs.tools import CALL_ERRORS, only_argument
from megatrl.errors import ConfigError, EnvironmentFault

FLIP = ToolSpec(
    name="flip",
    description="Flip one switch of the board.",
    parameters={
        "type": "object",
        "properties": {"switch": {"type": "string", "description": "Name of the switch, such as b"}},
        "required": ["switch"],
        "additionalProperties": False,
    },
)
DONE = "done"
UNKNOWN_SWITCH = "error: unknown switch"
_TEXTS = (*CALL_ERRORS, UNKNOWN_SWITCH)

HELD_OUT_SHARE = 4  # one world in four belongs to the eval split
MAX_DRAWS = 1000  # to find a world of the wanted split
_NAMES = "abcdefghijklmnop"

Split = Literal["train", "eval"]


class Switchboard:
    """One episode; an Environment and a Demonstrator."""

    def __init__(self, config: SwitchboardConfig, prompt: Prompt) -> None:
        self._config = config
        self._pattern, self._board = _read_task(config, prompt)
        self._target = target_board(config, self._pattern)
        self._turns = 0
        self._undone = 0
        self._outcome: StepResult | None = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return (FLIP,)

    @property
    def gold_answers(self) -> tuple[str, ...]:
        return (DONE,)

    @property
    def observation_key(self) -> str:
        return f"p{self._pattern} {self._state()}"

    @property
    def remaining_flips(self) -> int:
        """Switches that do not show the pattern: the least number of flips before the answer."""
        return sum(now != wanted for now, wanted in zip(self._board, self._target, strict=True))

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content=f"pattern p{self._pattern} {self._state()}"),)

    async def step(self, action: Action) -> StepResult:
        if self._outcome is not None:
            raise EnvironmentFault("switchboard: an action arrived after the episode had ended; start another one")
        self._turns += 1
        if action.answer is not None:
            return self._end(success=action.answer.strip() == DONE and self.remaining_flips == 0)
        error = self._flip(action)
        role = "tool" if action.tool_calls or action.parse_error else "user"
        messages = (Message(role=role, content=f"{error} {self._state()}".lstrip()),)
        if self._turns >= self._config.max_turns:
            return self._end(success=False, messages=messages, is_valid=not error)
        return StepResult(messages=messages, is_valid_action=not error, observation_key=self.observation_key)

    def finish(self) -> StepResult:
        return self._outcome if self._outcome is not None else self._end(success=False)

    async def close(self) -> None:
        return None

    def oracle(self) -> str:
        pairs = enumerate(zip(self._board, self._target, strict=True))
        wrong = [switch for switch, (now, wanted) in pairs if now != wanted]
        return _flip_text(wrong[0]) if wrong else f"<answer> {DONE} </answer>"

    def demonstration(self, rng: random.Random, *, detour: float, premature: float) -> str:
        """The oracle's action, or a random flip (`detour`), or `done` too early (`premature`).

        The last turn is always used for an answer, as in the other built-in task.
        """
        is_last_turn = self._turns == self._config.max_turns - 1
        if not is_last_turn and rng.random() < detour:
            return _flip_text(rng.randrange(self._config.num_switches))
        if is_last_turn or rng.random() < premature:
            return f"<answer> {DONE} </answer>"
        return self.oracle()

    def _state(self) -> str:
        return " ".join(_state_word(switch, value) for switch, value in enumerate(self._board))

    def _flip(self, action: Action) -> str:
        """Carries out the call; why it could not be, or an empty text."""
        name, error = only_argument(FLIP, action)
        if name is None:
            return error
        names = {_NAMES[switch]: switch for switch in range(self._config.num_switches)}
        if name not in names:
            return UNKNOWN_SWITCH
        switch = names[name]
        self._undone += self._board[switch] == self._target[switch]
        self._board[switch] = 1 - self._board[switch]
        return ""

    def _end(self, *, success: bool, messages: tuple[Message, ...] = (), is_valid: bool = True) -> StepResult:
        self._outcome = StepResult(
            messages=messages,
            done=True,
            reward=float(success),
            success=success,
            is_valid_action=is_valid,
            observation_key=self.observation_key,
            metrics={"wrong_switches": float(self.remaining_flips), "undone": float(self._undone)},
        )
        return self._outcome


class SwitchboardPrompts:
    """PromptSource: a random board for every position; no world is in both splits, whatever the seeds."""

    def __init__(self, config: SwitchboardConfig, *, seed: int, split: Split) -> None:
        self._config = config
        self._seed = seed
        self._split: Split = split

    def prompt(self, position: int) -> Prompt:
        """The world at this position, never one that is solved already. ConfigError where there is none."""
        rng = random.Random(f"switchboard {self._split} {self._seed} {position}")
        for _ in range(MAX_DRAWS):
            pattern = rng.randrange(self._config.num_patterns)
            board = [rng.randrange(2) for _ in range(self._config.num_switches)]
            is_solved = board == target_board(self._config, pattern)
            if not is_solved and _is_held_out(pattern, board) == (self._split == "eval"):
                return Prompt(
                    prompt_id=f"switchboard-{self._split}-{self._seed}-{position}",
                    task={"pattern": pattern, "board": board},
                    seed=rng.getrandbits(31),
                )
        raise ConfigError(
            f"env: no {self._split} world found in {MAX_DRAWS} draws with num_patterns={self._config.num_patterns}, "
            f"num_switches={self._config.num_switches}; raise one of them"
        )


def target_board(config: SwitchboardConfig, pattern: int) -> list[int]:
    """The state, 0 or 1 for each switch, that a pattern asks for; the same in every run."""
    rng = random.Random(f"switchboard pattern {pattern}")
    return [rng.randrange(2) for _ in range(config.num_switches)]


def oracle_plan(config: SwitchboardConfig, observation_key: str) -> tuple[str, ...]:
    """Texts of the oracle's actions from a state to the end."""
    pattern, *board = observation_key.split()
    target = target_board(config, int(pattern.removeprefix("p")))
    wrong = [switch for switch, wanted in enumerate(target) if board[switch] != _state_word(switch, wanted)]
    return (*map(_flip_text, wrong), f"<answer> {DONE} </answer>")


def vocabulary(config: SwitchboardConfig) -> tuple[str, ...]:
    """Every word of prompts, observations and good actions, for the tiny model's tokenizer."""
    switches = range(config.num_switches)
    return (
        *dict.fromkeys(" ".join(("pattern", "Action:", FLIP.name, DONE, *_TEXTS)).split()),
        *(f"p{pattern}" for pattern in range(config.num_patterns)),
        *(_NAMES[switch] for switch in switches),
        *(_state_word(switch, value) for switch in switches for value in (0, 1)),
    )


def _read_task(config: SwitchboardConfig, prompt: Prompt) -> tuple[int, list[int]]:
    pattern: Any = prompt.task.get("pattern")
    board: Any = prompt.task.get("board")
    is_readable = (
        type(pattern) is int
        and 0 <= pattern < config.num_patterns
        and isinstance(board, list | tuple)
        and len(board) == config.num_switches
        and all(type(value) is int and value in (0, 1) for value in board)
    )
    if not is_readable:
        raise EnvironmentFault(
            f"switchboard: task {str(dict(prompt.task))[:200]}; pattern must be a number below {config.num_patterns} "
            f"and board {config.num_switches} zeros and ones; make prompts with prompt_source and the same env section"
        )
    return pattern, list(board)


def _is_held_out(pattern: int, board: list[int]) -> bool:
    world = " ".join(map(str, (pattern, *board)))
    return hashlib.sha256(f"switchboard {world}".encode()).digest()[0] % HELD_OUT_SHARE == 0


def _state_word(switch: int, value: int) -> str:
    return f"{_NAMES[switch]}:{value}"


def _flip_text(switch: int) -> str:
    return f"Action: {FLIP.name} {_NAMES[switch]}"
