"""The tiny model: same bytes every time, a tokenizer that text cannot deceive, a directory engines can load."""

import hashlib
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from megatrl.checkpoint.tiny_model import make_tiny  # noqa: E402
from megatrl.config.engines import TinyModel  # noqa: E402
from megatrl.config.environments import EvidenceHuntConfig, TextWorldConfig  # noqa: E402
from megatrl.config.model_shape import read_model_shape, tiny_model_shape  # noqa: E402
from megatrl.data.meter_answer import answer_text  # noqa: E402
from megatrl.errors import CheckpointError, ConfigError  # noqa: E402
from megatrl.rendering.renderer import load_renderer  # noqa: E402

ENV = EvidenceHuntConfig(num_hops=3, max_turns=6)
SMALL = TinyModel(hidden_size=32, num_layers=2, num_experts=4, ffn_size=32)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_arguments_give_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    make_tiny(SMALL, ENV, tmp_path / "a")
    torch.manual_seed(7)
    make_tiny(SMALL, ENV, tmp_path / "b")
    make_tiny(SMALL.model_copy(update={"seed": 1}), ENV, tmp_path / "c")
    torch.random.set_rng_state(state)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    changed = {name for name, digest in digests(tmp_path / "c").items() if digests(tmp_path / "a")[name] != digest}
    assert changed == {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_making_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_tiny(SMALL, ENV, tmp_path / "a")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("family", "chat_format"), [("qwen3_moe", "chatml"), ("qwen3", "chatml"), ("llama3", "llama3")]
)
def test_every_family_loads_in_transformers_and_renders_in_its_chat_format(tmp_path: Path, family, chat_format) -> None:
    make_tiny(SMALL.model_copy(update={"family": family}), ENV, tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    renderer = load_renderer(str(tmp_path / "m"), chat_format, "react")
    assert renderer.vocab_size == model.config.vocab_size
    assert model.config.vocab_size % 8 == 0
    ids = renderer.initial([{"role": "user", "content": "question q3"}])
    logits = model(torch.tensor([ids])).logits[0, -1].detach()
    assert logits.shape == (model.config.vocab_size,)
    assert torch.isfinite(logits).all()
    assert logits.float().softmax(-1).max() < 0.2  # an unopinionated start
    assert set(renderer.stop_token_ids) <= {*model.generation_config.eos_token_id, renderer.stop_token_ids[-1]}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "llama3"])
def test_the_shape_that_recipes_are_checked_with_is_that_of_the_model_made(tmp_path: Path, family) -> None:
    config = SMALL.model_copy(update={"family": family})
    make_tiny(config, ENV, tmp_path / "m")
    made = read_model_shape(tmp_path / "m")
    assert made == tiny_model_shape(config, vocab_size=made.vocab_size)


def test_rendering_is_one_token_a_word_in_the_expected_order(tmp_path: Path) -> None:
    make_tiny(SMALL, ENV, tmp_path / "m")
    renderer = load_renderer(str(tmp_path / "m"), "chatml", "react")
    prompt = renderer.initial([{"role": "user", "content": "question q3"}])
    assert renderer.decode(prompt) == "<|im_start|> user question q3 <|im_end|> <|im_start|> assistant"
    more = renderer.continuation([{"role": "tool", "content": "v4 1/3"}], previous_ended=True)
    assert renderer.decode(more) == "<|im_start|> user v4 1/3 <|im_end|> <|im_start|> assistant"
    action = renderer.encode("Action: open doc7")
    assert len(action) == 3
    assert renderer.action_text((*action, renderer.stop_token_ids[0])) == "Action: open doc7"
    assert renderer.decode(renderer.answer_wrapper()) == "<answer>"


def test_no_text_spells_a_special_token(tmp_path: Path) -> None:
    make_tiny(SMALL, ENV, tmp_path / "m")
    renderer = load_renderer(str(tmp_path / "m"), "chatml", "react")
    ids = renderer.encode("<|im_end|> <|im_start|> assistant<|im_end|> <|endoftext|>")
    assert not set(ids) & set(renderer.stop_token_ids)


def test_every_forecast_of_a_short_episode_is_distinct_and_known(tmp_path: Path) -> None:
    make_tiny(SMALL, ENV, tmp_path / "m")
    renderer = load_renderer(str(tmp_path / "m"), "chatml", "react")
    answers = [answer_text(completion=True, tokens_to_go=tokens) for tokens in range(128)]
    answers.append(answer_text(completion=False, tokens_to_go=None))
    encoded = {renderer.encode(answer) for answer in answers}
    assert len(encoded) == len(answers)
    assert {len(ids) for ids in encoded} == {4}
    unknown = renderer.encode("zebra")
    assert not {unknown[0]} & {token for ids in encoded for token in ids}


def test_the_hugging_face_template_agrees_with_the_renderer(tmp_path: Path) -> None:
    make_tiny(SMALL, ENV, tmp_path / "m")
    renderer = load_renderer(str(tmp_path / "m"), "chatml", "react")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    messages = [
        {"role": "user", "content": "question q3"},
        {"role": "assistant", "content": "Action: open doc7"},
        {"role": "tool", "content": "v4 1/3"},
    ]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    action = (*renderer.encode("Action: open doc7"), renderer.stop_token_ids[0])
    ours = (
        *renderer.initial(messages[:1]),  # type: ignore[arg-type]
        *action,
        *renderer.continuation(messages[2:], previous_ended=True),  # type: ignore[arg-type]
    )
    assert tuple(theirs["input_ids"]) == ours


def test_textworld_words_make_a_model_too(tmp_path: Path) -> None:
    make_tiny(SMALL, TextWorldConfig(), tmp_path / "m")
    renderer = load_renderer(str(tmp_path / "m"), "chatml", "react")
    assert renderer.encode("zebra")[0] not in renderer.encode("Action: act go east")


def test_a_directory_with_content_and_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        make_tiny(SMALL, ENV, tmp_path / "m")
    assert (tmp_path / "m" / "notes").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"model\.num_heads=4 is not a multiple"):
        make_tiny(SMALL.model_copy(update={"num_kv_heads": 3}), ENV, tmp_path / "n")
    with pytest.raises(ConfigError, match=r"model\.num_experts_per_token=5"):
        make_tiny(SMALL.model_copy(update={"num_experts_per_token": 5}), ENV, tmp_path / "n")
    assert {path.name for path in tmp_path.iterdir()} == {"m"}


def test_generation_config_stops_at_the_end_of_turn(tmp_path: Path) -> None:
    make_tiny(SMALL, ENV, tmp_path / "m")
    settings = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    renderer = load_renderer(str(tmp_path / "m"), "chatml", "react")
    assert settings["eos_token_id"] == list(renderer.stop_token_ids)


def test_making_a_model_writes_nothing_on_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tiny(SMALL, ENV, tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()
