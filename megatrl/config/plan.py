"""Numbers derived from a recipe, and the checks that need several of its sections. No torch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import ModelShape
from megatrl.config.pipeline import nearest, nearest_splits, split_of, split_problem


def check_layout(layout: LayoutConfig, shape: ModelShape) -> list[str]:
    """Returns what makes a layout impossible for a model, one sentence each; [] means it fits.

    Each sentence gives the degrees with their source (set, or a default) and, behind a semicolon, the
    nearest values that would work.
    """
    violations = [
        *_process_violations(layout, shape),
        *_head_violations(layout, shape),
        *_layer_violations(layout, shape),
        *_expert_violations(layout, shape),
    ]
    tensor = layout.tensor
    if shape.is_mixture and tensor > 1 and not layout.sequence_parallel:
        violations.append(
            f"{_seen(layout, 'tensor')} on a mixture model needs layout.sequence_parallel: true (Megatron's token "
            "dispatcher expects each tensor rank to hold its own tokens); set it to true"
        )
    if layout.sequence_parallel and tensor == 1:
        violations.append("layout.sequence_parallel: true needs layout.tensor > 1; set it to false")
    return violations


def expert_tensor_degree(layout: LayoutConfig) -> int:
    """Returns over how many ranks one expert is cut: as set, else all tensor ranks without expert parallelism, else 1.

    Experts have ranks of their own: expert_tensor x expert x pipeline of them hold the experts once, whatever
    tensor and context are.
    """
    if layout.expert_tensor is not None:
        return layout.expert_tensor
    return layout.tensor if layout.expert == 1 else 1


def sequence_multiple(context: int) -> int:
    """Returns what the length of each packed sequence must be a multiple of.

    A context rank holds one chunk from the front of every sequence and its mirror image from the back, so
    that all have equally much attention to compute.
    """
    return 2 * context if context > 1 else 1


def length_multiple(*, tensor: int, context: int, sequence_parallel: bool) -> int:
    """Returns what the length of a whole pack must be a multiple of: CP x lcm(2, TP), TP only under SP.

    Each context rank's share has to divide into two chunks, and over the tensor ranks under sequence parallelism.
    """
    tensor = tensor if sequence_parallel else 1
    return context * math.lcm(2, tensor) if context > 1 else tensor


def _process_violations(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """The degrees of the dense part, and those of the experts, each divide world_size."""
    yield from _not_a_multiple(layout, ("tensor", "pipeline", "context"))
    if shape.is_mixture:
        yield from _not_a_multiple(layout, ("expert_tensor", "expert", "pipeline"))


def _not_a_multiple(layout: LayoutConfig, names: Sequence[str]) -> Iterator[str]:
    product = _product(layout, names)
    if layout.world_size % product == 0:
        return

    def fits(changed: LayoutConfig) -> bool:
        return changed.world_size % _product(changed, names) == 0

    choices = {"world_size": _nearest_of(layout, "world_size", fits, most=layout.world_size + product)}
    choices |= {name: _nearest_of(layout, name, fits, most=layout.world_size) for name in names}
    listed = " x ".join(_seen(layout, name) for name in names)
    yield f"{_seen(layout, 'world_size')} is not a multiple of {listed} = {product}; {_nearest_values(choices)}"


def _product(layout: LayoutConfig, names: Sequence[str]) -> int:
    return math.prod(_degree(layout, name) for name in names)


def _degree(layout: LayoutConfig, name: str) -> int:
    return expert_tensor_degree(layout) if name == "expert_tensor" else getattr(layout, name)


def _nearest_of(layout: LayoutConfig, name: str, fits: Callable[[LayoutConfig], bool], *, most: int) -> list[int]:
    """The nearest values of one degree, with what follows from it by default."""
    return nearest(lambda value: fits(layout.model_copy(update={name: value})), _degree(layout, name), most=most)


def _head_violations(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    tensor = layout.tensor
    yield from _not_dividing(layout, "tensor", tensor, "num_heads", shape.num_heads)
    if not fits_kv_heads(shape, tensor):
        choices = nearest(
            lambda value: shape.num_heads % value == 0 and fits_kv_heads(shape, value), tensor, most=shape.num_heads
        )
        yield (
            f"{_seen(layout, 'tensor')} and the model's num_kv_heads={shape.num_kv_heads} do not divide each other, or "
            f"not the {_qkv_rows(shape)} rows of the fused query, key and value of num_heads={shape.num_heads} and "
            f"head_dim={shape.head_dim}; {_nearest_values({'tensor': choices})}"
        )
    if not shape.is_mixture:
        yield from _not_dividing(layout, "tensor", tensor, "ffn_size", shape.ffn_size)


def fits_kv_heads(shape: ModelShape, tensor: int) -> bool:
    """Returns whether KV heads can be spread over tensor ranks: whole heads to each, or each head to several."""
    divides = shape.num_kv_heads % tensor == 0 or tensor % shape.num_kv_heads == 0
    return divides and _qkv_rows(shape) % tensor == 0


def _qkv_rows(shape: ModelShape) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def _layer_violations(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    if problem := split_problem(shape.num_layers, **split_of(layout)):  # type: ignore[arg-type]
        names = ["pipeline", *(n for n in ("virtual_pipeline", *_STAGES) if n in layout.model_fields_set)]
        listed = ", ".join(_seen(layout, name) for name in names)
        choices = nearest_splits(shape.num_layers, layout)
        yield f"{listed} do not fit num_layers={shape.num_layers}: {problem}; {_nearest_values(choices)}"


_STAGES = ("first_stage_layers", "last_stage_layers")


def _expert_violations(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    if shape.is_mixture:
        yield from _not_dividing(layout, "expert", layout.expert, "num_experts", shape.num_experts)
        degree = expert_tensor_degree(layout)
        yield from _not_dividing(layout, "expert_tensor", degree, "expert_ffn_size", shape.expert_ffn_size)
        return
    for name, none in (("expert", 1), ("expert_tensor", None)):
        if getattr(layout, name) not in (1, None):
            word = "null" if none is None else none
            yield f"{_seen(layout, name)} but the model ({shape.family}) has no experts; set it to {word}"


def _not_dividing(layout: LayoutConfig, name: str, degree: int, size_name: str, size: int) -> Iterator[str]:
    if size % degree:
        choices = nearest(lambda value: size % value == 0, degree, most=size)
        yield (
            f"{_seen(layout, name)} does not divide the model's {size_name}={size}; {_nearest_values({name: choices})}"
        )


def _seen(layout: LayoutConfig, name: str) -> str:
    """The degree in force and where it comes from."""
    if name == "expert_tensor" and layout.expert_tensor is None:
        why = "layout.tensor, as expert is 1" if layout.expert == 1 else "1, as expert is above 1"
        return f"layout.expert_tensor={expert_tensor_degree(layout)} (default: {why})"
    source = "set" if name in layout.model_fields_set else "default"
    return f"layout.{name}={getattr(layout, name)} ({source})"


def _nearest_values(choices: Mapping[str, list[int]]) -> str:
    """The values to choose from; of each degree on its own, the others staying as they are."""
    parts = [f"{name}: {' or '.join(map(str, values))}" for name, values in choices.items() if values]
    return f"nearest {', or '.join(parts)}" if parts else "no value of one degree alone would do"
