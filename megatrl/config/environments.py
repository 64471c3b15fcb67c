"""Sections of the environments."""

from typing import Annotated, Literal

from pydantic import Field

from megatrl.config.section import Section


class EvidenceHuntConfig(Section):
    """Multi-hop evidence gathering with text tools; a task where turn-level credit matters."""

    kind: Literal["evidence_hunt"] = "evidence_hunt"
    num_questions: int = Field(default=8, gt=0)
    """Question types; each has one fixed chain of documents that the policy has to learn."""
    num_documents: int = Field(default=12, gt=0)
    num_hops: int = Field(default=4, gt=0)
    """Documents in a chain, and values in an answer."""
    num_values: int = Field(default=6, gt=1)
    """Values a clue can take."""
    max_turns: int = Field(default=8, gt=0)


class SwitchboardConfig(Section):
    """Bring switches into a learnt pattern; a task where an action can undo the progress of others."""

    kind: Literal["switchboard"] = "switchboard"
    num_patterns: int = Field(default=8, gt=0)
    num_switches: int = Field(default=5, gt=1, le=16)
    max_turns: int = Field(default=9, gt=1)


class TextWorldConfig(Section):
    """Games generated on the spot by TextWorld (optional extra `textworld`)."""

    kind: Literal["textworld"] = "textworld"
    challenge: Literal["coin_collector", "treasure_hunter", "cooking", "simple"] = "coin_collector"
    level: int = Field(default=1, gt=0)
    num_games: int = Field(default=4, gt=0)
    show_admissible: bool = True
    max_turns: int = Field(default=30, gt=0)


class MeterPromptsConfig(Section):
    """One-turn prompts that train a meter: a recorded state, answered by a forecast. Spec 2.4."""

    kind: Literal["meter_prompts"] = "meter_prompts"
    labels: str
    """Directory made by `megatrl meter label`."""
    accuracy: Literal["log", "relative"] = "log"
    """How a right completion's tokens to go are judged: by their logarithm, or by the relative error."""
    tau: float = Field(default=1.0, gt=0)
    """Scale of the error's logarithm; larger is milder. At 1 the accuracy is the smaller number over the larger."""
    completion_weight: float = Field(default=0.5, gt=0, lt=1)
    """Reward of the right completion alone; the accuracy of the number earns the rest up to 1."""
    failure_earns_ttg_weight: bool = True
    """A right failure earns 1; false gives it completion_weight only, so that failure is never the cheap guess."""

    @property
    def max_turns(self) -> int:
        return 1


EnvConfig = Annotated[
    EvidenceHuntConfig | SwitchboardConfig | TextWorldConfig | MeterPromptsConfig, Field(discriminator="kind")
]
