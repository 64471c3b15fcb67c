"""Rules about `actor.router`: what a mixture model's router may do in training. Listed in config/checks.py."""

from collections.abc import Iterator

from megatrl.config.engine_checks import shape_of_recipe
from megatrl.config.recipe import Recipe
from megatrl.config.violations import Problem


def check_router_model(recipe: Recipe) -> Iterator[Problem]:
    """Router switches need a router."""
    shape, router = shape_of_recipe(recipe), recipe.actor.router
    if shape is None or shape.is_mixture:
        return
    for name in ("replay", "load_balancing_coefficient", "z_loss_coefficient"):
        if getattr(router, name):
            yield Problem(
                paths=(f"actor.router.{name}", "model.kind"),
                message=f"a {shape.family} model is dense: it has no experts to choose from",
                remedy="delete it here, or use a mixture model",
            )


def check_load_balancing(recipe: Recipe) -> Iterator[Problem]:
    """A load-balancing loss has a weight, and the counts it needs before the forward pass."""
    router = recipe.actor.router
    coefficient = "actor.router.load_balancing_coefficient"
    if router.load_balancing == "none":
        if router.load_balancing_coefficient:
            yield Problem(
                paths=(coefficient, "actor.router.load_balancing"),
                message="is read by a load-balancing loss only",
                remedy="set actor.router.load_balancing: sequence, or delete it",
            )
        return
    if not router.load_balancing_coefficient:
        yield Problem(
            paths=(coefficient, "actor.router.load_balancing"),
            message="is 0, so the load-balancing loss would do nothing",
            remedy="set it, for example to 0.001, or actor.router.load_balancing: none",
        )
    if router.load_balancing == "global" and not router.replay:
        yield Problem(
            paths=("actor.router.load_balancing", "actor.router.replay"),
            message="global counts over the whole minibatch have to be known before its first forward pass, which "
            "only recorded choices are",
            remedy="set actor.router.replay: true, or actor.router.load_balancing: sequence",
        )


def check_expert_bias(recipe: Recipe) -> Iterator[Problem]:
    """A selection bias that the servers do not have makes actor and server choose different experts."""
    router = recipe.actor.router
    if router.expert_bias_update_rate:
        why = "and recorded choices do not read it" if router.replay else "so actor and server would choose differently"
        yield Problem(
            paths=("actor.router.expert_bias_update_rate", "actor.router.replay"),
            message="no supported model family has an expert bias in its files or in SGLang, " + why,
            remedy="set it to 0 and use actor.router.load_balancing: sequence",
        )
