"""One tensor rank: vocab-parallel logprobs, entropies and gradients against the plain formula."""

from pathlib import Path
from typing import Any

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from tiny_models import write_tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from world import agreed_port, rank_arguments, report

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.mcore import layout as layouts
from megatrl.mcore.bridge import iter_hf_weights, load_hf_weights
from megatrl.mcore.groups import tensor_group
from megatrl.mcore.logprobs import VocabParallelLogprobs, pair_logprobs
from megatrl.mcore.model import CausalModel, build_model, unwrap

TEMPERATURE = 0.6


class MostRows(TorchDispatchMode):
    """Remembers the most rows of logits, [rows, local vocabulary], that any operation returned."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = weight.shape
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == self.vocab_size:
            is_weight = result.shape[0] == self.hidden_size  # the transposed output weight
            self.rows = max(self.rows, 0 if is_weight else result.shape[0])
        return result


def main() -> None:
    rank, world_size, arguments = rank_arguments()
    results = []
    for index, run in enumerate(arguments["runs"]):
        config = LayoutConfig(
            world_size=world_size, tensor=world_size, sequence_parallel=run["sequence_parallel"] and world_size > 1
        )
        path = Path(run["path"]) / f"rank{rank}"
        hf = write_tiny_model(path, "qwen3", vocab_size=run["vocab_size"], num_key_value_heads=4, num_hidden_layers=1)
        shape = read_model_shape(path)
        layout = layouts.initialize(
            config, shape=shape, rank=rank, master_addr="127.0.0.1", master_port=agreed_port(str(index)),
            device="cpu", seed=0, timeout_s=60.0,
        )  # fmt: skip
        models = build_model(shape, layout, precision="fp32")
        load_hf_weights(models, path)
        results.append(compare(unwrap(models[0]), hf, layout))
        with torch.compiler.set_stance("force_eager"):  # Megatron's fused kernel; its arithmetic is the same
            results[-1]["logit_gradients"] = logit_gradients()
        results[-1]["exported_rows"] = next(t for n, t in iter_hf_weights(models) if n == "lm_head.weight").shape[0]
        layouts.destroy()
    report(results)


def compare(model: CausalModel, hf: Any, layout: layouts.Layout) -> dict[str, Any]:
    vocab_size, hidden_size = model.shape.vocab_size, model.shape.hidden_size
    with torch.no_grad():  # padding rows hold large values: they must not be seen
        first = layout.tensor_rank * model.output_weight().shape[0]
        num_valid = max(0, min(model.output_weight().shape[0], vocab_size - first))
        model.output_weight()[num_valid:] = 50.0
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(24, 1, hidden_size, generator=generator)
    rows = torch.randint(0, 24, (60,), generator=generator)
    targets = torch.randint(0, vocab_size, (60,), generator=generator)
    weights = torch.randn(2, 60, generator=generator)
    expected = plain(hf.lm_head.weight.detach(), hidden, rows, targets, weights)
    result: dict[str, Any] = {"errors": {}, "most_rows": {}}
    for chunk in (1, 7, 1000):
        mine = hidden.tensor_split(layout.tensor)[layout.tensor_rank] if layout.sequence_parallel else hidden
        mine = mine.clone().requires_grad_()
        model.zero_grad()
        with MostRows(model.output_weight()) as most:
            logprobs, entropies = pair_logprobs(
                model, mine, rows, targets, temperature=TEMPERATURE, with_entropy=True, chunk_rows=chunk
            )
            assert entropies is not None
            (logprobs * weights[0] + entropies * weights[1]).sum().backward()
        weight_gradient = model.output_weight().grad
        assert weight_gradient is not None
        assert mine.grad is not None
        hidden_gradient = expected[2]
        if layout.sequence_parallel:
            hidden_gradient = hidden_gradient.tensor_split(layout.tensor)[layout.tensor_rank]
        wanted = expected[3][first : first + num_valid]
        pairs = [
            (logprobs, expected[0]),
            (entropies, expected[1]),
            (mine.grad, hidden_gradient),
            (weight_gradient[:num_valid], wanted),
        ]
        result["errors"][str(chunk)] = [float((a - b).abs().max()) if b.numel() else 0.0 for a, b in pairs]
        result["padding_gradient"] = float(weight_gradient[num_valid:].abs().sum())
        result["most_rows"][str(chunk)] = most.rows
    alone, nothing = pair_logprobs(model, mine, rows, targets, temperature=TEMPERATURE)
    result["without_entropy"] = [float((alone - expected[0]).abs().max()), nothing is None]
    return result


def logit_gradients() -> dict[str, float]:
    """How far d logp / d logits of this rank's vocabulary is from float64, relative: ours and Megatron's."""
    group = tensor_group()
    rows, columns = 8, 16
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(rows, columns * group.size(), generator=generator)
    targets = torch.randint(0, logits.shape[1], (rows,), generator=generator)
    wanted = torch.nn.functional.one_hot(targets, logits.shape[1]) - logits.double().softmax(-1)
    first = group.rank() * columns
    wanted = wanted[:, first : first + columns]
    errors = {}
    for name in ("ours", "megatron", "megatron_fused"):
        mine = logits[:, first : first + columns].clone().requires_grad_()
        if name == "ours":
            logprobs, _ = VocabParallelLogprobs.apply(mine, torch.arange(rows), targets - first, False)
        elif name == "megatron":
            logprobs = -vocab_parallel_cross_entropy(mine[:, None], targets[:, None])
        else:
            logprobs = -fused_vocab_parallel_cross_entropy(mine[:, None], targets[:, None], group)
        logprobs.sum().backward()
        assert mine.grad is not None
        errors[name] = float((mine.grad - wanted).abs().max() / wanted.abs().max())
    return errors


def plain(weight: Tensor, hidden: Tensor, rows: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    weight, hidden = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    table = (hidden[:, 0] @ weight.t() / TEMPERATURE).log_softmax(-1)
    logprobs = table[rows, targets]
    entropies = -(table.exp() * table).sum(-1)[rows]
    (logprobs * weights[0] + entropies * weights[1]).sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
