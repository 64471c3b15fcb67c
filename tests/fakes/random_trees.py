"""Questions that a scoring backend may be asked, drawn at random."""

import random

from megatrl.scoring.branches import Branch, TrunkQuery


def random_trees(seed: int, *, vocabulary: int) -> list[TrunkQuery]:
    """A group with a common prompt and a lone trunk; boundaries at 0 and at the end; empty, short and long branches."""
    rng = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

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
