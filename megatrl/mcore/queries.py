"""Log-probabilities that frozen and current models give to chosen next tokens, on every rank."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatrl.config.model_shape import ModelShape
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray
from megatrl.errors import NonFiniteError, ScoringError
from megatrl.mcore.forest import pack_forest
from megatrl.mcore.groups import broadcast, pipeline_group
from megatrl.mcore.layout import Layout, activate
from megatrl.mcore.logprobs import pair_logprobs, sum_over_context
from megatrl.mcore.model import CausalModel, shape_of
from megatrl.mcore.packing import PackedTokens, pack_tokens
from megatrl.mcore.routing import replayed, with_routing
from megatrl.mcore.schedule import forward_only


def target_logprobs(
    models: Sequence[torch.nn.Module],
    layout: Layout,
    queries: Sequence[PackedQueries],
    *,
    temperature: float = 1.0,
) -> list[FloatArray]:
    """Returns for each pack the [Q] log p(targets | tokens up to and including rows).

    Collective over all ranks. Each data rank brings its own packs, all the same number of them (a
    one-token pack without questions fills up); the result is valid on every tensor, pipeline and context rank
    of that data rank. `temperature` is that of packs that bring none for their questions.
    Evaluation mode, no gradients, no random state moves. Raises ScoringError for
    ids outside the vocabulary, NonFiniteError for a NaN or infinite result.
    """
    if not queries:
        return []
    activate(layout.device)
    for query in queries:
        _check_ids(query, shape_of(models).vocab_size)
    shape = shape_of(models)
    packs = [_pack(query, layout, shape) for query in queries]

    def read(model: CausalModel, hidden: Tensor, index: int) -> Tensor:
        places, rows = packs[index].owned(torch.from_numpy(queries[index].rows).to(hidden.device))
        targets = torch.from_numpy(queries[index].targets).to(hidden.device)[places]
        answers = hidden.new_zeros(queries[index].num_questions, dtype=torch.float32)
        for at, chosen in _by_temperature(queries[index], places, temperature):
            answers[places[chosen]] = pair_logprobs(model, hidden, rows[chosen], targets[chosen], temperature=at)[0]
        return sum_over_context(answers, layout)

    answers = forward_only(models, layout, packs, read)
    if layout.is_last_stage:
        flat = torch.cat(answers).double()
    else:
        num_questions = sum(query.num_questions for query in queries)
        flat = torch.zeros(num_questions, dtype=torch.float64, device=layout.torch_device)
    if layout.pipeline > 1 and len(flat):
        broadcast(flat, source=layout.pipeline - 1, group=pipeline_group())
    results = _split(flat.cpu().numpy(), queries)
    _require_finite(results)
    return results


def _by_temperature(query: PackedQueries, places: Tensor, default: float) -> Iterator[tuple[float, Tensor]]:
    """Yields each temperature that the pack asks at, in the same order on every rank, and which of `places` do."""
    if query.temperatures is None:
        yield default, torch.arange(len(places), device=places.device)
        return
    asked = torch.from_numpy(query.temperatures).to(places.device)[places]
    for temperature in np.unique(query.temperatures).tolist():
        yield temperature, (asked == temperature).nonzero()[:, 0]


def _pack(query: PackedQueries, layout: Layout, shape: ModelShape) -> PackedTokens:
    if query.is_forest:
        return pack_forest(query, layout)
    pack = pack_tokens(query.tokens, query.cu_seqlens, layout)
    return with_routing(pack, replayed(query.routed_experts, query.cu_seqlens, layout, shape))


def _split(flat: FloatArray, queries: Sequence[PackedQueries]) -> list[FloatArray]:
    bounds = np.cumsum([query.num_questions for query in queries])
    return [part.copy() for part in np.split(flat, bounds)[: len(queries)]]


def _check_ids(query: PackedQueries, vocab_size: int) -> None:
    for name, ids in (("tokens", query.tokens), ("targets", query.targets)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise ScoringError(
                f"{name} hold ids {int(ids.min())}..{int(ids.max())} outside the model's vocabulary [0, {vocab_size}); "
                "was the text rendered with another model's tokenizer?"
            )


def _require_finite(results: Sequence[FloatArray]) -> None:
    bad = [i for i, values in enumerate(results) if not np.isfinite(values).all()]
    if bad:
        raise NonFiniteError(
            f"log-probabilities of {len(bad)} of {len(results)} packs are NaN or infinite, first pack {bad[0]}; "
            "the weights or the precision are broken"
        )
