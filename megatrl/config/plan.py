"""Numbers derived from a recipe, and the checks that need several of its sections. No torch."""

from collections.abc import Iterable

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import ModelShape


def check_layout(layout: LayoutConfig, shape: ModelShape) -> list[str]:
    """Returns what makes a layout impossible for a model, one sentence each; [] means it fits.

    Each sentence gives the values seen and the nearest values that would work.
    """
    tensor, pipeline, expert, world = layout.tensor, layout.pipeline, layout.expert, layout.world_size
    violations = []
    if world % (tensor * pipeline):
        step = tensor * pipeline
        violations.append(
            f"layout.world_size={world} is not a multiple of layout.tensor={tensor} x layout.pipeline={pipeline} = "
            f"{step}; nearest world_size: {_or(v for v in (world // step * step, (world // step + 1) * step) if v)}"
        )
    elif (world // pipeline) % expert:
        violations.append(
            f"layout.expert={expert} does not divide layout.world_size / layout.pipeline = {world} / {pipeline} = "
            f"{world // pipeline}; nearest expert: {_or(_nearest_divisors(expert, world // pipeline))}"
        )
    divisible = {
        ("tensor", "num_heads"): (tensor, shape.num_heads),
        ("tensor", "num_kv_heads"): (tensor, shape.num_kv_heads),
        ("pipeline", "num_layers"): (pipeline, shape.num_layers),
    }
    if shape.is_mixture:
        divisible["expert", "num_experts"] = (expert, shape.num_experts)
        divisible["tensor", "expert_ffn_size"] = (expert_tensor_degree(layout), shape.expert_ffn_size)
    else:
        divisible["tensor", "ffn_size"] = (tensor, shape.ffn_size)
    for (degree_name, size_name), (degree, size) in divisible.items():
        if size % degree:
            violations.append(
                f"layout.{degree_name}={degree} does not divide the model's {size_name}={size}; "
                f"nearest {degree_name}: {_or(_nearest_divisors(degree, size))}"
            )
    if not shape.is_mixture and expert > 1:
        violations.append(f"layout.expert={expert} but the model ({shape.family}) has no experts; set it to 1")
    if shape.is_mixture and tensor > 1 and not layout.sequence_parallel:
        violations.append(
            f"layout.tensor={tensor} on a mixture model needs layout.sequence_parallel: true (Megatron's token "
            "dispatcher expects each tensor rank to hold its own tokens)"
        )
    if layout.sequence_parallel and tensor == 1:
        violations.append("layout.sequence_parallel: true needs layout.tensor > 1; set it to false")
    return violations


def expert_tensor_degree(layout: LayoutConfig) -> int:
    """Returns over how many tensor ranks one expert is cut: all of them without expert parallelism, else 1.

    With expert parallelism each expert is whole on one rank, and `expert` spreads over tensor x data.
    Whole experts without it are not possible: megatron-core 0.16.1 then sums their gradients over
    data ranks only, and the tensor ranks' replicas drift apart without an error.
    """
    return layout.tensor if layout.expert == 1 else 1


def _nearest_divisors(degree: int, size: int) -> list[int]:
    """Returns the divisors of `size` next below and next above `degree`, where they exist."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below, above = [d for d in divisors if d < degree], [d for d in divisors if d > degree]
    return [*below[-1:], *above[:1]]


def _or(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
