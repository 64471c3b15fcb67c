"""The recipe: everything one run needs, in one immutable object."""

from typing import Annotated, Literal

from pydantic import Field

from megatrl.config.credit import (
    CreditConfig,
    GroupStatisticsConfig,
    LossConfig,
    NoCredit,
    RewardConfig,
    SelectionConfig,
)
from megatrl.config.engines import ActorConfig, ModelConfig, OptimizerConfig, PublishConfig, RolloutConfig
from megatrl.config.environments import EnvConfig
from megatrl.config.scoring import ScoringConfig
from megatrl.config.section import Section


class DemonstrationsConfig(Section):
    """Episodes of the environment's scripted policy of mixed quality."""

    num_episodes: int = Field(default=4096, gt=0)
    detour: float = Field(default=0.5, ge=0, le=1)
    """Probability of a useless action at a turn."""
    premature: float = Field(default=0.08, ge=0, le=1)
    """Probability of answering too early at a turn."""


class SFTConfig(Section):
    """Supervised fine-tuning on demonstrations or meter labels: loss on target tokens only."""

    num_steps: int = Field(default=300, gt=0)
    sequences_per_step: int = Field(default=64, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)


class ModelStart(Section):
    """Begin from the model's own weights."""

    kind: Literal["model"] = "model"


class SFTStart(Section):
    """Begin from a short SFT on demonstrations, made by the recipe and cached by content."""

    kind: Literal["sft"] = "sft"
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    sft: SFTConfig = SFTConfig()


StartConfig = Annotated[ModelStart | SFTStart, Field(discriminator="kind")]


class NoMeter(Section):
    kind: Literal["none"] = "none"


class FrozenMeter(Section):
    """A meter directory made by an earlier run."""

    kind: Literal["frozen"] = "frozen"
    path: str


class TrainedMeter(Section):
    """A meter trained by the recipe from recorded trajectories of several policies, then frozen."""

    kind: Literal["trained"] = "trained"
    num_policy_episodes: int = Field(default=512, ge=0)
    """Episodes sampled from the start policy."""
    num_scripted_episodes: int = Field(default=2048, ge=0)
    """Episodes of scripted policies with these detour rates, in equal parts."""
    detours: tuple[float, ...] = (0.05, 0.3, 0.6)
    max_prefixes_per_trajectory: int = Field(default=16, gt=0)
    sft: SFTConfig | None = SFTConfig()
    """null leaves the start policy as it is: a prompted model as the meter (ablation `trained: false`)."""


class OracleMeterConfig(Section):
    """The environment's own knowledge of the remaining work: for studies of the credit rule under a perfect meter."""

    kind: Literal["oracle"] = "oracle"
    failure_cost: float = Field(gt=0)
    """C in tokens."""


MeterConfig = Annotated[NoMeter | FrozenMeter | TrainedMeter | OracleMeterConfig, Field(discriminator="kind")]


class BatchConfig(Section):
    num_groups: int = Field(default=16, gt=0)
    """Prompts taken at each step."""
    group_size: int = Field(default=8, gt=0)
    """Trajectories for each prompt."""
    num_minibatches: int = Field(default=1, gt=0)
    """Optimizer steps for each step of the loop."""
    microbatch_tokens: int = Field(default=16384, gt=0)
    """Most tokens packed into one forward-backward; one longer sequence still gets its own."""


class CheckpointConfig(Section):
    every_steps: int = Field(default=20, gt=0)
    keep: int = Field(default=3, ge=1)
    """Newest checkpoints that stay; pinned ones are not counted."""
    pin_every: int | None = Field(default=None, gt=0)
    """Multiples of this step are saved too and never deleted."""
    asynchronous: bool = False
    """Written while training goes on, from a host copy of weights and optimizer state."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for the files of one checkpoint."""

    def is_due(self, step: int) -> bool:
        return step % self.every_steps == 0 or (self.pin_every is not None and step % self.pin_every == 0)


class EvaluationConfig(Section):
    every_steps: int = Field(default=10, gt=0)
    num_episodes: int = Field(default=128, ge=0)
    """Held-out episodes; 0 turns evaluation off."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""

    def is_due(self, step: int) -> bool:
        return self.num_episodes > 0 and step % self.every_steps == 0


class TrainConfig(Section):
    num_steps: int = Field(default=150, gt=0)
    max_mismatch: float = Field(default=0.02, gt=0)
    """Largest mean |actor logprob - server logprob| accepted at the first step."""


class PlacementConfig(Section):
    kind: Literal["separate", "colocated"] = "separate"
    """Colocated roles share devices and take turns; separate roles own theirs."""
    ready_timeout_s: float = Field(default=300.0, gt=0)


class ObserveConfig(Section):
    runs_dir: str = "runs"
    wandb: Literal["off", "offline", "online"] = "offline"
    tensorboard: bool = True


class Recipe(Section):
    """One run. The sections are passed on their own; nobody below the loop sees the whole."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0)
    model: ModelConfig
    start: StartConfig = ModelStart()
    env: EnvConfig
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    publish: PublishConfig = PublishConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig = BatchConfig()
    reward: RewardConfig = RewardConfig()
    group_statistics: GroupStatisticsConfig = GroupStatisticsConfig()
    selection: SelectionConfig = SelectionConfig()
    credit: CreditConfig = NoCredit()
    meter: MeterConfig = NoMeter()
    scoring: ScoringConfig = ScoringConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()


class ComparisonHeader(Section):
    """A comparison without its arms, whose keys are paths into the recipe."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    recipe: str
    """Path of the recipe, relative to this file."""
    seeds: tuple[int, ...] = ()
    """Every arm once for each seed, from a start of that seed's own; empty: once, with the recipe's seed."""


class Comparison(ComparisonHeader):
    """Several arms of one recipe from the same start: `megatrl compare`."""

    arms: dict[str, dict[str, object]]
    """Arm name -> overrides by dotted path, as `--set` would give them."""
