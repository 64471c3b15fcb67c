"""From a collection to a labelled data set: one tokenizer, no task in both splits, a prompt and its costs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from megatrl.data.meter_labels import LabeledState, MeterLabels
from megatrl.data.trajectories import PromptGroup, Segment, Trajectory, TrajectoryId, Turn
from megatrl.errors import ScoringError
from megatrl.meter.collection import Collection, in_tokens_of, task_key
from megatrl.meter.labels import (
    LabelRule,
    LabelSet,
    collect_labels,
    failure_cost,
    failure_costs,
    lengths_without_reasoning,
    log_spaced_grid,
    split_by_task,
)
from megatrl.meter.prompt import build_meter_prompt, can_answer, meter_text
from megatrl.rendering.renderer import Renderer, load_renderer

GRID_SIZE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """How a collection is labelled."""

    rule: LabelRule = field(default_factory=LabelRule)
    validation_fraction: float = 0.1
    seed: int = 0
    grid_size: int = GRID_SIZE
    count_reasoning: bool = True
    max_sequence_tokens: int | None = None  # None: as long as the longest history needs


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRow:
    """One line of the summary: a split, and what one source gave to it."""

    split: str
    source: str
    trajectories: int
    successes: int  # examples
    failures: int  # examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A data set ready to be written, with the groups that hold its trajectories."""

    labels: MeterLabels
    groups: tuple[PromptGroup, ...]
    rows: tuple[LabelRow, ...]
    left_out: dict[str, dict[str, int]]  # split -> reason -> count


def label_in_tokens_of(
    collection: Collection,
    how: Labelling,
    *,
    tokenizer: Path | None = None,
    chat_format: str | None = None,
    tool_format: str | None = None,
) -> Labelled:
    """Labels a collection in the tokens of the model directory `tokenizer`, or of the sources where all agree.

    The formats not given are those of the first source. Raises ScoringError where sources have several
    tokenizers and none was chosen.
    """
    fingerprints = {source.tokenizer_fingerprint for source in collection.sources}
    if tokenizer is None and len(fingerprints) > 1:
        names = ", ".join(f"{source.name} {source.tokenizer_fingerprint}" for source in collection.sources)
        raise ScoringError(
            f"the sources have {len(fingerprints)} tokenizers ({names}), and labels need one for all of them: name the "
            "meter's model with --tokenizer"
        )
    first = collection.sources[0]
    chat, tools = chat_format or first.chat_format, tool_format or first.tool_format
    renderer = load_renderer(str(tokenizer or first.tokenizer), chat, tools)  # type: ignore[arg-type]
    return label_collection(collection, renderer, how, chat_format=chat, tool_format=tools)


def label_collection(
    collection: Collection, renderer: Renderer, how: Labelling, *, chat_format: str, tool_format: str
) -> Labelled:
    """Labels a collection in the tokens of `renderer`, the meter's; every source is counted with it.

    C and the grid of answers come from the training side alone. Raises ScoringError where no example or no
    success is left there, or a history that must be rendered again lacks its messages.
    """
    views = in_tokens_of(collection, renderer)
    groups = tuple(replace(g, trajectories=tuple(bare(t) for t in g.trajectories)) for g in views.groups)
    source_of = {t.id: collection.source_of(group) for group in groups for t in group.trajectories}
    task_of = {t.id: task_key(g, source_of[t.id].domain) for g in groups for t in g.trajectories}
    training, validation = split_by_task(
        [t for group in groups for t in group.trajectories],
        validation_fraction=how.validation_fraction,
        seed=how.seed,
        task_of=lambda t: task_of[t.id],
    )
    collect = partial(
        collect_labels,
        rule=how.rule,
        seed=how.seed,
        domain_of=lambda t: source_of[t.id].domain,
        action_lengths=None if how.count_reasoning else partial(lengths_without_reasoning, codec=renderer),
    )
    sets = {"training": collect(training)}
    sets["validation"] = collect(validation) if validation else LabelSet(examples=(), left_out={})
    examples = sets["training"].examples
    grid = log_spaced_grid(examples, size=how.grid_size, is_spellable=partial(can_answer, renderer))
    prompt = build_meter_prompt(renderer, grid, meter_text(renderer))
    longest = max(e.state.length for s in sets.values() for e in s.examples) + prompt.num_extra_tokens
    limit = how.max_sequence_tokens or longest
    if limit <= prompt.num_extra_tokens:
        raise ScoringError(
            f"--max-tokens {limit} leaves no room for a history: question and answer take {prompt.num_extra_tokens}"
        )
    names = {id: source.name for id, source in source_of.items()}
    return Labelled(
        labels=MeterLabels(
            training=examples,
            validation=sets["validation"].examples,
            prompt=prompt,
            chat_format=chat_format,
            tool_format=tool_format,
            failure_costs=failure_costs(examples),
            failure_cost=failure_cost(examples),
            max_sequence_tokens=min(limit, longest),
            settings=asdict(how),
            sources=tuple(source.name for source in collection.sources),
        ),
        groups=groups,
        rows=tuple(row for split, made in sets.items() for row in _rows(split, made.examples, names)),
        left_out={split: made.left_out for split, made in sets.items()},
    )


def bare(trajectory: Trajectory) -> Trajectory:
    """What a meter needs of a trajectory: tokens, messages and outcome. No logprobs, no routes, no gold answer."""
    segments = tuple(
        Segment(
            turns=tuple(
                Turn(
                    observation_tokens=turn.observation_tokens,
                    action_tokens=turn.action_tokens,
                    behavior_logprobs=(0.0,) * len(turn.action_tokens),
                    policy_version=turn.policy_version,
                    finish_reason=turn.finish_reason,
                    is_tool_call=turn.is_tool_call,
                )
                for turn in segment.turns
            ),
            trailing_observation_tokens=segment.trailing_observation_tokens,
        )
        for segment in trajectory.segments
    )
    return replace(trajectory, segments=segments, gold_answers=())


def _rows(split: str, examples: Sequence[LabeledState], names: dict[TrajectoryId, str]) -> list[LabelRow]:
    rows: list[LabelRow] = []
    for source in sorted({names[e.trajectory.id] for e in examples}):
        mine = [e for e in examples if names[e.trajectory.id] == source]
        counts = Counter(e.label.completion for e in mine)
        rows.append(
            LabelRow(
                split=split,
                source=source,
                trajectories=len({e.trajectory.id for e in mine}),
                successes=counts[True],
                failures=counts[False],
            )
        )
    return rows
