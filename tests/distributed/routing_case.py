"""Cases with forced expert choices and auxiliary losses: plain transformers, its gates told what to choose.

Nothing of `mcore/routing.py` is used. The model scores freely again once the training is over: what the
oracle's final log-probabilities say about frozen scorers, which never replay.
"""

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch
from oracle import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Case, Expected
from tiny_models import VOCAB_SIZE, write_tiny_model
from torch import Tensor

from megatrl.config.engines import RouterConfig
from megatrl.data.samples import FloatArray, TrainingSample

NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 8, 2


@dataclass
class Gates:
    """What the gates of a model are told, and what they did with the last sequence."""

    forced: Tensor | None = None  # [T, L, K]; -1 chooses freely, and so does None
    logits: list[Tensor] = field(default_factory=list)  # [T, E] of each layer
    chosen: list[Tensor] = field(default_factory=list)  # [T, K] of each layer


def take_over_gates(model: Any) -> Gates:
    """Replaces the gates' forward passes by ones that obey the returned object."""
    gates = Gates()
    for layer, block in enumerate(model.model.layers):
        gate = block.mlp.gate
        gate.forward = lambda hidden, gate=gate, layer=layer: _gate(gates, gate, layer, hidden)
    return gates


def _gate(gates: Gates, gate: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if layer == 0:
        gates.logits, gates.chosen = [], []
    logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.t()
    probs = logits.softmax(dim=-1)
    chosen = probs.topk(gate.top_k, dim=-1).indices
    if gates.forced is not None:
        told = gates.forced[:, layer].long()
        chosen = torch.where(told >= 0, told, chosen)
    scores = probs.gather(1, chosen)
    if gate.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    gates.logits.append(logits)
    gates.chosen.append(chosen)
    return logits, scores, chosen


def make_routing_case(
    directory: Path,
    *,
    choices: str,
    router: RouterConfig,
    num_samples: int = 8,
    num_minibatches: int = 2,
    **overrides: Any,
) -> Path:
    """Returns the file of a case. `choices`: own (the model's), foreign (random, last token free), none."""
    model_path = directory / "model"
    model = write_tiny_model(model_path, "qwen3_moe", **overrides)
    gates = take_over_gates(model)
    rng = np.random.default_rng(7)
    lengths = np.minimum(6 + (rng.pareto(1.2, num_samples) * 6).astype(int), 60)
    samples, logprobs = [], []
    for index, length in enumerate(lengths):
        tokens = rng.integers(0, VOCAB_SIZE, length)
        gates.forced = None
        model(torch.from_numpy(tokens)[None])
        own = torch.stack(gates.chosen, dim=1)
        experts = {"own": own, "foreign": _foreign(int(length), rng), "none": None}[choices]
        gates.forced = experts
        values = oracle._row_logprobs(model, tokens)[0].detach()
        sample = oracle._sample(index, tokens, values.numpy(), rng)
        recorded = None if experts is None else experts.numpy().astype(np.int8)
        samples.append(replace(sample, routed_experts=recorded))
        logprobs.append(values)
    old = {i: p.numpy() + 0.3 * rng.standard_normal(len(p)) for i, p in enumerate(logprobs)}
    losses, grad_norms, metrics = _train(model, gates, samples, old, num_minibatches, router)
    gates.forced = None
    model.save_pretrained(directory / "final")
    from safetensors.torch import load_file

    expected = Expected(
        logprobs=[p.double().numpy() for p in logprobs],
        losses=losses,
        grad_norms=grad_norms,
        parameters=load_file(directory / "final" / "model.safetensors"),
        final_logprobs=[oracle._all_logprobs(model, s.tokens).detach().double().numpy() for s in samples],
        router=metrics,
    )
    case = Case(
        model_path=str(model_path),
        samples=tuple(samples),
        old_logprobs=old,
        num_minibatches=num_minibatches,
        expected=expected,
    )
    file = directory / "case.pickle"
    file.write_bytes(pickle.dumps(case))
    return file


def _foreign(length: int, rng: np.random.Generator) -> Tensor:
    """Choices that the model would hardly make, different at every token and layer; the last token's are free."""
    order = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (length, NUM_LAYERS, 1)), axis=-1)
    experts = torch.from_numpy(order[..., :TOP_K].copy())
    experts[-1] = -1
    return experts


def _train(
    model: Any,
    gates: Gates,
    samples: list[TrainingSample],
    old: dict[int, FloatArray],
    num_minibatches: int,
    router: RouterConfig,
) -> tuple[list[float], list[float], dict[str, float]]:
    """As the oracle's, with forced gates and the auxiliary losses of each minibatch."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms, balances, zs = [], [], [], []
    for first in range(num_minibatches):
        members = [samples[i] for i in range(first, len(samples), num_minibatches)]
        num_actions = sum(s.num_action_tokens for s in members)
        optimizer.zero_grad()
        total = balance = z = 0.0
        for i in range(first, len(samples), num_minibatches):
            experts = samples[i].routed_experts
            gates.forced = None if experts is None else torch.from_numpy(experts)
            loss = oracle._loss(model, samples[i], old[i]) / num_actions
            balance_i, z_i = _auxiliary(gates, samples[i], members, router)
            auxiliary = router.load_balancing_coefficient * balance_i + router.z_loss_coefficient * z_i
            (loss + auxiliary).backward()
            total += float(loss.detach())
            balance += float(balance_i.detach()) / NUM_LAYERS
            z += float(z_i.detach()) / NUM_LAYERS
        losses.append(total)
        balances.append(balance)
        zs.append(z)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    metrics = {"router_load_balance": float(np.mean(balances))} if router.load_balancing != "none" else {}
    return losses, norms, metrics | ({"router_z": float(np.mean(zs))} if router.z_loss_coefficient else {})


def _auxiliary(
    gates: Gates, sample: TrainingSample, members: list[TrainingSample], router: RouterConfig
) -> tuple[Tensor, Tensor]:
    """This sequence's part of the minibatch's losses, summed over layers: E sum_i f_i P_i, and logsumexp^2."""
    length, num_tokens = len(sample.tokens), sum(len(s.tokens) for s in members)
    balance = z = torch.zeros(())
    for layer, (logits, chosen) in enumerate(zip(gates.logits, gates.chosen, strict=True)):
        z = z + logits.logsumexp(-1).square().sum() / num_tokens
        share = logits.softmax(-1)
        if router.load_balancing == "sequence":
            fraction = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS) / (TOP_K * length)
            balance = balance + NUM_EXPERTS * (fraction * share.mean(0)).sum() / len(members)
        if router.load_balancing == "global":
            everyone = np.concatenate([s.routed_experts[:-1, layer].ravel() for s in members])  # type: ignore[index]
            fraction = torch.from_numpy(np.bincount(everyone, minlength=NUM_EXPERTS) / len(everyone)).float()
            balance = balance + NUM_EXPERTS * (fraction * share.sum(0)).sum() / num_tokens
    return balance, z
