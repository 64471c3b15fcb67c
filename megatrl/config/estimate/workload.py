"""How many tokens a step moves: what a recipe fixes, and what it leaves open and is assumed here."""

from dataclasses import dataclass

from megatrl.config.recipe import Recipe

QUESTION_TOKENS = 32
"""Assumed: wrapper and answer, or question and candidate answers, at one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tokens of one step. `longest` bounds memory, the means give time."""

    num_episodes: int
    longest: int  # tokens of the longest trajectory
    mean_tokens: float  # of a trajectory
    action_share: float  # of a trajectory's tokens that the policy samples
    mean_turns: float
    microbatch_tokens: int  # of the fullest pack
    num_minibatches: int
    has_answer_probe: bool = False  # TRACE: the frozen reference scores an answer at every state
    has_reference: bool = False  # KL term: the frozen reference scores the policy's tokens
    has_meter: bool = False  # DeltaTTG: a second frozen model forecasts at every state
    has_entropy: bool = False

    @property
    def num_tokens(self) -> float:
        return self.num_episodes * self.mean_tokens

    @property
    def num_actions(self) -> float:
        return self.num_tokens * self.action_share

    @property
    def question_tokens(self) -> float:
        """Tokens of what a frozen model is asked at every state."""
        return self.num_episodes * (self.mean_turns + 1) * QUESTION_TOKENS

    @property
    def tokens_apart(self) -> float:
        """Tokens of one frozen pass over every state on its own: the states' prefixes grow evenly to the whole."""
        return self.num_tokens * (self.mean_turns + 1) / 2 + self.question_tokens

    @property
    def tokens_shared(self) -> float:
        """Tokens of one frozen pass that computes what states share once."""
        return self.num_tokens + self.question_tokens

    def microbatches(self, num_data_ranks: int) -> int:
        """Microbatches of one data rank in one minibatch, at the mean length; at least one."""
        tokens = self.num_tokens / self.num_minibatches / num_data_ranks
        return max(1, -(-int(tokens) // self.microbatch_tokens))


def workload_of(recipe: Recipe, *, mean_tokens: float | None = None, action_share: float | None = None) -> Workload:
    """Returns the workload of a recipe's steps.

    Not known before a run, and therefore assumed unless given: trajectories are half as long as the longest, play half
    of the turns, and their share of sampled tokens is max_action_tokens : max_observation_tokens.
    """
    rollout = recipe.rollout
    turn = rollout.max_action_tokens + rollout.max_observation_tokens
    longest = min(rollout.context_tokens, rollout.max_turns * turn + rollout.max_observation_tokens)
    credit = recipe.credit.kind
    return Workload(
        num_episodes=recipe.batch.num_groups * recipe.batch.group_size,
        longest=longest,
        mean_tokens=mean_tokens or longest / 2,
        action_share=action_share or rollout.max_action_tokens / turn,
        mean_turns=max(1.0, min(rollout.max_turns, recipe.env.max_turns) / 2),
        microbatch_tokens=max(recipe.batch.microbatch_tokens, longest),
        num_minibatches=recipe.batch.num_minibatches,
        has_answer_probe=credit == "trace",
        has_reference=recipe.loss.kl_coefficient > 0,
        has_meter=credit == "deltattg",
        has_entropy=recipe.loss.entropy_coefficient > 0,
    )
