"""One rank: random trees of questions through the tree and the independent backend, on models and layouts in turn."""

import sys
from typing import Any

import numpy as np
import torch
from actors import actor_worker
from world import agreed_port, rank_arguments, report

from megatrl.config.engines import ActorConfig, LayoutConfig
from megatrl.errors import LayoutError
from megatrl.mcore.queries import target_logprobs
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.tree import TreeBackend
from tests.fakes.random_trees import random_trees

VOCABULARY = 67


def main() -> None:
    rank, _, arguments = rank_arguments()
    results = []
    for index, run in enumerate(arguments["runs"]):
        print("run", run, flush=True)
        results.append(compare(run, rank, agreed_port(str(index))))
    report(results)


def compare(run: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    actor = ActorConfig(layout=LayoutConfig(**run["layout"]), precision="fp32", device="cpu", timeout_s=60.0)
    worker = actor_worker(run["model"], actor, rank=rank, port=port)
    tokens: dict[str, int] = {}

    def runner(name: str) -> Any:
        def forward(packs: Any) -> Any:
            tokens[name] = tokens.get(name, 0) + sum(len(pack.tokens) for pack in packs)
            return target_logprobs(worker.models, worker.layout, packs)

        return forward

    # Every data rank asks the same here: what differs between ranks is tested with the scorers.
    asked = random_trees(run["seed"], vocabulary=VOCABULARY)
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
