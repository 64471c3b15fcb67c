"""MeterPrompts: one turn in which a meter forecasts a recorded state; its reward is how right it was.

    task:   header, history and question as the token ids that scoring uses, not rendered again
    action: {"completion": 1, "tokens_to_go": 330}
    reward: `algorithms.meter_reward` of the parsed answer against what was recorded; 0 for anything unreadable

The prompts come from a labelled data set (`megatrl meter label`): the train split from its training side in a
new order for each epoch, the eval split from the tasks held out of it.
"""

import functools
import math
import random
from pathlib import Path
from typing import Any, Literal

from megatrl.algorithms.meter_reward import meter_reward
from megatrl.config.environments import MeterPromptsConfig
from megatrl.data.messages import Action, Message, ToolSpec
from megatrl.data.meter_answer import answer_text, parse_answer
from megatrl.data.meter_labels import LabeledState, MeterLabels
from megatrl.data.scores import Forecast
from megatrl.data.trajectories import Prompt
from megatrl.envs.protocol import StepResult
from megatrl.errors import ConfigError, EnvironmentFault
from megatrl.observability.label_store import read_labels

Split = Literal["train", "eval"]
_SIDES: dict[Split, Literal["training", "validation"]] = {"train": "training", "eval": "validation"}


class MeterPrompts:
    """One forecast; an Environment, Pretokenized, and a Demonstrator that gives the recorded answer."""

    tools: tuple[ToolSpec, ...] = ()
    gold_answers: tuple[str, ...] = ()
    """None: the answer is a forecast, and a probe has no business with it."""

    def __init__(self, config: MeterPromptsConfig, prompt: Prompt) -> None:
        self._config = config
        try:
            task = prompt.task
            self.opening_tokens: tuple[int, ...] = tuple(int(token) for token in task["tokens"])
            self.tokenizer_fingerprint: str = task["tokenizer_fingerprint"]
            self._text: str = task["text"]
            self._completion: bool = task["completion"]
            self._tokens_to_go: int | None = task["tokens_to_go"]
            self._demonstrated: int | None = task["answer"]
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"meter_prompts: prompt {prompt.prompt_id} has no such task: {error!r}") from error
        self._outcome: StepResult | None = None

    @property
    def observation_key(self) -> str:
        return self._text

    async def start(self) -> tuple[Message, ...]:
        """For people: the policy reads `opening_tokens`."""
        return (Message(role="user", content=self._text),)

    async def step(self, action: Action) -> StepResult:
        if self._outcome is not None:
            raise EnvironmentFault("meter_prompts: an action arrived after the forecast; start another episode")
        self._outcome = self._judge(parse_answer(action.text))
        return self._outcome

    def finish(self) -> StepResult:
        """An answer that a limit cut is no answer."""
        return self._outcome if self._outcome is not None else self._judge(Forecast(is_valid=False))

    async def close(self) -> None:
        return None

    def oracle(self) -> str:
        return answer_text(completion=self._completion, tokens_to_go=self._demonstrated)

    def demonstration(self, rng: random.Random, *, detour: float, premature: float) -> str:
        """The recorded answer; a forecast has neither detours nor haste."""
        return self.oracle()

    def _judge(self, forecast: Forecast) -> StepResult:
        config = self._config
        reward = meter_reward(
            forecast,
            completion=self._completion,
            tokens_to_go=self._tokens_to_go,
            completion_weight=config.completion_weight,
            ttg_weight=1.0 - config.completion_weight,
            form=config.accuracy,
            tau=config.tau,
            failure_earns_ttg_weight=config.failure_earns_ttg_weight,
        )
        is_right = forecast.is_valid and forecast.completion == self._completion
        return StepResult(
            done=True,
            reward=reward,
            success=is_right,
            is_valid_action=forecast.is_valid,
            observation_key=self._text,
            metrics=self._metrics(forecast, is_right),
        )

    def _metrics(self, forecast: Forecast, is_right: bool) -> dict[str, float]:
        """Their means over episodes are rates: a metric of one class is there for that class only."""
        side = "success" if self._completion else "failure"
        metrics = {"valid_rate": float(forecast.is_valid), f"bit_accuracy_{side}": float(is_right)}
        if forecast.is_valid:  # near 0 or 1 while labels are mixed: the meter has collapsed to one class
            metrics["failure_forecast_rate"] = float(not forecast.completion)
        if is_right and self._tokens_to_go is not None:
            error = math.log((1.0 + forecast.tokens_to_go) / (1.0 + self._tokens_to_go))
            metrics["abs_log_error"] = abs(error)
        return metrics


class MeterPromptSource:
    """PromptSource over one side of a labelled data set, in a new order for each epoch."""

    def __init__(self, config: MeterPromptsConfig, *, seed: int, split: Split) -> None:
        """Raises ScoringError for a damaged data set, ConfigError for a training side without a usable example."""
        self._labels = _labels(config.labels)
        self._seed = seed
        self._split: Split = split
        limit = self._labels.max_history_tokens
        fitting = [(e, e.history(limit)) for e in self._labels.examples(_SIDES[split])]
        self._examples = [(example, history) for example, history in fitting if history is not None]
        self._empty = (
            f"env.labels {config.labels} has no {_SIDES[split]} example of at most {limit} history tokens; "
            "label more trajectories, or set evaluation.num_episodes: 0 where only validation is empty"
        )
        if split == "train" and not self._examples:
            raise ConfigError(self._empty)
        self._order: tuple[int, list[int]] = (-1, [])

    def prompt(self, position: int) -> Prompt:
        if not self._examples:  # only now: a run without evaluation never asks
            raise ConfigError(self._empty)
        epoch, place = divmod(position, len(self._examples))
        if self._order[0] != epoch:
            order = list(range(len(self._examples)))
            random.Random(f"meter_prompts {self._split} {self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        number = self._order[1][place]
        example, history = self._examples[number]
        prompt, label = self._labels.prompt, example.label
        answer = prompt.answer_for(completion=label.completion, tokens_to_go=label.tokens_to_go)
        task: dict[str, Any] = {
            "tokens": [*prompt.header, *history, *prompt.question],
            "tokenizer_fingerprint": prompt.tokenizer_fingerprint,
            "text": _text(example),
            "completion": label.completion,
            "tokens_to_go": label.tokens_to_go,
            "answer": None if answer.tokens_to_go is None else round(answer.tokens_to_go),
        }
        seed = random.Random(f"meter_prompts {self._seed} {position}").getrandbits(31)
        return Prompt(prompt_id=f"meter-{_SIDES[self._split]}-{number}", task=task, seed=seed)


@functools.lru_cache(maxsize=2)
def _labels(directory: str) -> MeterLabels:
    """Read once for both splits; the files never change under their name."""
    return read_labels(Path(directory))


def _text(example: LabeledState) -> str:
    """Which state it is, for people."""
    trajectory, state = example.trajectory, example.state
    where = "before action" if example.cut == "before_action" else "after action"
    number = state.turn_index + (example.cut == "before_action")
    task = str(trajectory.messages[0]["content"])[:200] if trajectory.messages else ""
    return f"{trajectory.id} {where} {number} of {trajectory.num_turns}: {task}"


def vocabulary(config: MeterPromptsConfig) -> tuple[str, ...]:
    """No model can be made for it: its words are those of the tasks that were recorded."""
    raise ConfigError(
        f"env.kind: meter_prompts reads the tokens in {config.labels}, whose tokenizer exists already; set model.kind: "
        "hf and model.path to a model with that tokenizer, such as the policy of a recorded run"
    )
