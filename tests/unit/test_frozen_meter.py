import json

import pytest

from megatrl.errors import CheckpointError
from megatrl.meter.frozen import MANIFEST_NAME, freeze_meter, load_frozen_meter
from megatrl.meter.prompt import MeterText, build_meter_prompt
from tests.fakes.frozen_models import WordCodec

CODEC = WordCodec(["header", "how", '{"completion":', "0,", "1,", '"tokens_to_go":', "null}", "1}", "4}"])
PROMPT = build_meter_prompt(CODEC, (1, 4), MeterText(header="header", question="how"))


@pytest.fixture
def weights(tmp_path):
    source = tmp_path / "saved"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(bytes(range(256)))
    (source / "tokenizer.json").write_text("{}")
    return source


def freeze(weights, destination):
    return freeze_meter(
        weights, destination, prompt=PROMPT, failure_cost=412.5, training_hash="abc", evaluation={"bit_auc": 0.75}
    )


def test_a_frozen_meter_comes_back_as_it_was(weights, tmp_path):
    frozen = freeze(weights, tmp_path / "meter")
    loaded = load_frozen_meter(tmp_path / "meter")
    assert loaded == frozen
    assert loaded.prompt == PROMPT
    assert (loaded.failure_cost, loaded.training_hash, loaded.evaluation) == (412.5, "abc", {"bit_auc": 0.75})
    assert sorted(p.name for p in (tmp_path / "meter").iterdir()) == [
        "config.json", MANIFEST_NAME, "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_altered_and_missing_files_are_named(weights, tmp_path):
    path = tmp_path / "meter"
    freeze(weights, path)
    (path / "model.safetensors").write_bytes(bytes(256))
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors, tokenizer\.json"):
        load_frozen_meter(path)


def test_a_domain_has_its_own_cost_and_an_unknown_one_gets_the_meters(weights, tmp_path):
    costs = {"evidence_hunt": 96.0, "textworld": 240.0}
    frozen = freeze_meter(
        weights, tmp_path / "meter", prompt=PROMPT, failure_cost=200.0, failure_costs=costs, training_hash="abc"
    )
    assert [frozen.cost_in(domain) for domain in ("evidence_hunt", "textworld", "papers")] == [96.0, 240.0, 200.0]


def test_a_frozen_meter_is_never_overwritten_and_sources_are_checked(weights, tmp_path):
    freeze(weights, tmp_path / "meter")
    with pytest.raises(CheckpointError, match="never overwritten"):
        freeze(weights, tmp_path / "meter")
    (weights / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no Hugging Face model"):
        freeze(weights, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_failure_while_freezing_leaves_nothing_behind(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        freeze(weights, tmp_path / "meter")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("damage", ["not json", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_manifest_that_cannot_be_read_is_an_error(weights, tmp_path, damage):
    freeze(weights, tmp_path / "meter")
    (tmp_path / "meter" / MANIFEST_NAME).write_text(damage)
    with pytest.raises(CheckpointError):
        load_frozen_meter(tmp_path / "meter")
    with pytest.raises(CheckpointError, match="is missing"):
        load_frozen_meter(weights)


def test_the_identity_follows_the_weights(weights, tmp_path):
    one = freeze(weights, tmp_path / "one")
    (weights / "model.safetensors").write_bytes(bytes(256))
    other = freeze(weights, tmp_path / "other")
    assert one.identity != other.identity
    assert json.loads((tmp_path / "one" / MANIFEST_NAME).read_text())["prompt"]["template_hash"] == PROMPT.template_hash
