"""Rules of several fields about the engines: models, layouts, devices, limits. Listed in config/checks.py."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatrl.config.engines import HFModel, TinyModel
from megatrl.config.model_shape import ModelShape, read_model_shape, tiny_model_shape
from megatrl.config.plan import check_layout
from megatrl.config.recipe import FrozenMeter, Recipe
from megatrl.config.violations import Problem
from megatrl.errors import ModelError

SERVER_MARGIN_TOKENS = 8
"""SGLang (0.5.23) refuses prompts within 6 tokens of its context, and cuts what it samples before the very end."""


def check_token_limits(recipe: Recipe) -> Iterator[Problem]:
    """An action and an observation fit into the context, and a sequence into the server's cache."""
    rollout = recipe.rollout
    for name in ("max_action_tokens", "max_observation_tokens"):
        if getattr(rollout, name) >= rollout.context_tokens:
            yield Problem(
                paths=(f"rollout.{name}", "rollout.context_tokens"),
                message="leaves no room in rollout.context_tokens for anything else",
                remedy=f"set it below {rollout.context_tokens}, or raise rollout.context_tokens",
            )
    cache, needed = rollout.servers.max_total_tokens, rollout.context_tokens + SERVER_MARGIN_TOKENS
    if cache is not None and cache < needed:
        yield Problem(
            paths=("rollout.servers.max_total_tokens", "rollout.context_tokens"),
            message=f"one trajectory would not fit into the server's cache: SGLang needs {SERVER_MARGIN_TOKENS} tokens "
            f"more than rollout.context_tokens = {rollout.context_tokens}",
            remedy=f"set it to {needed} or more, or to null",
        )


def check_turn_limits(recipe: Recipe) -> Iterator[Problem]:
    """The smaller of the two turn limits ends an episode."""
    if recipe.env.max_turns > recipe.rollout.max_turns:
        yield Problem(
            paths=("env.max_turns", "rollout.max_turns"),
            message="the environment allows more turns than the rollout plays, so its own limit is never reached",
            remedy=f"set rollout.max_turns to {recipe.env.max_turns} or more",
        )


def check_learning_rate(recipe: Recipe) -> Iterator[Problem]:
    """The schedule goes down, and within the run."""
    optimizers = {"actor.optimizer": (recipe.actor.optimizer, "train.num_steps", recipe.train.num_steps)}
    if recipe.start.kind == "sft":
        optimizers["start.sft.optimizer"] = (
            recipe.start.sft.optimizer,
            "start.sft.num_steps",
            recipe.start.sft.num_steps,
        )
    if recipe.meter.kind == "trained" and recipe.meter.sft is not None:
        optimizers["meter.sft.optimizer"] = (
            recipe.meter.sft.optimizer,
            "meter.sft.num_steps",
            recipe.meter.sft.num_steps,
        )
    for path, (optimizer, steps_path, num_steps) in optimizers.items():
        if optimizer.min_lr > optimizer.lr:
            yield Problem(
                paths=(f"{path}.min_lr", f"{path}.lr"),
                message="is above lr, so the rate would rise",
                remedy="set it to at most lr",
            )
        if optimizer.warmup_steps >= (optimizer.decay_steps or num_steps):
            yield Problem(
                paths=(f"{path}.warmup_steps", f"{path}.decay_steps", steps_path),
                message="the warm-up does not end before the schedule does",
                remedy=f"set it below {optimizer.decay_steps or num_steps}",
            )


def check_devices(recipe: Recipe) -> Iterator[Problem]:
    """Where the roles run decides how weights can travel."""
    actor, servers, publish = recipe.actor, recipe.rollout.servers, recipe.publish
    is_colocated = recipe.placement.kind == "colocated"
    if is_colocated and actor.device != servers.device:
        yield Problem(
            paths=("rollout.servers.device", "actor.device", "placement.kind"),
            message="colocated roles share devices, but theirs differ",
            remedy=f"set both to {actor.device}, or placement.kind: separate",
        )
    if is_colocated and publish.route == "broadcast" and actor.device == "cuda":
        yield Problem(
            paths=("publish.route", "placement.kind"),
            message="NCCL refuses two processes on one device, so colocated roles cannot broadcast",
            remedy="set publish.route: tensor",
        )
    num_devices = servers.num_servers * servers.tensor
    if is_colocated and actor.device == "cuda" and num_devices > actor.layout.world_size:
        yield Problem(
            paths=("rollout.servers.num_servers", "rollout.servers.tensor", "actor.layout.world_size"),
            message=f"{servers.num_servers} x {servers.tensor} = {num_devices} devices for servers, but the actor "
            f"they share them with has {actor.layout.world_size}",
            remedy="lower rollout.servers.num_servers or rollout.servers.tensor",
        )


def check_precision(recipe: Recipe) -> Iterator[Problem]:
    """Actor and server compute in one precision, or their logprobs differ more than they need to."""
    if recipe.actor.precision != recipe.rollout.servers.precision:
        yield Problem(
            paths=("rollout.servers.precision", "actor.precision"),
            message="differs from actor.precision, which adds to the mismatch between actor and server",
            remedy=f"set it to {recipe.actor.precision}",
            is_warning=True,
        )


OWNED_SGLANG_ARGUMENTS: Mapping[str, str] = {
    "model_path": "model.path",
    "model": "model.path",
    "tokenizer_path": "model.path",
    "tp_size": "rollout.servers.tensor",
    "tensor_parallel_size": "rollout.servers.tensor",
    "device": "rollout.servers.device",
    "dtype": "rollout.servers.precision",
    "context_length": "rollout.context_tokens",
    "max_total_tokens": "rollout.servers.max_total_tokens",
    "mem_fraction_static": "rollout.servers.mem_fraction_static",
    "weight_version": "the publisher",
    "random_seed": "seed",
    "enable_return_routed_experts": "actor.router.replay",
    **dict.fromkeys(("host", "port", "nccl_port", "dp_size", "nnodes", "node_rank", "use_ray"), "the launcher"),
    **dict.fromkeys(("skip_tokenizer_init", "skip_server_warmup"), "the launcher"),
}
"""SGLang arguments that megatrl sets from its own configuration, and what sets them."""


def check_sglang_arguments(recipe: Recipe) -> Iterator[Problem]:
    """The pass-through to SGLang may not set what megatrl sets itself."""
    for name in recipe.rollout.servers.sglang:
        owner = OWNED_SGLANG_ARGUMENTS.get(name.replace("-", "_"))
        if owner is not None:
            yield Problem(
                paths=(f"rollout.servers.sglang.{name}",),
                message=f"is set by {owner}",
                remedy="delete it here",
            )


def check_tiny_model(recipe: Recipe) -> Iterator[Problem]:
    """Sizes of a tiny model that contradict each other."""
    model = recipe.model
    if not isinstance(model, TinyModel):
        return
    if model.num_heads % model.num_kv_heads:
        yield Problem(
            paths=("model.num_heads", "model.num_kv_heads"),
            message="is not a multiple of num_kv_heads",
            remedy=f"for example {model.num_kv_heads * 2}",
        )
    if model.family == "qwen3_moe" and model.num_experts_per_token > model.num_experts:
        yield Problem(
            paths=("model.num_experts_per_token", "model.num_experts"),
            message="is more than the model has experts",
            remedy=f"set it to at most {model.num_experts}",
        )


def check_layout_fits(recipe: Recipe) -> Iterator[Problem]:
    """Parallel degrees divide the processes and the model."""
    shape = shape_of_recipe(recipe)
    if shape is None:  # the files are not here; check_model_files says so
        return
    for sentence in check_layout(recipe.actor.layout, shape):
        message, _, remedy = sentence.partition("; ")
        degrees = [name for name in type(recipe.actor.layout).model_fields if re.search(rf"layout\.{name}\b", sentence)]
        yield Problem(
            paths=tuple(f"actor.layout.{name}" for name in degrees) or ("actor.layout",),
            message=message,
            remedy=remedy or "change the degree, or the model",
        )


def shape_of_recipe(recipe: Recipe) -> ModelShape | None:
    """Returns the shape of the recipe's model; None where its files are not here (check_model_files says so)."""
    if isinstance(recipe.model, TinyModel):
        return tiny_model_shape(recipe.model, vocab_size=1)  # no rule of the layout depends on the vocabulary
    try:
        return read_model_shape(recipe.model.path)
    except ModelError:
        return None


def check_chat_format(recipe: Recipe) -> Iterator[Problem]:
    """The model's vocabulary has the special tokens of the chat format."""
    shape, is_tiny = shape_of_recipe(recipe), isinstance(recipe.model, TinyModel)
    if shape is None:
        return
    is_llama, is_llama_chat = shape.family == "llama3", recipe.rollout.chat_format == "llama3"
    if (is_llama_chat and not is_llama) or (is_llama and not is_llama_chat and not is_tiny):  # tiny llamas know both
        yield Problem(
            paths=("rollout.chat_format",),
            message=f"a {shape.family} model is not made for this format",
            remedy=f"set it to {'llama3' if is_llama else 'chatml'}",
            is_warning=not is_tiny,
        )


def check_server_degree(recipe: Recipe) -> Iterator[Problem]:
    """SGLang splits attention heads over its devices."""
    shape, degree = shape_of_recipe(recipe), recipe.rollout.servers.tensor
    if shape is not None and shape.num_heads % degree:
        yield Problem(
            paths=("rollout.servers.tensor",),
            message=f"does not divide the model's {shape.num_heads} attention heads",
            remedy="set it to a divisor of them",
        )


def check_context_fits_model(recipe: Recipe) -> Iterator[Problem]:
    """The model knows as many positions as a trajectory may have, and the few that SGLang keeps for itself."""
    shape = shape_of_recipe(recipe)
    if shape is None:
        return
    most = shape.max_positions - SERVER_MARGIN_TOKENS
    if recipe.rollout.context_tokens > most:
        yield Problem(
            paths=("rollout.context_tokens", "model.kind"),
            message=f"the model has {shape.max_positions} positions, of which SGLang keeps {SERVER_MARGIN_TOKENS}",
            remedy=f"set it to at most {most}" if most > 1 else "use a model with more positions",
        )


def check_model_files(recipe: Recipe) -> Iterator[Problem]:
    """Named model directories exist and are of a supported family."""
    if isinstance(recipe.model, HFModel):
        try:
            read_model_shape(recipe.model.path)
        except ModelError as error:
            yield Problem(
                paths=("model.path",), message=error.message, remedy="download the model there, or correct it"
            )
    if isinstance(recipe.meter, FrozenMeter) and not Path(recipe.meter.path).is_dir():
        yield Problem(
            paths=("meter.path",),
            message="no such directory",
            remedy="name a meter that an earlier run has written, or set meter.kind: trained",
        )


def check_scoring_backend(recipe: Recipe) -> Iterator[Problem]:
    """A forest cannot be cut over context ranks; a server reads given tokens at temperature 1 only."""
    context = recipe.actor.layout.context
    has_scorer = recipe.credit.kind in ("trace", "deltattg") or recipe.loss.kl_coefficient > 0
    if recipe.scoring.backend == "tree" and context > 1 and (has_scorer or recipe.meter.kind != "none"):
        yield Problem(
            paths=("scoring.backend", "actor.layout.context"),
            message=f"the tree backend does not run under context parallelism ({context})",
            remedy="set scoring.backend: independent",
        )
    temperature = recipe.rollout.sampling.temperature
    if recipe.scoring.backend == "sglang" and recipe.loss.kl_coefficient > 0 and temperature != 1.0:
        yield Problem(
            paths=("scoring.backend", "loss.kl_coefficient", "rollout.sampling.temperature"),
            message=f"a server reads given tokens at temperature 1, the KL term compares at {temperature:g}",
            remedy="set scoring.backend: tree",
        )
