"""Sections of the credit rules. Formulas: docs/algorithms.md; defaults are the papers' settings."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatrl.config.section import Section


class GroupStatisticsConfig(Section):
    std: Literal["bessel", "population"] = "bessel"
    """Estimator of the standard deviation over the trajectories of a prompt group."""
    norm_std: bool = True
    """Divide by the standard deviation; false is Dr.GRPO."""
    step_expanded: bool = False
    """Count a trajectory once for each of its actions (verl-agent, DeltaTTG)."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class NoCredit(Section):
    """Every action token gets the trajectory's advantage: GRPO, Dr.GRPO, DAPO, GSPO."""

    kind: Literal["none"] = "none"


class DeltaTTGCredit(Section):
    """DeltaTTG, spec section 2. The defaults are the paper's."""

    kind: Literal["deltattg"] = "deltattg"
    rho: float = Field(default=0.2, ge=0, le=1)
    """Share of the uniform distribution mixed into the step shares."""
    max_multiplier: float = Field(default=5.0, ge=1)
    """Cap M on a token's multiplier; 1 is GRPO."""
    failure_cost: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Cost C in tokens of a state forecast to fail; auto = 1.25 x the 99th percentile of the meter's
    training labels, read from the frozen meter."""
    failure_cost_scale: float = Field(default=1.0, gt=0)
    """Multiplies the failure cost (for sweeps)."""
    target: Literal["ttg", "outcome", "completion_prob", "binary"] = "ttg"
    terminal: Literal["outcome", "meter", "carry"] = "outcome"
    """Cost of the state after the last action."""
    sign_aware: bool = True
    """False uses progress weights for negative advantages too."""
    softmax_temperature: float | None = Field(default=None, gt=0)
    """Shares by softmax of the signal at this temperature, in its unit; null is proportional to it."""
    spread: Literal["broadcast", "divide"] = "broadcast"
    cost_transform: Literal["identity", "log1p"] = "identity"
    parse_failure: Literal["failure_cost", "carry"] = "failure_cost"
    net_of_spent: bool = False
    """Subtract the action's own tokens from the step signal (diagnostic, not in the paper)."""
    readout: Literal["candidates", "decode"] = "candidates"
    """How the meter answers: candidate answers scored in one forward pass on the actor's ranks, or a short greedy
    decode, parsed, on a server of its own."""
    max_parse_failure_rate: float = Field(default=0.02, ge=0, le=1)
    """The run stops above this share of unparseable meter answers in one step."""

    @model_validator(mode="after")
    def _net_of_spent_counts_tokens(self) -> Self:
        if self.net_of_spent and (self.target != "ttg" or self.cost_transform != "identity"):
            raise ValueError(
                f"net_of_spent subtracts tokens, but target={self.target} with cost_transform={self.cost_transform} "
                "is not in tokens; use target: ttg with cost_transform: identity, or turn net_of_spent off"
            )
        return self


class TraceCredit(Section):
    """TRACE, spec section 3. The defaults are the paper's."""

    kind: Literal["trace"] = "trace"
    window: int = Field(default=3, ge=0)
    """K: turns whose temporal differences are averaged."""
    gamma: float = Field(default=0.8, gt=0, le=1)
    eps: float = Field(default=0.1, gt=0)
    """Added to the distance -l before the logarithm."""
    terminal_weight: float = Field(default=2.0, ge=0)
    """lambda_term: weight of the outcome advantage filled into the last turns."""
    alpha_outcome: float = 1.0
    alpha_turn: float = 0.2
    form: Literal["log_ratio", "raw", "remaining_gap", "initial_gap"] = "log_ratio"
    tail_scale: float | None = None
    """Group-mean rule for answer tokens; null is off (the paper leaves it undefined)."""
    use_aliases: bool = False
    """Score every accepted answer and take the best instead of the canonical one."""


class GiGPOCredit(Section):
    """GiGPO (arXiv 2505.10978)."""

    kind: Literal["gigpo"] = "gigpo"
    step_weight: float = Field(default=1.0, ge=0)
    gamma: float = Field(default=0.95, gt=0, le=1)
    mean_std_norm: bool = True
    similarity: float = Field(default=1.0, gt=0, le=1)
    """1 groups identical observations; below 1 groups by SequenceMatcher ratio."""


class HGPOCredit(Section):
    """HGPO (arXiv 2602.22817)."""

    kind: Literal["hgpo"] = "hgpo"
    history: int = Field(default=2, ge=0)
    alpha: float = 1.0
    gamma: float = Field(default=0.95, gt=0, le=1)
    base_group: bool = False


CreditConfig = Annotated[
    NoCredit | DeltaTTGCredit | TraceCredit | GiGPOCredit | HGPOCredit, Field(discriminator="kind")
]


class OverlongConfig(Section):
    """DAPO's length penalty on the trajectory's action tokens: 0 up to max - buffer, then linear to -1."""

    max_tokens: int = Field(gt=0)
    buffer_tokens: int = Field(gt=0)
    factor: float = Field(default=1.0, ge=0)
    floor: bool = True
    """Stop at -factor beyond max_tokens; false continues the line (verl)."""


class RewardConfig(Section):
    overlong: OverlongConfig | None = None
    success_threshold: float = 1.0
    """A trajectory counts as a success from this reward on."""
    invalid_action_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the row of a turn with an invalid action."""


class SelectionConfig(Section):
    drop_equal_rewards: bool = False
    """DAPO's filter: drop groups whose rewards are all equal. Refused together with TRACE."""
    max_rounds: int = Field(default=10, ge=1)
    """Rollout rounds to fill a batch when groups are dropped; then the step trains on what exists."""
    min_group_size: int = Field(default=2, ge=1)
    """Groups with fewer trainable trajectories get zero weight."""


class ClippedLoss(Section):
    """PPO clipped surrogate at token level with dual clip (GRPO, DAPO, DeltaTTG, TRACE)."""

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound c on -A for negative advantages; null turns it off."""


class SequenceLoss(Section):
    """GSPO (arXiv 2507.18071): one length-normalised ratio for each sequence."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)


class OffPolicyConfig(Section):
    """Correction of the mismatch between actor and rollout server, spec 5.1."""

    kind: Literal["none", "tis", "icepop"] = "none"
    low: float = Field(default=0.5, ge=0)
    """Icepop only: weights below become 0."""
    high: float = Field(default=2.0, gt=0)
    """TIS clips to it; icepop zeroes above it."""
    keep_rejected_in_denominator: bool = True


class LossConfig(Section):
    policy: Annotated[ClippedLoss | SequenceLoss, Field(discriminator="kind")] = ClippedLoss()
    reduction: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    constant_length: int | None = Field(default=None, gt=0)
    """Divisor of `reduction: constant` (Dr.GRPO), in tokens. It alone divides the sum over a minibatch's action tokens:
    the number of sequences does not."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: float = Field(default=0.0, ge=0)
    off_policy: OffPolicyConfig = OffPolicyConfig()
