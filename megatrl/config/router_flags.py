"""Fields of a Hugging Face config.json that say how a mixture routes: each is mapped, neutral, or refused."""

from collections.abc import Mapping
from typing import Any

from megatrl.errors import ModelError

MAPPED = frozenset(
    {
        "num_experts",
        "num_local_experts",  # transformers 5 writes num_experts so
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    }
)
"""Read into a ModelShape."""

TRAINING_ONLY = frozenset({"router_aux_loss_coef", "output_router_logits"})
"""Change what transformers returns in training, not the model; `actor.router` has its own switches."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": ("softmax", None),
    "topk_method": ("greedy", None),
    "n_group": (1, None),
    "topk_group": (1, None),
    "routed_scaling_factor": (1, 1.0, None),
    "n_shared_experts": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "first_k_dense_replace": (0, None),
    "moe_layer_freq": (1, None),
    "router_jitter_noise": (0, 0.0, None),
    "router_bias": (False, None),
}
"""Accepted with the values that leave the routing of Qwen3-MoE as it is."""

_WORDS = ("router", "routed", "expert", "moe", "topk", "scoring", "n_group")


def check_router_flags(config: Mapping[str, Any], source: str) -> None:
    """Raise ModelError for a routing field with another meaning than Qwen3-MoE's; `source` names the file.

    A field that sounds like routing and is not known is refused as well: a model that routes in a way
    that nobody here implements gives plausible numbers and no error.
    """
    for key, value in config.items():
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                raise ModelError(f"{source}: {key} is {value!r}; supported is {NEUTRAL[key][0]!r}")
        elif key not in MAPPED | TRAINING_ONLY and any(word in key for word in _WORDS):
            raise ModelError(
                f"{source}: {key} = {value!r} is no routing field that megatrl knows; known are "
                f"{', '.join(sorted(MAPPED | TRAINING_ONLY | NEUTRAL.keys()))}"
            )
