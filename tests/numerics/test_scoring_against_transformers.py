"""The probe and the meter on a real tiny transformers model, against plain sums written out here."""

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from megatrl.meter.prompt import MeterText, build_meter_prompt  # noqa: E402
from megatrl.scoring.independent import IndependentBackend  # noqa: E402
from megatrl.scoring.meter import CandidateMeter  # noqa: E402
from megatrl.scoring.reference_probe import ReferenceProbe  # noqa: E402
from tests.fakes.frozen_models import (  # noqa: E402
    TransformersRunner,
    WordCodec,
    make_group,
    make_trajectory,
    next_token_logprobs,
)

DIGITS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
SYMBOLS = [*DIGITS, "{", "}", ",", '"completion":', '"tokens_to_go":', "null", "how", "header", "<answer>"]


class DigitCodec(WordCodec):
    """Spells numbers digit by digit, as real tokenizers do."""

    def encode(self, text):
        for symbol in (*DIGITS, "{", "}", ","):
            text = text.replace(symbol, f" {symbol} ")
        return super().encode(text)


CODEC = DigitCodec(SYMBOLS, wrapper="<answer>")
TURNS = [((17, 3, 4), (5, 6)), ((7, 8, 2), (9,)), ((1, 0), (2, 3, 4))]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model


def continuation_logprobs(model, prefix, continuation, temperature=1.0):
    """log p of each token of `continuation` after `prefix`: token i is predicted at position i - 1."""
    tokens = [*prefix, *continuation]
    table = next_token_logprobs(model, tokens, temperature)
    return [float(table[len(prefix) + i - 1, token]) for i, token in enumerate(continuation)]


@pytest.mark.parametrize("gold", ["7", "1 2 3"])
@pytest.mark.parametrize("microbatch_tokens", [1, 4096])
def test_the_probe_gives_the_mean_gold_logprob_of_a_plain_forward(model, gold, microbatch_tokens):
    probe = ReferenceProbe(
        codec=CODEC,
        backend=IndependentBackend(runner=TransformersRunner(model), microbatch_tokens=microbatch_tokens),
        max_sequence_tokens=64,
    )
    trajectory = make_trajectory(TURNS, gold_answers=(gold,), trailing=(11,))
    (score,) = probe.score([make_group(trajectory)])[0].values()
    whole = (17, 3, 4, 5, 6, 7, 8, 2, 9, 1, 0, 2, 3, 4, 11)
    for length, logprob in zip((3, 8, 11, 15), score.logprobs, strict=True):
        expected = continuation_logprobs(model, whole[:length] + CODEC.encode("<answer>"), CODEC.encode(gold))
        assert logprob == pytest.approx(sum(expected) / len(expected), abs=1e-12)


def test_reference_logprobs_are_those_of_one_plain_forward(model):
    probe = ReferenceProbe(
        codec=CODEC,
        backend=IndependentBackend(runner=TransformersRunner(model), microbatch_tokens=64),
        max_sequence_tokens=64,
        policy_temperature=0.7,
    )
    trajectory = make_trajectory(TURNS)
    (arrays,) = probe.reference_logprobs([make_group(trajectory)]).values()
    tokens = trajectory.segments[0].tokens
    table = next_token_logprobs(model, tokens, 0.7)
    for position in range(len(tokens)):
        expected = float(table[position - 1, tokens[position]]) if position in (3, 4, 8, 11, 12, 13) else 0.0
        assert arrays[0][position] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("grid", [(1, 3, 7), (1, 12, 13, 120, 2000)])
def test_the_meter_gives_what_teacher_forcing_every_answer_alone_gives(model, grid):
    prompt = build_meter_prompt(CODEC, grid, MeterText(header="header", question="how"))
    scorer = CandidateMeter(
        prompt=prompt,
        backend=IndependentBackend(runner=TransformersRunner(model), microbatch_tokens=256),
        failure_cost=100.0,
        policy_fingerprint=CODEC.fingerprint,
        max_sequence_tokens=128,
    )
    (score,) = scorer.score([make_group(make_trajectory(TURNS))])[0].values()
    whole = (17, 3, 4, 5, 6, 7, 8, 2, 9, 1, 0)
    for length, forecast in zip((3, 8, 11), score.forecasts, strict=True):
        prefix = CODEC.encode("header") + whole[:length] + CODEC.encode("how")
        rows = [continuation_logprobs(model, prefix, answer.tokens) for answer in prompt.answers]
        bit = 2  # { "completion": 0|1
        yes, no = math.exp(rows[1][bit]), math.exp(rows[0][bit])
        # The joint probability of an answer of completion, over the sum of all of them.
        joint = [math.exp(sum(row)) for row in rows[1:]]
        expected = sum(p * t for p, t in zip(joint, grid, strict=True)) / sum(joint)
        assert forecast.completion_prob == pytest.approx(yes / (yes + no), abs=1e-12)
        assert forecast.tokens_to_go == pytest.approx(expected, rel=1e-10)
