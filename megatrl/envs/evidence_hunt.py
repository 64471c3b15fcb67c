"""EvidenceHunt: follow a chain of documents, collect one clue from each, answer with all of them.

Every question type has one fixed chain of documents, the same in every episode, which the policy
has to learn. Opening the next document of the chain reveals a clue that is random in each episode;
any other document gives nothing. The answer must list all clues in order. The reward is 1 for
exactly the right answer and 0 otherwise, so the task is sparse in reward and rich in turns whose
worth is known: `oracle` always knows the next useful action.

    user:      question q3
    assistant: Action: open doc7
    tool:      found v4 - - 1/3
    assistant: Action: open doc2
    tool:      nothing v4 - - 1/3
    ...
    tool:      found v4 v0 v2 3/3
    assistant: <answer> v4 v0 v2 </answer>

`v0` is the value of a clue; `1/3` counts the clues found. Every observation repeats the notes taken
so far, so that the answer can be read off the last one: what is hard is finding the way.
"""

import hashlib
import random
from collections.abc import Iterable
from typing import Any, Literal

from megatrl.config.environments import EvidenceHuntConfig
from megatrl.data.messages import Action, Message, ToolSpec
from megatrl.data.trajectories import Prompt
from megatrl.envs.protocol import StepResult
from megatrl.envs.tools import CALL_ERRORS, only_argument
from megatrl.errors import ConfigError, EnvironmentFault

OPEN = ToolSpec(
    name="open",
    description="Open one document. The next document of the chain reveals a clue; any other gives nothing.",
    parameters={
        "type": "object",
        "properties": {"document": {"type": "string", "description": "Name of the document, such as doc7"}},
        "required": ["document"],
        "additionalProperties": False,
    },
)
FOUND = "found"
NOTHING = "nothing"
UNSEEN = "-"
UNKNOWN_DOCUMENT = "error: unknown document"
_TEXTS = (FOUND, NOTHING, UNSEEN, *CALL_ERRORS, UNKNOWN_DOCUMENT)

HELD_OUT_SHARE = 4  # one world in four belongs to the eval split
MAX_DRAWS = 1000  # to find a world of the wanted split

Split = Literal["train", "eval"]


class EvidenceHunt:
    """One episode; an Environment and a Demonstrator."""

    def __init__(self, config: EvidenceHuntConfig, prompt: Prompt) -> None:
        check_config(config)
        self._config = config
        self._question, self._clues = _read_task(config, prompt)
        self._chain = document_chain(config, self._question)
        self._found = 0
        self._turns = 0
        self._useless_opens = 0
        self._outcome: StepResult | None = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return (OPEN,)

    @property
    def gold_answers(self) -> tuple[str, ...]:
        return (" ".join(self._clues),)

    @property
    def observation_key(self) -> str:
        return " ".join((f"q{self._question}", *self._clues[: self._found]))

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content=f"question q{self._question}"),)

    async def step(self, action: Action) -> StepResult:
        if self._outcome is not None:
            raise EnvironmentFault("evidence_hunt: an action arrived after the episode had ended; start another one")
        self._turns += 1
        if action.answer is not None:
            return self._end(success=action.answer.split() == list(self._clues))
        text, is_valid = self._open(action)
        role = "tool" if action.tool_calls or action.parse_error else "user"
        messages = (Message(role=role, content=f"{text} {self._notes()}"),)
        if self._turns >= self._config.max_turns:
            return self._end(success=False, messages=messages, is_valid=is_valid)
        return StepResult(messages=messages, is_valid_action=is_valid, observation_key=self.observation_key)

    def finish(self) -> StepResult:
        return self._outcome if self._outcome is not None else self._end(success=False)

    async def close(self) -> None:
        return None

    def oracle(self) -> str:
        if self._found == self._config.num_hops:
            return _answer_text(self._clues)
        return _open_text(self._chain[self._found])

    def demonstration(self, rng: random.Random, *, detour: float, premature: float) -> str:
        """An action of mixed quality: a random document, or an answer whose missing clues are guessed.

        The last turn is always used for an answer: whoever learns from many such episodes sees in
        each of them how an answer is read off the notes.
        """
        is_last_turn = self._turns == self._config.max_turns - 1
        if not is_last_turn and rng.random() < detour:
            return _open_text(rng.randrange(self._config.num_documents))
        if is_last_turn or rng.random() < premature:
            return _answer_text(
                clue if hop < self._found else _clue_word(rng.randrange(self._config.num_values))
                for hop, clue in enumerate(self._clues)
            )
        return self.oracle()

    def _notes(self) -> str:
        """The clues found so far in order, a placeholder for each other one, and their count."""
        hops = self._config.num_hops
        return " ".join((*self._clues[: self._found], *(UNSEEN,) * (hops - self._found), f"{self._found}/{hops}"))

    def _open(self, action: Action) -> tuple[str, bool]:
        """What came of the action, without the notes, and whether it was a valid one."""
        name, error = only_argument(OPEN, action)
        if name is None:
            return error, False
        documents = {_document_word(number): number for number in range(self._config.num_documents)}
        if name not in documents:
            return UNKNOWN_DOCUMENT, False
        document = documents[name]
        if self._found < len(self._chain) and document == self._chain[self._found]:
            self._found += 1
            return FOUND, True
        self._useless_opens += 1
        return NOTHING, True

    def _end(self, *, success: bool, messages: tuple[Message, ...] = (), is_valid: bool = True) -> StepResult:
        self._outcome = StepResult(
            messages=messages,
            done=True,
            reward=float(success),
            success=success,
            is_valid_action=is_valid,
            observation_key=self.observation_key,
            metrics={"clues_found": float(self._found), "useless_opens": float(self._useless_opens)},
        )
        return self._outcome


class EvidenceHuntPrompts:
    """PromptSource: a fresh world for every position; no world is in both splits, whatever the seeds."""

    def __init__(self, config: EvidenceHuntConfig, *, seed: int, split: Split) -> None:
        check_config(config)
        self._config = config
        self._seed = seed
        self._split: Split = split

    def prompt(self, position: int) -> Prompt:
        """The world at this position. ConfigError where the sizes leave none for the split."""
        rng = random.Random(f"evidence_hunt {self._split} {self._seed} {position}")
        for _ in range(MAX_DRAWS):
            question = rng.randrange(self._config.num_questions)
            values = [rng.randrange(self._config.num_values) for _ in range(self._config.num_hops)]
            if _is_held_out(question, values) == (self._split == "eval"):
                return Prompt(
                    prompt_id=f"evidence_hunt-{self._split}-{self._seed}-{position}",
                    task={"question": question, "values": values},
                    seed=rng.getrandbits(31),
                )
        raise ConfigError(
            f"env: no {self._split} world found in {MAX_DRAWS} draws with num_questions={self._config.num_questions}, "
            f"num_hops={self._config.num_hops}, num_values={self._config.num_values}; raise one of them"
        )


def check_config(config: EvidenceHuntConfig) -> None:
    """ConfigError where the sizes contradict each other."""
    if config.num_hops > config.num_documents:
        raise ConfigError(
            f"env.num_hops={config.num_hops} is more than env.num_documents={config.num_documents}; "
            "a chain visits each document at most once"
        )


def document_chain(config: EvidenceHuntConfig, question: int) -> tuple[int, ...]:
    """Documents that lead to the answer of a question type, in order; the same in every run."""
    rng = random.Random(f"evidence_hunt chain {question}")
    return tuple(rng.sample(range(config.num_documents), config.num_hops))


def oracle_plan(config: EvidenceHuntConfig, observation_key: str) -> tuple[str, ...]:
    """Texts of the oracle's actions from a state to the end. Unknown clues stand as `v0`: same length, other word."""
    question, *found = observation_key.split()
    chain = document_chain(config, int(question.removeprefix("q")))
    clues = [*found, *(_clue_word(0) for _ in range(config.num_hops - len(found)))]
    return (*map(_open_text, chain[len(found) :]), _answer_text(clues))


def vocabulary(config: EvidenceHuntConfig) -> tuple[str, ...]:
    """Every word of prompts, observations and good actions, for the tiny model's tokenizer."""
    fixed = " ".join(("question", "Action:", OPEN.name, *_TEXTS)).split()
    return (
        *dict.fromkeys(fixed),
        *(f"q{question}" for question in range(config.num_questions)),
        *(_document_word(document) for document in range(config.num_documents)),
        *(_clue_word(value) for value in range(config.num_values)),
        *(f"{found}/{config.num_hops}" for found in range(config.num_hops + 1)),
    )


def _read_task(config: EvidenceHuntConfig, prompt: Prompt) -> tuple[int, tuple[str, ...]]:
    question: Any = prompt.task.get("question")
    values: Any = prompt.task.get("values")
    is_readable = (
        _is_number_below(question, config.num_questions)
        and isinstance(values, list | tuple)
        and len(values) == config.num_hops
        and all(_is_number_below(value, config.num_values) for value in values)
    )
    if not is_readable:
        raise EnvironmentFault(
            f"evidence_hunt: task {str(dict(prompt.task))[:200]}; question must be a number below "
            f"{config.num_questions} and values {config.num_hops} numbers below {config.num_values}; "
            "make prompts with prompt_source and the same env section"
        )
    return question, tuple(map(_clue_word, values))


def _is_number_below(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _is_held_out(question: int, values: list[int]) -> bool:
    world = " ".join(map(str, (question, *values)))
    return hashlib.sha256(world.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _document_word(document: int) -> str:
    return f"doc{document}"


def _clue_word(value: int) -> str:
    return f"v{value}"


def _open_text(document: int) -> str:
    return f"Action: open {_document_word(document)}"


def _answer_text(clues: Iterable[str]) -> str:
    return f"<answer> {' '.join(clues)} </answer>"
