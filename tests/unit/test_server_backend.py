"""The server backend against the independent one, and what it makes of servers that are not what they should be."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrl.errors import RolloutError, ScoringError
from megatrl.scoring.branches import Branch, TrunkQuery, answer_branch
from megatrl.scoring.independent import IndependentBackend
from megatrl.scoring.server_backend import CONCURRENT_TRAJECTORIES, ServerBackend
from tests.fakes.frozen_models import PrefixRunner
from tests.fakes.prompt_server import VOCABULARY, PromptServer
from tests.unit.test_tree_backend import mixed, random_query


def backend(server: PromptServer) -> ServerBackend:
    return ServerBackend(readers=lambda: server, request_timeout_s=5.0)


def trajectory(trunk: tuple[int, ...], *boundaries: int) -> TrunkQuery:
    branch = answer_branch((201, 202), (203, 204))
    return TrunkQuery(trunk=trunk, boundaries=boundaries, branches=((branch,),) * len(boundaries))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_it_answers_as_the_independent_backend_whatever_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(4) for _ in range(rng.randrange(6)))
    queries = [random_query(rng, prompt=prompt if rng.random() < 0.7 else ()) for _ in range(rng.randrange(1, 6))]
    independent = IndependentBackend(runner=PrefixRunner(mixed), microbatch_tokens=64)
    scorer = backend(PromptServer(mixed))
    assert scorer.score(queries) == independent.score(queries)
    assert scorer.reuse.share == 1.0


def test_a_branch_starts_one_before_its_first_scored_token_so_that_the_prefix_comes_from_the_cache() -> None:
    server = PromptServer(mixed)
    scorer = backend(server)
    scorer.score([trajectory(tuple(range(40)), 10, 25, 40)])
    warm, *branches = server.bodies
    assert (warm["input_ids"], warm["logprob_start_len"]) == (list(range(40)), 39)
    for boundary, body in zip((10, 25, 40), branches, strict=True):
        assert body["input_ids"] == [*range(boundary), 201, 202, 203, 204]
        assert body["logprob_start_len"] == boundary + 1  # the wrapper's last token predicts the first of the answer
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert server.num_computed == 40 + 3 * 4
    assert (scorer.reuse.expected, scorer.reuse.cached) == (75, 75)


def test_the_last_vocabulary_id_which_servers_name_zero_can_be_scored() -> None:
    last = VOCABULARY - 1
    (result,) = backend(PromptServer(mixed)).score(
        [TrunkQuery(trunk=(1, last), boundaries=(2,), branches=((answer_branch((), (last, last)),),))]
    )
    assert result == ((((mixed((1, last), last),), (mixed((1, last, last), last),)),),)


def test_a_group_brings_its_prompt_into_the_cache_once_and_trajectories_go_side_by_side() -> None:
    prompt = tuple(range(100, 150))
    group = [trajectory((*prompt, *(member,) * 10), 50, 60) for member in range(8)]
    server = PromptServer(mixed)
    backend(server).score(group)
    # The first trajectory whole, the others behind the prompt; the answer after the prompt is the same for all.
    assert server.num_computed <= 60 + 7 * 10 + 8 * (4 + 4)
    assert server.most_running > 1
    many = PromptServer(mixed)
    backend(many).score([trajectory((member, 7, 8), 3) for member in range(200)])
    assert many.most_running == CONCURRENT_TRAJECTORIES


def test_a_server_without_a_prefix_cache_is_an_error_and_one_that_forgets_some_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    query = trajectory(tuple(range(40)), 10, 25, 40)
    with pytest.raises(ScoringError, match=r"found 0 of 75 prefix tokens in its cache.*scoring.backend: tree"):
        backend(PromptServer(mixed, keeps=False)).score([query])

    def page(reply: dict) -> None:  # of 16 tokens
        reply["meta_info"]["cached_tokens"] -= reply["meta_info"]["cached_tokens"] % 16

    paged = backend(PromptServer(mixed, edit=page))
    paged.score([query])
    assert (paged.reuse.expected, paged.reuse.cached) == (75, 0 + 16 + 32)
    assert "found 48 of 75 prefix tokens" in caplog.text


def test_a_server_whose_weights_move_is_refused() -> None:
    with pytest.raises(ScoringError, match=r"version 3.*Rollout servers, whose weights move, cannot score"):
        backend(PromptServer(mixed, version=3)).score([trajectory((1, 2, 3), 3)])


def test_another_temperature_is_refused_before_anything_is_sent() -> None:
    server = PromptServer(mixed)
    warm = Branch(tokens=(1,), targets=((), (2,)), temperature=0.7)
    with pytest.raises(ScoringError, match=r"temperature 1, 0\.7 was asked"):
        backend(server).score([TrunkQuery(trunk=(5,), boundaries=(1,), branches=((warm,),))])
    assert server.bodies == []


def test_nothing_to_ask_asks_nothing() -> None:
    server = PromptServer(mixed)
    assert backend(server).score([]) == ()
    assert backend(server).score([TrunkQuery(trunk=(1, 2), boundaries=(1,), branches=((),))]) == (((),),)
    assert server.bodies == []


def first_entry_dropped(reply: dict) -> None:
    del reply["meta_info"]["input_token_logprobs"][0]


def leading_value(reply: dict) -> None:
    reply["meta_info"]["input_token_logprobs"][0][0] = -1.0


def other_token(reply: dict) -> None:
    reply["meta_info"]["input_token_logprobs"][-1][1] = 77


def positive(reply: dict) -> None:
    reply["meta_info"]["input_token_logprobs"][-1][0] = 0.5


def missing(reply: dict) -> None:
    reply["meta_info"]["input_token_logprobs"][-1][0] = None


def other_request(reply: dict) -> None:
    reply["meta_info"]["id"] = "someone else's"


def aborted(reply: dict) -> None:
    reply["meta_info"]["finish_reason"] = {"type": "abort"}


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (first_entry_dropped, "leading None were expected"),
        (leading_value, "leading None were expected"),
        (other_token, "is of token 77"),
        (positive, "a logprob is finite and <= 0"),
        (missing, "a logprob is finite and <= 0"),
        (other_request, "reply belongs to request"),
        (aborted, "aborted"),
        (lambda reply: reply.pop("meta_info"), "unusable reply"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_is_an_error(edit, match: str) -> None:
    calls = 0

    def later(reply: dict) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # the warm-up asks for nothing
            edit(reply)

    with pytest.raises(RolloutError, match=match):
        backend(PromptServer(mixed, edit=later)).score([trajectory((1, 2, 3), 3)])


def test_an_id_outside_the_vocabulary_is_not_sent() -> None:
    server = PromptServer(mixed)
    with pytest.raises(RolloutError, match=r"ids 1\.\.512, the model has 0 to 511"):
        backend(server).score([trajectory((1, VOCABULARY), 2)])
    assert server.bodies == []
