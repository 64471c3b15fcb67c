"""Rules of several fields about meters: what trains one, and how one is read. Listed in config/checks.py."""

from collections.abc import Iterator
from pathlib import Path

from megatrl.config.credit import DeltaTTGCredit, NoCredit
from megatrl.config.engines import TinyModel
from megatrl.config.environments import EvidenceHuntConfig, MeterPromptsConfig, SwitchboardConfig
from megatrl.config.recipe import OracleMeterConfig, Recipe
from megatrl.config.violations import Problem


def check_meter_prompts(recipe: Recipe) -> Iterator[Problem]:
    """A meter has one turn, and the tokenizer of its labels."""
    if not isinstance(recipe.env, MeterPromptsConfig):
        return
    if isinstance(recipe.model, TinyModel):
        yield Problem(
            paths=("model.kind", "env.kind"),
            message="a tiny model is made for an environment's words, and meter_prompts reads recorded tokens",
            remedy="set model.kind: hf and model.path to a model with the tokenizer of the labels",
        )
    if not isinstance(recipe.credit, NoCredit):
        yield Problem(
            paths=("credit.kind", "env.kind"),
            message="a forecast is one action, so there is no credit to spread over several",
            remedy="set credit.kind: none",
        )


def check_label_files(recipe: Recipe) -> Iterator[Problem]:
    """Named labels exist."""
    if isinstance(recipe.env, MeterPromptsConfig) and not Path(recipe.env.labels, "labels.json").is_file():
        yield Problem(
            paths=("env.labels",),
            message="holds no labels.json",
            remedy="make it with `megatrl meter collect` and `megatrl meter label`",
        )


def check_readout(recipe: Recipe) -> Iterator[Problem]:
    """A decoded answer has a bit and a number, and no probability."""
    credit = recipe.credit
    is_probability = isinstance(credit, DeltaTTGCredit) and credit.target in ("outcome", "completion_prob")
    if isinstance(credit, DeltaTTGCredit) and is_probability and credit.readout == "decode":
        yield Problem(
            paths=("credit.readout", "credit.target"),
            message="a decoded answer says 0 or 1, and this target reads a probability",
            remedy="set credit.readout: candidates, or credit.target: binary",
        )


def check_oracle_meter(recipe: Recipe) -> Iterator[Problem]:
    """An oracle knows states of its environment, in tokens, before the end."""
    if not isinstance(recipe.meter, OracleMeterConfig):
        return
    if not isinstance(recipe.env, EvidenceHuntConfig | SwitchboardConfig):
        yield Problem(
            paths=("meter.kind", "env.kind"),
            message="this environment does not know the remaining work of a state",
            remedy="use evidence_hunt or switchboard, or a trained or frozen meter",
        )
    if isinstance(recipe.credit, DeltaTTGCredit) and recipe.credit.terminal == "meter":
        yield Problem(
            paths=("credit.terminal", "meter.kind"),
            message="an oracle answers for decision states only",
            remedy="set credit.terminal: outcome",
        )
