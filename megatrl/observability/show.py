"""How a person reads a step: a table of its trajectories, and each conversation with its credit."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
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
    """One row for each prompt group: rewards in order, lengths, endings, the range of its credit."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group", overflow="fold")
    table.add_column("rewards", min_width=15)
    table.add_column("turns", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("advantages", justify="right", no_wrap=True)
    table.add_column("ended")
    has_dropped = any(record.dropped for record in records)
    if has_dropped:
        table.add_column("dropped", overflow="fold")
    for record in records:
        group = record.group
        values = [value for note in record.notes for turn in note.advantages or () for value in turn]
        endings = Counter(str(trajectory.termination) for trajectory in group.trajectories)
        table.add_row(
            Text(f"{group.prompt.prompt_id}/{group.group_id}"),
            Text(" ").join(_outcome(trajectory) for trajectory in group.trajectories),
            _number(_mean([trajectory.num_turns for trajectory in group.trajectories]), digits=1),
            _number(_mean([trajectory.num_action_tokens for trajectory in group.trajectories]), digits=0),
            f"{min(values):+.2f} {max(values):+.2f}" if values else "-",
            Text(", ".join(name if len(endings) == 1 else f"{count} {name}" for name, count in endings.most_common())),
            *([Text(record.dropped, style="magenta")] if has_dropped else []),
        )
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
    for name, values in note.details.items():
        if index < len(values):
            line.append(f"  {name} ", style="dim")
            line.append(_number(values[index]))
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
        return Text("?", style="magenta")
    return Text(f"{trajectory.reward:.3g}", style="green" if trajectory.success else "red")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _signed(value: float) -> Text:
    if math.isnan(value):
        return Text("-")
    return Text(f"{value:+.3f}", style="green" if value > 0 else "red" if value < 0 else "")
