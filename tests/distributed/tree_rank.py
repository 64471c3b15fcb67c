"""One rank: random trees of questions through the tree and the independent backend, on models and layouts in turn."""

import random
import sys
from typing import Any

import numpy as np
import torch
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.config.engines import ActorConfig, LayoutConfig
from megatrl.errors import LayoutError
from megatrl.mcore.queries import target_logprobs
from megatrl.scoring.branches import Branch, TrunkQuery
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.tree import TreeBackend

VOCABULARY = 67


def main() -> None:
    rank, _, arguments = rank_arguments()
    results = []
    for index, run in enumerate(arguments["runs"]):
        print("run", run, flush=True)
        results.append(compare(run, rank, agreed_port(str(index))))
    report(results)


def queries(seed: int) -> list[TrunkQuery]:
    """A group with a common prompt and a lone trunk; boundaries at 0 and at the end; empty, short and long branches."""
    rng = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    prompt, result = ids(17), []
    for start in (prompt, prompt, prompt, ()):
        trunk = start + ids(rng.randrange(5, 60))
        boundaries = (0, 1, *sorted(rng.sample(range(2, len(trunk)), 4)), len(trunk))
        branches = []
        for boundary in boundaries:
            lead, here = ids(4), []
            for tokens in ((), ids(1), lead + ids(2), lead + ids(3), ids(31)):
                targets = tuple(ids(2) if place + boundary else () for place in range(len(tokens) + 1))
                if any(targets):
                    here.append(Branch(tokens=tokens, targets=targets))
            branches.append(tuple(here))
        result.append(TrunkQuery(trunk=trunk, boundaries=boundaries, branches=tuple(branches)))
    return result


def compare(run: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    actor = ActorConfig(layout=LayoutConfig(**run["layout"]), precision="fp32", device="cpu", timeout_s=60.0)
    spec = WorkerSpec(
        rank=rank,
        world_size=actor.layout.world_size,
        master_addr="127.0.0.1",
        master_port=port,
        actor=actor,
        model_path=run["model"],
        seed=1,
        num_steps=5,
    )
    worker = ActorWorker(spec)
    tokens: dict[str, int] = {}

    def runner(name: str) -> Any:
        def forward(packs: Any) -> Any:
            tokens[name] = tokens.get(name, 0) + sum(len(pack.tokens) for pack in packs)
            return target_logprobs(worker.models, worker.layout, packs)

        return forward

    # Every data rank asks the same here: what differs between ranks is tested with the scorers.
    asked = queries(run["seed"])
    try:
        tree = _flat(TreeBackend(runner=runner("tree"), microbatch_tokens=run["microbatch_tokens"]).score(asked))
    except LayoutError as error:
        worker.close()
        return {"refused": error.message}
    oracle = _flat(IndependentBackend(runner=runner("independent"), microbatch_tokens=4096).score(asked))
    worker.close()
    return {"largest": float(np.abs(tree - oracle).max()), "spread": float(oracle.std()), "count": len(tree), **tokens}


def _flat(results: Any) -> np.ndarray:
    def values(node: Any) -> list[float]:
        return [node] if isinstance(node, float) else [value for part in node for value in values(part)]

    return np.asarray(values(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
