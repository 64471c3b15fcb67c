"""Our own trajectories in AgentProcessBench's form, with step labels from an environment that knows the way.

W_k is the number of actions that the best plan still needs before step k. A step is labelled

    +1  where W fell: the plan got shorter, or the step was the right final answer
    -1  where W rose, and for a wrong final answer
     0  where W stayed (a useless action), and for a last action that a limit cut off

The labels say what a step did, not whether the episode then succeeded; the benchmark's own labels also carry
an error on to the steps after it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

from megatrl.data.trajectories import PromptGroup, Trajectory
from megatrl.errors import ScoringError
from megatrl.meter.process_bench import ASSISTANT, ProcessRecord

Plan = Callable[[str], tuple[str, ...]]
"""Texts of the best actions from a state's observation key to the end."""


def oracle_labels(trajectory: Trajectory, plan: Plan) -> tuple[int, ...]:
    """One label for each turn of a trajectory with a known outcome."""
    work = [len(plan(turn.observation_key)) for turn in trajectory.turns]
    labels = [_sign(before - after) for before, after in pairwise(work)]
    last = trajectory.turns[-1]
    if trajectory.success:
        return (*labels, 1)
    is_answer = not (last.is_tool_call or trajectory.termination.is_truncation or _was_answered(trajectory))
    return (*labels, -1 if is_answer else 0)


def oracle_records(groups: Iterable[PromptGroup], plan: Plan, *, dataset: str) -> tuple[ProcessRecord, ...]:
    """Records of all trajectories with a known outcome. Queries are tasks; samples count within a task.

    Raises ScoringError where there is none.
    """
    queries: dict[str, int] = {}
    samples: Counter[str] = Counter()
    records: list[ProcessRecord] = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.success is None or not trajectory.turns or not trajectory.messages:
                continue
            task = trajectory.id.prompt_id
            records.append(
                ProcessRecord(
                    dataset=dataset,
                    query_index=queries.setdefault(task, len(queries)),
                    sample_index=samples[task],
                    messages=trajectory.messages,
                    step_labels=oracle_labels(trajectory, plan),
                    is_success=trajectory.success,
                )
            )
            samples[task] += 1
    if not records:
        raise ScoringError("no trajectory with a known outcome and its messages; there is nothing to write")
    return tuple(records)


def _was_answered(trajectory: Trajectory) -> bool:
    """True where the environment still said something after the last action: then it was no final answer."""
    return trajectory.messages[-1]["role"] != ASSISTANT


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
