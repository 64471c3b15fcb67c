"""The recipes that ship: they load, and no key in them can be misspelt without notice."""

import json
import re
from pathlib import Path

import pytest
import yaml

from megatrl.config.load import load_comparison, load_recipe
from megatrl.config.loaded import LoadedComparison
from megatrl.config.recipe import Recipe
from megatrl.config.schema import kind_of, leaf_fields
from megatrl.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(RECIPES.glob("*.yaml"))
FIELD_BUDGET = 200


def is_comparison(text: str) -> bool:
    return re.search(r"^arms:", text, re.MULTILINE) is not None


def load(path: Path):
    read = load_comparison if is_comparison(path.read_text()) else load_recipe
    return read(path, require_files=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_loads(path):
    loaded = load(path)
    named = loaded.comparison if isinstance(loaded, LoadedComparison) else loaded.recipe
    assert named.name == path.stem


# config.json of Qwen3-30B-A3B-Thinking-2507, as published
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "rope_theta": 10000000, "rope_scaling": None, "max_position_embeddings": 262144, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(RECIPES.glob("qwen3-30b-a3b-*.yaml")), ids=lambda path: path.stem)
def test_layout_and_limits_of_the_large_recipes_fit_the_model_they_name(path, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    loaded = load_recipe(path, [f"model.path={tmp_path}"])  # with the model's files, every rule applies
    assert loaded.warnings == ()
    with pytest.raises(ConfigError, match="num_heads=32"):
        load_recipe(path, [f"model.path={tmp_path}", "actor.layout.tensor=12"])


def keys(text: str):
    """(start, key) of every key in the text; names of arms are free and left out."""

    def walk(node, depth, is_in_arms):
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not (is_in_arms and depth == 1):
                    yield key.start_mark.index, key.value
                yield from walk(value, depth + 1, is_in_arms or (depth == 0 and key.value == "arms"))

    yield from walk(yaml.compose(text, Loader=yaml.SafeLoader), 0, False)


def mutations(key: str):
    """The key with one letter doubled, dropped, and replaced, in its last part."""
    middle = len(key) - max(1, len(key.rpartition(".")[2]) // 2)
    yield key[:middle] + key[middle] + key[middle:]
    yield key[:middle] + key[middle + 1 :]
    yield key[:middle] + ("q" if key[middle] != "q" else "z") + key[middle + 1 :]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_changed_by_one_letter_is_refused(path, tmp_path):
    text = path.read_text()
    for other in FILES:
        if other != path:
            (tmp_path / other.name).write_text(other.read_text())
    mutated = tmp_path / path.name
    num_mutations = 0
    for start, key in keys(text):
        for wrong in mutations(key):
            mutated.write_text(text[:start] + wrong + text[start + len(key) :])
            with pytest.raises(ConfigError) as refusal:
                load(mutated)
            assert wrong.rpartition(".")[2] in refusal.value.message
            num_mutations += 1
    assert num_mutations > 10


def test_the_schema_stays_within_its_budget_of_fields():
    leaves = list(leaf_fields(Recipe))
    options = {(leaf.section, leaf.name) for leaf in leaves if not (leaf.name == "kind" and kind_of(leaf.section))}
    choices = {leaf.path for leaf in leaves if leaf.name == "kind" and kind_of(leaf.section)}
    num_fields = len(options) + len(choices)
    assert 100 < num_fields <= FIELD_BUDGET, f"{num_fields} fields; delete one before adding one"
