"""Which layers of a model each pipeline stage and model chunk holds. Pure functions, no torch."""

from collections.abc import Callable

from megatrl.config.engines import LayoutConfig
from megatrl.errors import LayoutError

Chunks = tuple[tuple[range, ...], ...]
"""layers[stage][chunk]: consecutive layer numbers of the whole model, counted from 0."""


def pipeline_chunks(
    num_layers: int, *, pipeline: int, virtual: int = 1, first: int | None = None, last: int | None = None
) -> Chunks:
    """Returns layers[stage][chunk], every layer of the model exactly once and in order.

    The model passes through chunk 0 of all stages, then chunk 1 of all stages, and so on. A stage has
    equally many layers in each of its `virtual` chunks; `first` and `last` are the layers of the first and
    last stage, the other stages share the rest evenly. Raises LayoutError, with the numbers, where that
    does not come out even: Megatron would build fewer layers than the model has, or stop at start-up.
    """
    if problem := split_problem(num_layers, pipeline=pipeline, virtual=virtual, first=first, last=last):
        raise LayoutError(f"{num_layers} layers do not split into pipeline stages: {problem}")
    per_chunk = [size // virtual for size in _stage_sizes(num_layers, pipeline, first, last)]
    starts = [sum(per_chunk[:stage]) for stage in range(pipeline)]
    return tuple(
        tuple(
            range(chunk * sum(per_chunk) + start, chunk * sum(per_chunk) + start + size)  # a chunk of all stages before
            for chunk in range(virtual)
        )
        for start, size in zip(starts, per_chunk, strict=True)
    )


def split_problem(num_layers: int, *, pipeline: int, virtual: int, first: int | None, last: int | None) -> str | None:
    """Returns what keeps the layers from being split, with the numbers, or None where they can be."""
    given = [size for size in (first, last) if size is not None]
    if pipeline == 1:
        if virtual > 1:
            return f"{virtual} chunks for each stage need more than one stage"
        return "one stage holds all layers, so a first or last stage cannot have a number of its own" if given else None
    if len(given) > pipeline:
        return f"{len(given)} stages have a number of layers but there are {pipeline} stages"
    middle, rest = pipeline - len(given), num_layers - sum(given)
    if middle == 0 and rest != 0:
        return f"the two stages hold {' + '.join(map(str, given))} = {sum(given)} layers, the model has {num_layers}"
    if given and middle > 0 and rest < middle:
        of = " + ".join(map(str, given))
        return f"{of} of {num_layers} layers leave {max(rest, 0)} for the {middle} other stages, each needs one"
    if middle > 0 and (rest <= 0 or rest % middle):
        kind = "other stages" if given else "stages"
        return f"{rest} layers do not divide evenly over {middle} {kind}"
    for size in _stage_sizes(num_layers, pipeline, first, last):
        if size % virtual:
            return f"a stage of {size} layers does not divide into {virtual} chunks"
    return None


def nearest_splits(num_layers: int, layout: LayoutConfig) -> dict[str, list[int]]:
    """Returns for each degree of the pipeline the next smaller and larger value that would work with the others."""

    def fits_with(name: str) -> Callable[[int], bool]:
        return lambda value: split_problem(num_layers, **{**split_of(layout), name: value}) is None

    fields = {
        "pipeline": "pipeline",
        "virtual": "virtual_pipeline",
        "first": "first_stage_layers",
        "last": "last_stage_layers",
    }
    seen = split_of(layout)
    return {
        field: found
        for name, field in fields.items()
        if (value := seen[name]) is not None and (found := nearest(fits_with(name), value, most=num_layers))
    }


def split_of(layout: LayoutConfig) -> dict[str, int | None]:
    """Returns the arguments of `pipeline_chunks` that a layout gives."""
    return {
        "pipeline": layout.pipeline,
        "virtual": layout.virtual_pipeline,
        "first": layout.first_stage_layers,
        "last": layout.last_stage_layers,
    }


def nearest(fits: Callable[[int], bool], seen: int, *, most: int) -> list[int]:
    """Returns the next value below and the next above `seen`, up to `most`, for which `fits` holds."""
    below = next((value for value in range(min(seen - 1, most), 0, -1) if fits(value)), None)
    above = next((value for value in range(seen + 1, most + 1) if fits(value)), None)
    return [value for value in (below, above) if value is not None]


def _stage_sizes(num_layers: int, pipeline: int, first: int | None, last: int | None) -> list[int]:
    given = [size for size in (first, last) if size is not None]
    middle = pipeline - len(given)
    share = (num_layers - sum(given)) // middle if middle else 0
    return [*([first] if first is not None else []), *[share] * middle, *([last] if last is not None else [])]
