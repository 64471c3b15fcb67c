"""How a person reads a step: a table of its trajectories, and each conversation with its credit."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megatrl.data.trajectories import Trajectory, Turn
from megatrl.data.wire import GroupRecord, TrajectoryNotes
from megatrl.errors import TrajectoryError
from megatrl.observability.trajectories import TrajectoryStore

_ROLE_STYLES = {"system": "dim", "user": "cyan", "tool": "yellow", "assistant": "bold green"}


def render_step(
    run_dir: Path | str,
    step: int,
    *,
    trajectory: str | None = None,
    limit: int = 2,
    stream: str = "step",
    console: Console | None = None,
) -> None:
    """Print the step's table, then the first `limit` conversations, or the one named `trajectory`.

    `trajectory` is a whole id (`prompt/group/index.attempt`) or any part that names one only.
    `stream`: "step" for the step's rollouts, "eval_step" for the evaluation after it.

    Raises:
        TrajectoryError: the step is not stored, or no or several trajectories match.
    """
    console = console or Console()
    records = TrajectoryStore(Path(run_dir)).read(step, stream)
    pairs = [(record, index) for record in records for index in range(len(record.group.trajectories))]
    if trajectory is None:
        console.print(step_table(records, title=f"step {step}"))
        chosen = pairs[:limit]
    else:
        chosen = [_matching(pairs, trajectory)]
    for record, index in chosen:
        console.print(conversation(record, index))


def step_table(records: Sequence[GroupRecord], *, title: str = "") -> Table:
    """One row for each trajectory: outcome, length, ending, credit."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("trajectory", overflow="fold")
    for name in ("reward", "turns", "tokens", "logprob", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    table.add_column("not trained: why")
    for record in records:
        for trajectory, note in zip(record.group.trajectories, record.notes, strict=True):
            advantages = [value for turn in note.advantages or () for value in turn]
            table.add_row(
                Text(str(trajectory.id)),
                _outcome(trajectory),
                str(trajectory.num_turns),
                str(trajectory.num_action_tokens),
                _number(_mean([value for turn in trajectory.turns for value in turn.behavior_logprobs])),
                _signed(_mean(advantages)),
                str(trajectory.termination),
                Text(record.dropped or ("" if trajectory.is_trainable else "unknown outcome"), style="magenta"),
            )
        table.add_section()
    return table


def conversation(record: GroupRecord, index: int) -> RenderableType:
    """One trajectory as a panel: messages in order, and below each action its numbers."""
    trajectory, note = record.group.trajectories[index], record.notes[index]
    head = Text.assemble(
        ("reward ", "dim"), _outcome(trajectory), ("  ended ", "dim"), str(trajectory.termination),
        ("  turns ", "dim"), str(trajectory.num_turns), ("  action tokens ", "dim"), str(trajectory.num_action_tokens),
    )  # fmt: skip
    parts: list[RenderableType] = [head]
    if record.dropped:
        parts.append(Text(f"not trained: {record.dropped}", style="magenta"))
    if trajectory.gold_answers:
        parts.append(Text(f"gold: {' | '.join(trajectory.gold_answers)}", style="dim"))
    if trajectory.error:
        parts.append(Text(f"error: {trajectory.error}", style="red"))
    parts.extend(_messages(trajectory, note))
    return Panel(Group(*parts), title=Text(str(trajectory.id)), title_align="left", border_style="blue")


def _messages(trajectory: Trajectory, note: TrajectoryNotes) -> list[RenderableType]:
    parts: list[RenderableType] = []
    turn_index = 0
    for message in trajectory.messages:
        role = str(message.get("role", "?"))
        parts.append(Rule(Text(role, style=_ROLE_STYLES.get(role, "")), align="left", style="dim"))
        # Text, not markup: a conversation is full of square brackets.
        parts.append(Text(str(message.get("content", ""))))
        if role == "assistant" and turn_index < trajectory.num_turns:
            parts.append(_turn_line(trajectory.turns[turn_index], turn_index, note))
            turn_index += 1
    # Turns without a message of their own, e.g. where the episode stores no text.
    parts.extend(_turn_line(turn, index, note) for index, turn in enumerate(trajectory.turns) if index >= turn_index)
    last = len(trajectory.turns)
    if note.answer is not None and len(note.answer.logprobs) > last:
        parts.append(Text(f"  end state: gold logprob {note.answer.logprobs[last]:.3f}", style="dim"))
    if note.meter is not None and note.meter.terminal is not None:
        parts.append(Text("  end state: " + _forecast(note, last), style="dim"))
    return parts


def _turn_line(turn: Turn, index: int, note: TrajectoryNotes) -> Text:
    line = Text.assemble(
        ("  turn ", "dim"), str(index + 1),
        ("  read ", "dim"), str(len(turn.observation_tokens)),
        ("  wrote ", "dim"), str(len(turn.action_tokens)),
        ("  logprob ", "dim"), _number(_mean(turn.behavior_logprobs)),
    )  # fmt: skip
    if note.advantages is not None and index < len(note.advantages):
        line.append("  credit ", style="dim")
        line.append_text(_signed(_mean(note.advantages[index])))
    if note.answer is not None and index < len(note.answer.logprobs):
        line.append("  gold logprob ", style="dim")
        line.append(f"{note.answer.logprobs[index]:.3f}")
    if note.meter is not None and index < len(note.meter.forecasts):
        line.append("  forecast ", style="dim")
        line.append(_forecast(note, index))
    if turn.penalty:
        line.append(f"  penalty {turn.penalty:g}", style="red")
    if turn.finish_reason != "stop":
        line.append(f"  {turn.finish_reason}", style="magenta")
    return line


def _forecast(note: TrajectoryNotes, index: int) -> str:
    if note.meter is None:
        return ""
    forecast = note.meter.forecasts[index] if index < len(note.meter.forecasts) else note.meter.terminal
    if forecast is None or not forecast.is_valid:
        return "unreadable"
    to_go = f", {forecast.tokens_to_go:.0f} tokens to go" if forecast.completion else ""
    return f"{'completes' if forecast.completion else 'fails'} (p={forecast.completion_prob:.2f}{to_go})"


def _matching(pairs: Sequence[tuple[GroupRecord, int]], wanted: str) -> tuple[GroupRecord, int]:
    names = [str(record.group.trajectories[index].id) for record, index in pairs]
    if wanted in names:
        return pairs[names.index(wanted)]
    found = [pair for pair, name in zip(pairs, names, strict=True) if wanted in name]
    if len(found) != 1:
        matching = [name for name in names if wanted in name] or names
        raise TrajectoryError(
            f"{wanted!r} names {len(found)} trajectories; name one of: {', '.join(matching[:10])}"
            + (" ..." if len(matching) > 10 else "")
        )
    return found[0]


def _outcome(trajectory: Trajectory) -> Text:
    if trajectory.reward is None:
        return Text("unknown", style="magenta")
    return Text(f"{trajectory.reward:.3g}", style="green" if trajectory.success else "red")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _signed(value: float) -> Text:
    if math.isnan(value):
        return Text("-")
    return Text(f"{value:+.3f}", style="green" if value > 0 else "red" if value < 0 else "")
