"""The vocabulary head sees the rows that are asked about, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workload import Workload, start_actor, write_model
from megatrl.mcore.queries import target_logprobs
from megatrl.scoring.branches import TrunkQuery, answer_branch
from megatrl.scoring.tree import TreeBackend

pytestmark = pytest.mark.slow

VOCABULARY = 331  # no other size of the model is a multiple


class LogitRows(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the vocabulary, the weight itself left out."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() >= 2 and out.shape[-1] == VOCABULARY and out.shape[0] != 64:
            self.most = max(self.most, out.numel() // VOCABULARY)
        return out


def test_only_scored_rows_reach_the_vocabulary_head(tmp_path: Path) -> None:
    workload = Workload(hidden_size=64, num_layers=1, ffn_size=96, vocab_size=VOCABULARY)
    write_model(workload, tmp_path)
    actor = start_actor(workload, tmp_path)
    branch = answer_branch((5, 6), (7, 8, 9))
    query = TrunkQuery(trunk=tuple(range(300)), boundaries=(100, 200, 300), branches=((branch,),) * 3)
    try:
        with LogitRows() as rows:
            TreeBackend(
                runner=lambda packs: target_logprobs(actor.models, actor.layout, packs), microbatch_tokens=1000
            ).score([query])
    finally:
        actor.close()
    assert rows.most == 3 * 3  # of 312: three tokens of the answer at three boundaries
