"""Text games of the TextWorld engine: one tool, `act`, that takes a command.

The outcome is 1 where the game is won and 0 otherwise. Lost games end; all other limits are the
rollout's. Commands come from the policy and reach a C interpreter, so they are filtered: one line,
plain letters, and none of the interpreter's own commands (save, quit, restart, ...).
"""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megatrl.config.environments import TextWorldConfig
from megatrl.data.messages import Action, Message, ToolSpec
from megatrl.data.trajectories import Prompt
from megatrl.envs.protocol import StepResult
from megatrl.envs.textworld_games import DEFAULT_CACHE, Split, check_config, game_file, game_seed, import_textworld
from megatrl.envs.tools import run_blocking, string_argument
from megatrl.errors import ConfigError, DeadlineError, EnvironmentFault

ACT = ToolSpec(
    name="act",
    description="Type one command into the game and read what happens.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "A command, such as: open door"}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
INSTRUCTION = "You play a text game. Each turn write one command as Action: act command"
START_TIMEOUT_S = 600.0  # generation included
STEP_TIMEOUT_S = 60.0

_COMMAND = re.compile(r"[A-Za-z0-9' -]{1,120}")
_INTERPRETER_COMMANDS = re.compile(
    r"(save|restore|restart|quit|q|undo|oops|again|g|script|unscript|transcript|verbose|brief|superbrief|notify|"
    r"pronouns|verify|version|score|fullscore|random|replay|recording|command|tw-.*)\b",
    re.IGNORECASE,
)
_NOT_OF_THE_GAME = re.compile(r">|Would you like to RESTART|[\s$\\|_/.\-`'()]{4,}$")  # status line, menu, drawn title

Returned = TypeVar("Returned")


class TextWorldEnvironment:
    """One episode; an Environment and a Demonstrator. The engine runs in threads, never on the event loop."""

    def __init__(self, config: TextWorldConfig, prompt: Prompt, *, cache: Path = DEFAULT_CACHE) -> None:
        check_config(config)
        seed = prompt.task.get("game_seed")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise EnvironmentFault(f"textworld: game_seed of the task is {seed!r}; make prompts with prompt_source")
        self._config = config
        self._seed = seed
        self._cache = cache
        self._game: Any = None
        self._state: Any = None
        self._turns = 0
        self._outcome: StepResult | None = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return (ACT,)

    @property
    def gold_answers(self) -> tuple[str, ...]:
        return ()

    @property
    def observation_key(self) -> str:
        if self._state is None:
            return ""
        return _one_line(f"{self._state['description']} {self._state['inventory']}")

    async def start(self) -> tuple[Message, ...]:
        await self._in_thread(self._load, START_TIMEOUT_S, "start")
        text = f"{self._state['objective']}\n{self._state['description']}"
        return (
            Message(role="system", content=INSTRUCTION),
            Message(role="user", content=self._observation(text)),
        )

    async def step(self, action: Action) -> StepResult:
        if self._outcome is not None or self._state is None:
            raise EnvironmentFault("textworld: an action arrived before the start or after the end of the episode")
        self._turns += 1
        command, error = _command_of(action)
        if error:
            text = error
        else:
            await self._in_thread(lambda: self._play(command), STEP_TIMEOUT_S, f"command {command!r}")
            text = str(self._state["feedback"])
        role = "tool" if action.tool_calls or action.parse_error else "user"
        messages = (Message(role=role, content=self._observation(text)),)
        is_over = bool(self._state["won"] or self._state["lost"]) or self._turns >= self._config.max_turns
        if is_over:
            return self._end(messages=messages, is_valid=not error)
        return StepResult(messages=messages, is_valid_action=not error, observation_key=self.observation_key)

    def finish(self) -> StepResult:
        return self._outcome if self._outcome is not None else self._end()

    async def close(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            await self._in_thread(game.close, STEP_TIMEOUT_S, "close")

    def oracle(self) -> str:
        """First command of the engine's own plan, made again after every command."""
        commands = self._state["policy_commands"] or ["look"]
        return _act_text(commands[0])

    def demonstration(self, rng: random.Random, *, detour: float, premature: float) -> str:
        """The plan's next command, or any admissible one; games have no answer, so `premature` is a detour too."""
        if rng.random() < detour or rng.random() < premature:
            return _act_text(rng.choice(sorted(self._state["admissible_commands"]) or ["look"]))
        return self.oracle()

    def _load(self) -> None:
        engine = import_textworld()
        wanted = engine.EnvInfos(
            admissible_commands=True,
            policy_commands=True,
            description=True,
            inventory=True,
            objective=True,
            won=True,
            lost=True,
            score=True,
            max_score=True,
        )
        self._game = engine.start(str(game_file(self._config, self._seed, cache=self._cache)), wanted)
        self._game.seed(self._seed % 2**31)
        self._state = self._game.reset()

    def _play(self, command: str) -> None:
        self._state, _, _ = self._game.step(command)

    async def _in_thread(self, function: Callable[[], Returned], timeout_s: float, what: str) -> Returned:
        try:
            return await run_blocking(function, timeout_s=timeout_s, what=f"textworld {what} (game {self._seed})")
        except ConfigError:
            raise
        except DeadlineError as error:
            raise EnvironmentFault(str(error)) from error
        except Exception as error:  # the engine raises whatever its parts raise; none of it is the policy's fault
            raise EnvironmentFault(f"textworld {what} (game {self._seed}): {type(error).__name__}: {error}") from error

    def _observation(self, text: str) -> str:
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not _NOT_OF_THE_GAME.match(line)]
        if self._config.show_admissible:
            lines.append("Commands: " + " | ".join(sorted(self._state["admissible_commands"] or ())))
        return "\n".join(lines)

    def _end(self, *, messages: tuple[Message, ...] = (), is_valid: bool = True) -> StepResult:
        state = self._state if self._state is not None else {"won": False, "lost": False, "score": 0, "max_score": 1}
        won = bool(state["won"])
        self._outcome = StepResult(
            messages=messages,
            done=True,
            reward=float(won),
            success=won,
            is_valid_action=is_valid,
            observation_key=self.observation_key,
            metrics={
                "score_share": float(state["score"] or 0) / float(state["max_score"] or 1),
                "lost": float(bool(state["lost"])),
            },
        )
        return self._outcome


class TextWorldPrompts:
    """PromptSource over `num_games` games, shuffled again in every epoch by (seed, epoch)."""

    def __init__(self, config: TextWorldConfig, *, seed: int, split: Split) -> None:
        check_config(config)
        self._config = config
        self._seed = seed
        self._split: Split = split

    def prompt(self, position: int) -> Prompt:
        epoch, place = divmod(position, self._config.num_games)
        order = list(range(self._config.num_games))
        random.Random(f"textworld {self._split} {self._seed} {epoch}").shuffle(order)
        seed = game_seed(self._seed, self._split, order[place])
        return Prompt(
            prompt_id=f"textworld-{self._config.challenge}-{self._config.level}-{seed}",
            task={"game_seed": seed},
            seed=random.Random(f"textworld {self._split} {self._seed} at {position}").getrandbits(31),
        )


def vocabulary(config: TextWorldConfig) -> tuple[str, ...]:
    """Words of commands and of what every game says. Names of things differ by game and stay unknown."""
    words = (
        "Action: act look inventory examine go north south east west take drop put insert into open close lock "
        "unlock eat with from on the a an you is are in there exit to door coin Commands: | wait "
        "You take from. north. south. east. west. can't error: unreadable command no call one only unknown tool"
    )
    return tuple(dict.fromkeys((*INSTRUCTION.split(), *words.split())))


def _command_of(action: Action) -> tuple[str, str]:
    """The command to type, or the error text that answers the action."""
    if action.parse_error:
        return "", "error: unreadable call"
    if not action.tool_calls:
        return "", "error: no call; write Action: act command"
    call, *more = action.tool_calls
    if more:
        return "", "error: one call only"
    if call.name != ACT.name:
        return "", "error: unknown tool"
    command = string_argument(ACT, call)
    if command is None:
        return "", "error: act needs one command"
    command = command.strip()
    if not _COMMAND.fullmatch(command) or _INTERPRETER_COMMANDS.match(command):
        return "", "error: unknown command"
    return command, ""


def _act_text(command: str) -> str:
    return f"Action: {ACT.name} {command}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
