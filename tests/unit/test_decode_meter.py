"""The meter that answers in words: which question it is asked, and how strictly its answer is read."""

import re
from contextlib import asynccontextmanager

import pytest

from megatrl.data.meter_answer import ANSWER_PATTERN, answer_text, parse_answer
from megatrl.data.trajectories import FinishReason
from megatrl.errors import RolloutError, ScoringError
from megatrl.meter.prompt import COMPACT, build_meter_prompt
from megatrl.rendering.renderer import Renderer
from megatrl.rollout.replies import request_body
from megatrl.rollout.sampler import Sample, SampleRequest
from megatrl.scoring.decode_meter import DecodeMeter
from tests.fakes.frozen_models import make_group, make_trajectory
from tests.fakes.tiny_tokenizer import word_tokenizer

NUMBERS = (1, 3, 9)
WORDS = [
    *("user", "assistant", "forecast", "a", "b", "hm"),
    *" ".join(answer_text(completion=True, tokens_to_go=n) for n in NUMBERS).split(),
    *answer_text(completion=False, tokens_to_go=None).split(),
]
RENDERER = Renderer(word_tokenizer(WORDS), 64, "chatml", "react")
PROMPT = build_meter_prompt(RENDERER, NUMBERS, COMPACT)
A, B, HM = RENDERER.encode("a b hm")
END = RENDERER.stop_token_ids[0]
EPISODE = make_trajectory([((A, B), (A,)), ((B,), (B, B)), ((A,), (A,))])


class Answers:
    """A Sampler whose answer depends on the prompt it is sent."""

    def __init__(self, answer) -> None:
        self._answer = answer
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        reply = self._answer(request.input_ids)
        if isinstance(reply, BaseException):
            raise reply
        ended = reply[-1] == END
        return Sample(
            output_ids=reply,
            logprobs=(-0.1,) * len(reply),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            policy_version=0,
        )

    @asynccontextmanager
    async def open(self):
        yield self


def meter(answers: Answers, **options) -> DecodeMeter:
    settings = {"policy_fingerprint": RENDERER.fingerprint, "max_sequence_tokens": 64, **options}
    return DecodeMeter(
        prompt=PROMPT, renderer=RENDERER, samplers=answers.open, failure_cost=20.0, request_timeout_s=5.0, **settings
    )


def say(text: str, *, end: bool = True) -> tuple[int, ...]:
    return (*RENDERER.encode(text), *((END,) if end else ()))


def test_every_decision_state_is_asked_once_greedily_with_history_first_and_question_last():
    answers = Answers(lambda ids: say(answer_text(completion=True, tokens_to_go={4: 9, 6: 3, 9: 1}[len(ids) + 1])))
    scores, metrics = meter(answers).score([make_group(EPISODE)])
    asked = [request.input_ids for request in answers.requests]
    assert asked == [(*h, *PROMPT.question) for h in ((A, B), (A, B, A, B), (A, B, A, B, B, B, A))]
    assert all(request.temperature == 0 and request.max_new_tokens == 32 for request in answers.requests)
    assert len({request.routing_key for request in answers.requests}) == 1
    (score,) = scores.values()
    assert [(f.completion, f.completion_prob, f.tokens_to_go) for f in score.forecasts] == [
        (True, 1.0, 9.0), (True, 1.0, 3.0), (True, 1.0, 1.0)
    ]  # fmt: skip
    assert metrics == {"meter/invalid": 0.0, "meter/shortened": 0.0, "meter/forecast_failure": 0.0}


def test_an_answer_that_cannot_be_read_or_never_ends_is_invalid_and_counted():
    replies = iter(
        [say("hm"), say(answer_text(completion=True, tokens_to_go=3), end=False), say('{"completion": 0, null}')]
    )
    scores, metrics = meter(Answers(lambda ids: next(replies))).score([make_group(EPISODE)])
    (score,) = scores.values()
    assert [f.is_valid for f in score.forecasts] == [False, False, False]
    assert metrics["meter/invalid"] == 1.0


def test_histories_that_do_not_fit_are_shortened_as_in_training():
    answers = Answers(lambda ids: say(answer_text(completion=False, tokens_to_go=None)))
    room = PROMPT.num_extra_tokens
    scores, metrics = meter(answers, max_sequence_tokens=room + 4).score([make_group(EPISODE)])
    assert answers.requests[-1].input_ids == (A, B, A, *PROMPT.question)
    assert metrics["meter/shortened"] == pytest.approx(1 / 3)
    scores, _ = meter(answers, max_sequence_tokens=room + 2).score([make_group(EPISODE)])
    assert [f.is_valid for f in next(iter(scores.values())).forecasts] == [True, False, False]


def test_a_server_that_fails_ends_the_step_with_its_own_words():
    with pytest.raises(RolloutError, match="no rollout server is alive"):
        meter(Answers(lambda ids: RolloutError("no rollout server is alive"))).score([make_group(EPISODE)])


def test_ids_of_another_vocabulary_are_refused():
    with pytest.raises(ScoringError, match="would mean other words"):
        meter(Answers(lambda ids: ()), policy_fingerprint="other words")


def test_the_pattern_allows_what_can_be_parsed_and_reaches_the_server():
    for text in (answer_text(completion=True, tokens_to_go=330), answer_text(completion=False, tokens_to_go=None)):
        for form in (text, text.replace(" ", "")):
            assert re.fullmatch(ANSWER_PATTERN, form)
            assert parse_answer(form).is_valid
    for text in ('{"completion": 1, "tokens_to_go": null}', '{"completion": 1, "tokens_to_go": -4}', "{}", "x"):
        assert not re.fullmatch(ANSWER_PATTERN, text)
    request = SampleRequest(input_ids=(1,), max_new_tokens=4, temperature=0.0, pattern=ANSWER_PATTERN)
    assert b'"regex"' in request_body(request, "r")
    assert b'"regex"' not in request_body(SampleRequest(input_ids=(1,), max_new_tokens=4, temperature=0.0), "r")
