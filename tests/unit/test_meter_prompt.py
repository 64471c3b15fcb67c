from dataclasses import replace

import numpy as np
import pytest

from megatrl.data.meter_answer import answer_text, parse_answer
from megatrl.data.meter_prompt import MeterPrompt
from megatrl.errors import ScoringError
from megatrl.meter.labels import trajectory_labels
from megatrl.meter.prompt import MeterText, build_meter_prompt, can_answer
from megatrl.meter.sft_set import build_sft_set
from tests.fakes.frozen_models import WordCodec, make_trajectory

TEXT = MeterText(header="header", question="how much ?")
GRID = (1, 4, 16)
CODEC = WordCodec(
    [
        "header",
        "how",
        "much",
        "?",
        '{"completion":',
        "0,",
        "1,",
        '"tokens_to_go":',
        "null}",
        "1}",
        "4}",
        "16}",
        "a",
        "b",
    ]
)
A, B = CODEC.encode("a b")


def prompt(grid=GRID):
    return build_meter_prompt(CODEC, grid, TEXT)


def test_answers_are_words_that_a_word_tokenizer_can_spell():
    assert answer_text(completion=True, tokens_to_go=16) == '{"completion": 1, "tokens_to_go": 16}'
    assert answer_text(completion=False, tokens_to_go=None) == '{"completion": 0, "tokens_to_go": null}'
    built = prompt()
    assert [CODEC.decode(a.tokens) for a in built.answers][:2] == [
        '{"completion": 0, "tokens_to_go": null}', '{"completion": 1, "tokens_to_go": 1}'
    ]  # fmt: skip
    assert built.grid == (1.0, 4.0, 16.0)


def test_labels_are_snapped_to_the_nearest_grid_value():
    built = prompt()
    snapped = [built.answer_for(completion=True, tokens_to_go=n).tokens_to_go for n in (0, 2, 3, 9, 11, 900)]
    assert snapped == [1, 1, 4, 4, 16, 16]
    assert built.answer_for(completion=False, tokens_to_go=None) is built.answers[0]


def test_answers_that_the_tokenizer_cannot_tell_apart_are_refused():
    class Blurred(WordCodec):
        def encode(self, text):
            return super().encode(text.replace("16}", "4}"))

    with pytest.raises(ScoringError, match="cannot spell 1 of the meter's 4 answers"):
        build_meter_prompt(Blurred(CODEC.words), GRID, TEXT)
    failure, *completions = prompt().answers
    with pytest.raises(ScoringError, match="same token ids"):
        replace(prompt(), answers=(failure, replace(completions[0], tokens=completions[1].tokens), *completions[1:]))


def test_a_number_outside_a_small_vocabulary_is_known_to_be_unspellable():
    class WithUnknown(WordCodec):
        def encode(self, text):
            return super().encode(" ".join(word if word in self.words else "<unk>" for word in text.split()))

    codec = WithUnknown([*CODEC.words, "<unk>"])
    assert [value for value in range(20) if can_answer(codec, value)] == list(GRID)
    with pytest.raises(ScoringError, match='"tokens_to_go": 17'):
        build_meter_prompt(codec, (1, 4, 17), TEXT)


def test_an_unsorted_grid_is_refused_and_other_text_is_another_template():
    with pytest.raises(ScoringError, match="rising"):
        prompt((4, 1))
    other = build_meter_prompt(CODEC, GRID, MeterText(header="header", question="how ?"))
    assert other.template_hash != prompt().template_hash
    assert isinstance(other, MeterPrompt)


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"completion": 1, "tokens_to_go": 450}', (True, 450.0)),
        ('{"completion": true, "tokens_to_go": 2.5}', (True, 2.5)),
        ('{"completion": 0, "tokens_to_go": null}', (False, 0.0)),
        ('{"completion": 0, "tokens_to_go": "many"}', (False, 0.0)),
        ('I think {"completion": 0} but no: {"completion": 1, "tokens_to_go": 3} done', (True, 3.0)),
        ('{"completion": 1, "tokens_to_go": 3} {broken}', (True, 3.0)),
        ('{"completion": 1, "tokens_to_go": 0}', (True, 0.0)),
    ],
)
def test_free_answers_are_parsed_strictly(text, expected):
    forecast = parse_answer(text)
    assert forecast.is_valid
    assert (forecast.completion, forecast.tokens_to_go) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "about 30 tokens",
        '{"completion": 1}',
        '{"completion": 1, "tokens_to_go": -4}',
        '{"completion": 1, "tokens_to_go": true}',
        '{"completion": 1, "tokens_to_go": NaN}',
        '{"completion": 1, "tokens_to_go": Infinity}',
        '{"completion": 1, "tokens_to_go": 1' + "0" * 400 + "}",
        '{"completion": 2, "tokens_to_go": 4}',
        '{"completion": 1.0, "tokens_to_go": 4}',
        '{"completion": "1", "tokens_to_go": 4}',
        '{"completion": 1, "tokens_to_go": [4]}',
        '{"completion": 1, "tokens_to_go": 4',
        "}{",
        "{" + "[" * 100_000 + "}",
    ],
)
def test_anything_else_is_an_invalid_forecast(text):
    assert not parse_answer(text).is_valid


def trajectory(reward=1.0):
    return make_trajectory([((A, B), (A, A)), ((B,), (A,))], reward=reward)


def test_only_the_answer_and_its_end_are_trained():
    built = prompt()
    examples = trajectory_labels(trajectory())
    samples = build_sft_set(examples, built, max_sequence_tokens=64).samples
    assert [CODEC.decode(s.tokens) for s in samples] == [
        'header a b how much ? {"completion": 1, "tokens_to_go": 4} <end>',
        'header a b a a b how much ? {"completion": 1, "tokens_to_go": 1} <end>',
    ]
    for sample in samples:
        assert sample.action_mask.tolist() == [False] * (len(sample.tokens) - 5) + [True] * 5
        assert not sample.advantages.any()


def test_a_history_that_does_not_fit_is_shortened_or_dropped_and_counted():
    built = prompt()
    examples = trajectory_labels(trajectory())
    room = built.num_extra_tokens
    shortened = build_sft_set(examples, built, max_sequence_tokens=room + 3)
    assert (shortened.num_shortened, shortened.num_dropped) == (1, 0)
    assert CODEC.decode(shortened.samples[1].tokens).startswith("header a b b how much ?")
    assert max(len(s.tokens) for s in shortened.samples) == room + 3
    dropped = build_sft_set(examples, built, max_sequence_tokens=room + 2)
    assert (len(dropped.samples), dropped.num_dropped) == (1, 1)


def test_a_set_without_one_trained_token_is_an_error():
    with pytest.raises(ScoringError, match="no trained token"):
        build_sft_set(trajectory_labels(trajectory()), prompt(), max_sequence_tokens=5)
    with pytest.raises(ScoringError, match="no trained token"):
        build_sft_set([], prompt(), max_sequence_tokens=500)


def test_failures_never_train_a_number():
    samples = build_sft_set(trajectory_labels(trajectory(0.0)), prompt(), max_sequence_tokens=64).samples
    assert all("null}" in CODEC.decode(s.tokens) for s in samples)
    trained = np.concatenate([s.tokens[s.action_mask] for s in samples])
    assert not {CODEC.encode(f"{n}}}")[0] for n in GRID} & set(trained.tolist())
