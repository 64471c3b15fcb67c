"""An endless, resumable stream of prompts: its whole state is one integer."""

from typing import Protocol

from megatrl.data.trajectories import Prompt


class PromptSource(Protocol):
    """Gives the prompt at a position of an endless sequence.

    A pure function of the position: the same source asked twice, in any order and after any
    restart, answers with equal prompts. Generated environments make a new task for each position;
    finite sets are shuffled again by (seed, epoch).
    """

    def prompt(self, position: int) -> Prompt: ...


class PromptStream:
    """Takes prompts in order from a source. `position` is all that a checkpoint has to keep."""

    def __init__(self, source: PromptSource, position: int = 0) -> None:
        if position < 0:
            raise ValueError(f"position of a prompt stream is {position}; it counts from 0")
        self._source = source
        self._position = position

    @property
    def position(self) -> int:
        """Number of prompts taken so far, over all runs of the stream."""
        return self._position

    def take(self, count: int) -> tuple[Prompt, ...]:
        """The next `count` prompts; the position moves only when all of them could be made."""
        if count < 0:
            raise ValueError(f"cannot take {count} prompts; the count is 0 or more")
        prompts = tuple(self._source.prompt(self._position + offset) for offset in range(count))
        self._position += count
        return prompts

    def seek(self, position: int) -> None:
        """Continue at a position that an earlier stream reported."""
        if position < 0:
            raise ValueError(f"position of a prompt stream is {position}; it counts from 0")
        self._position = position
