"""Recipes, bases, overrides and comparisons as users write them, and what they are told when they err."""

from pathlib import Path

import pytest

from megatrl.config.credit import DeltaTTGCredit, TraceCredit
from megatrl.config.load import load_comparison, load_recipe
from megatrl.config.loaded import differences
from megatrl.config.recipe import Recipe, SFTStart, TrainedMeter
from megatrl.errors import ConfigError

MINIMAL = """\
name: tiny
model: {kind: tiny}
env: {kind: evidence_hunt}
actor: {device: cpu, precision: fp32}
rollout: {servers: {device: cpu, precision: fp32}}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_recipe(path, overrides)
    return error.value.message


def test_a_minimal_recipe_gets_every_default(tmp_path):
    loaded = load_recipe(write(tmp_path, MINIMAL))
    assert isinstance(loaded.recipe, Recipe)
    assert loaded.recipe.batch.group_size == 8
    assert loaded.recipe.actor.optimizer.lr == 1e-6
    assert str(loaded.origin("batch.group_size")) == "default"
    assert str(loaded.origin("name")) == f"{tmp_path}/recipe.yaml:1"


def test_a_number_without_a_point_is_a_number(tmp_path):
    loaded = load_recipe(write(tmp_path, MINIMAL.replace("precision: fp32}\n", "optimizer: {lr: 1e-4}}\n", 1)))
    assert loaded.recipe.actor.optimizer.lr == 1e-4


def test_every_leaf_has_an_origin(tmp_path):
    loaded = load_recipe(write(tmp_path, MINIMAL + "credit: {kind: trace}\n"), ["seed=7"])
    origins = {value.path: str(value.origin) for value in loaded.effective_values()}
    assert origins["credit.window"] == "default"
    assert origins["credit.kind"].endswith("recipe.yaml:6")
    assert origins["seed"] == "--set"
    assert set(origins) >= {"meter.kind", "loss.policy.clip_high", "publish.route"}


def test_a_recipe_changes_the_values_of_its_base(tmp_path):
    write(tmp_path, MINIMAL + "batch: {num_groups: 4, group_size: 4}\n", "base.yaml")
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "base: ../base.yaml\nbatch:\n  group_size: 6\n")
    loaded = load_recipe(path)
    assert (loaded.recipe.batch.num_groups, loaded.recipe.batch.group_size) == (4, 6)
    assert str(loaded.origin("batch.num_groups")) == f"base {tmp_path}/base.yaml:6"
    assert str(loaded.origin("batch.group_size")) == f"{path}:3"
    assert [Path(source.path).name for source in loaded.sources] == ["recipe.yaml", "base.yaml"]


def test_a_base_of_a_base_is_refused(tmp_path):
    write(tmp_path, MINIMAL, "first.yaml")
    write(tmp_path, "base: first.yaml\n", "second.yaml")
    message = refusal(write(tmp_path, "base: second.yaml\n"))
    assert "second.yaml:1" in message
    assert "a base may not have a base" in message


def test_a_missing_base_names_the_line_and_the_path(tmp_path):
    message = refusal(write(tmp_path, "name: a\nbase: nowhere.yaml\n"))
    assert "recipe.yaml:2: base = nowhere.yaml" in message


def test_another_kind_starts_from_its_own_defaults(tmp_path):
    write(tmp_path, MINIMAL + "credit: {kind: trace, gamma: 0.5}\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\ncredit: {kind: gigpo}\n")
    credit = load_recipe(path).recipe.credit
    assert credit.kind == "gigpo"
    assert credit.gamma == 0.95


def test_the_same_kind_keeps_the_values_of_the_base(tmp_path):
    write(tmp_path, MINIMAL + "credit: {kind: trace, gamma: 0.5}\n", "base.yaml")
    credit = load_recipe(write(tmp_path, "base: base.yaml\ncredit: {kind: trace, window: 5}\n")).recipe.credit
    assert isinstance(credit, TraceCredit)
    assert (credit.gamma, credit.window) == (0.5, 5)


def test_a_section_whose_default_differs_from_its_class_keeps_its_other_values(tmp_path):
    text = MINIMAL + "start: {kind: sft, sft: {optimizer: {warmup_steps: 5}}}\n"
    start = load_recipe(write(tmp_path, text)).recipe.start
    assert isinstance(start, SFTStart)
    assert start.sft.optimizer.lr == 3e-3  # SFTConfig's default, not OptimizerConfig's 1e-6


def test_an_optional_section_can_be_filled_and_emptied(tmp_path):
    path = write(tmp_path, MINIMAL + "reward: {overlong: {max_tokens: 8, buffer_tokens: 4}}\n")
    overlong = load_recipe(path).recipe.reward.overlong
    assert overlong is not None
    assert overlong.floor is True
    assert load_recipe(path, ["reward.overlong=null"]).recipe.reward.overlong is None


@pytest.mark.parametrize("text, value", [("false", False), ("False", False), ("true", True)])
def test_a_truth_value_on_the_command_line_is_what_it_says(tmp_path, text, value):
    loaded = load_recipe(write(tmp_path, MINIMAL), [f"publish.verify={text}"])
    assert loaded.recipe.publish.verify is value


@pytest.mark.parametrize("text", ["0", "no", "off", "none", "False ly"])
def test_other_words_for_false_are_refused_on_the_command_line(tmp_path, text):
    message = refusal(write(tmp_path, MINIMAL), f"publish.verify={text}")
    assert f"--set: publish.verify = {text}: expected true or false" in message


def test_quoted_false_is_refused_in_a_file(tmp_path):
    message = refusal(write(tmp_path, MINIMAL + "publish:\n  verify: 'false'\n"))
    assert "recipe.yaml:7: publish.verify = 'false': expected true or false; remove the quotes" in message


def test_the_order_of_overrides_does_not_matter_for_kinds_and_the_last_value_wins(tmp_path):
    path = write(tmp_path, MINIMAL)
    credit = load_recipe(path, ["credit.window=4", "credit.kind=trace", "credit.window=5"]).recipe.credit
    assert isinstance(credit, TraceCredit)
    assert credit.window == 5


def test_overrides_reach_variants_that_are_the_default(tmp_path):
    policy = load_recipe(write(tmp_path, MINIMAL), ["loss.policy.clip_high=0.3"]).recipe.loss.policy
    assert (policy.kind, policy.clip_low, policy.clip_high) == ("clipped", 0.2, 0.3)


METER = MINIMAL + "credit: {kind: deltattg}\nmeter: {kind: trained, detours: [0.1, 0.2, 0.3]}\n"


@pytest.mark.parametrize(
    "override, detours",
    [
        ("meter.detours.1=0.9", (0.1, 0.9, 0.3)),
        ("meter.detours=[0.5]", (0.5,)),
        ("meter.detours=[1e-1, 2e-1]", (0.1, 0.2)),
    ],
)
def test_lists_are_replaced_whole_or_by_index(tmp_path, override, detours):
    meter = load_recipe(write(tmp_path, METER), [override]).recipe.meter
    assert isinstance(meter, TrainedMeter)
    assert meter.detours == detours


def test_a_list_of_defaults_can_be_changed_by_index(tmp_path):
    text = MINIMAL + "credit: {kind: deltattg}\nmeter: {kind: trained}\n"
    meter = load_recipe(write(tmp_path, text), ["meter.detours.2=0.7"]).recipe.meter
    assert isinstance(meter, TrainedMeter)
    assert meter.detours == (0.05, 0.3, 0.7)


@pytest.mark.parametrize("index", ["3", "-1", "x"])
def test_an_index_outside_the_list_is_refused(tmp_path, index):
    assert "indices 0 to 2" in refusal(write(tmp_path, METER), f"meter.detours.{index}=0.5")


def test_a_map_in_place_of_a_list_is_refused_in_a_file(tmp_path):
    assert "expected a list" in refusal(write(tmp_path, METER.replace("[0.1, 0.2, 0.3]", "{0: 0.5}")))


@pytest.mark.parametrize("override", ["batch.group_size", "=4", "batch..group_size=4", "batch.group_size.x=4"])
def test_malformed_overrides_are_refused(tmp_path, override):
    assert f"--set: {override.partition('.x')[0].partition('=4')[0]}" in refusal(write(tmp_path, MINIMAL), override)


def test_all_violations_are_listed_at_once_with_line_path_value_and_remedy(tmp_path):
    text = MINIMAL + (
        "batch:\n  group_sise: 8\n  num_groups: 0\n"
        "loss:\n  kl_coefficient: -1\n  reduction: tokenmean\n"
        "train:\n  num_steps: 1e3\n"
        "seed: true\n"
    )
    message = refusal(write(tmp_path, text), "publish.rout=disk")
    file = f"{tmp_path}/recipe.yaml"
    assert "7 problems" in message
    for line in (
        f"{file}:7: batch.group_sise = 8: unknown key; did you mean batch.group_size?",
        f"{file}:8: batch.num_groups = 0: must be greater than 0",
        f"{file}:10: loss.kl_coefficient = -1.0: must be greater than or equal to 0",
        f"{file}:11: loss.reduction = tokenmean: expected token_mean | ",
        f"{file}:13: train.num_steps = 1e3: expected an integer; write 1000",
        f"{file}:14: seed = true: expected an integer",
        "--set: publish.rout = disk: unknown key; did you mean publish.route?",
    ):
        assert line in message


def test_a_key_at_the_wrong_level_is_sent_to_the_right_one(tmp_path):
    assert "did you mean batch.group_size?" in refusal(write(tmp_path, MINIMAL + "group_size: 4\n"))
    assert "did you mean actor.optimizer.lr" in refusal(write(tmp_path, MINIMAL), "actor.lr=1e-4")


def test_an_option_of_another_kind_says_so(tmp_path):
    message = refusal(write(tmp_path, MINIMAL), "credit.window=3")
    assert "credit.window exists only for another kind of credit" in message


def test_an_unknown_kind_names_the_nearest(tmp_path):
    message = refusal(write(tmp_path, MINIMAL + "credit: {kind: deltatg}\n"))
    assert "credit.kind = deltatg" in message
    assert "did you mean deltattg?" in message


def test_required_values_are_asked_for(tmp_path):
    message = refusal(write(tmp_path, "seed: 1\n"))
    assert "name: required" in message
    assert "set env.kind to one of evidence_hunt, switchboard, textworld, meter_prompts" in message
    assert "set model.kind to one of hf, tiny" in message


def test_duplicate_keys_are_refused_with_both_lines(tmp_path):
    message = refusal(write(tmp_path, MINIMAL + "seed: 1\nbatch: {}\nseed: 2\n"))
    assert "recipe.yaml:8: seed: the key is written twice" in message
    assert "recipe.yaml:6" in message


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "the file is empty"),
        ("- a\n", "the file is a list"),
        ("a: [1\n", "not valid YAML"),
        ("a:\n\tb: 1\n", "recipe.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("name: &x tiny\nseed: *x\n", "anchors and aliases are not supported"),
        ("name: !!python/name:os.system\n", "is not supported"),
        ("? [a]\n: 1\n", "a key must be plain text"),
        ("<<: {a: 1}\n", "a key must be plain text"),
    ],
)
def test_what_is_not_a_plain_map_is_refused_with_its_place(tmp_path, text, problem):
    message = refusal(write(tmp_path, text))
    assert problem in message
    assert "recipe.yaml" in message


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    assert "not UTF-8" in refusal(str(tmp_path / "latin.yaml"))
    assert "no such file" in refusal(str(tmp_path / "absent.yaml"))
    assert "is a directory" in refusal(str(tmp_path))


def test_missing_model_files_stop_training_but_not_reading(tmp_path):
    path = write(tmp_path, MINIMAL.replace("{kind: tiny}", "{kind: hf, path: models/absent}"))
    assert "model.path = models/absent" in refusal(path)
    warnings = load_recipe(path, require_files=False).warnings
    assert any("model.path = models/absent" in warning for warning in warnings)


def test_the_fingerprint_depends_on_values_alone(tmp_path):
    first = load_recipe(write(tmp_path, MINIMAL))
    same = load_recipe(write(tmp_path, "seed: 0\n" + MINIMAL, "other.yaml"))
    other = load_recipe(write(tmp_path, MINIMAL), ["seed=1"])
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert [difference.path for difference in differences(first, other)] == ["seed"]


COMPARISON = (
    "name: both\nrecipe: recipe.yaml\narms:\n  grpo: {}\n  trace:\n    credit.kind: trace\n    credit.window: 5\n"
)


def comparison_refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_comparison(path, overrides)
    return error.value.message


def test_a_comparison_gives_one_recipe_for_each_arm(tmp_path):
    write(tmp_path, MINIMAL)
    path = write(tmp_path, COMPARISON, "comparison.yaml")
    loaded = load_comparison(path, ["train.num_steps=2"])
    assert list(loaded.arms) == ["grpo", "trace"]
    credit = loaded.arms["trace"].recipe.credit
    assert isinstance(credit, TraceCredit)
    assert credit.window == 5
    assert str(loaded.arms["trace"].origin("credit.window")) == f"arm trace {path}:7"
    assert [arm.recipe.train.num_steps for arm in loaded.arms.values()] == [2, 2]
    assert loaded.comparison.arms["trace"] == {"credit.kind": "trace", "credit.window": "5"}


def test_problems_of_all_arms_are_listed_at_once(tmp_path):
    write(tmp_path, MINIMAL)
    text = COMPARISON + "  meterless: {credit.kind: deltattg}\n  typo: {batch.group_sise: 4}\n"
    message = comparison_refusal(write(tmp_path, text, "comparison.yaml"))
    assert "arm meterless" in message
    assert "DeltaTTG reads a meter" in message
    assert "arm typo" in message
    assert "did you mean batch.group_size?" in message


@pytest.mark.parametrize(
    "text, problem",
    [
        (COMPARISON.replace("arms:", "arm:"), "did you mean arms?"),
        (COMPARISON.replace("credit.window: 5", "env.num_hops: 5"), "all arms share env"),
        (COMPARISON.replace("credit.window: 5", "actor.layout.expert: 2"), "all arms share actor.layout"),
        (COMPARISON.replace("  grpo: {}", "  a/b: {}"), "names a directory"),
        (COMPARISON.replace("  grpo: {}", "  grpo: 3"), "expected a map of overrides"),
        ("name: both\nrecipe: recipe.yaml\narms: {}\n", "expected a map of arms"),
        ("name: both\nrecipe: absent.yaml\narms: {a: {}}\n", "absent.yaml: no such file"),
        ("name: a/b\nrecipe: recipe.yaml\narms: {a: {}}\n", "name = a/b"),
    ],
)
def test_malformed_comparisons_are_refused(tmp_path, text, problem):
    write(tmp_path, MINIMAL)
    assert problem in comparison_refusal(write(tmp_path, text, "comparison.yaml"))


def test_a_comparison_can_train_a_meter_for_one_arm(tmp_path):
    write(tmp_path, MINIMAL)
    text = "name: m\nrecipe: recipe.yaml\narms:\n  d: {credit.kind: deltattg, meter: {kind: trained, detours: [0.2]}}\n"
    recipe = load_comparison(write(tmp_path, text, "comparison.yaml")).arms["d"].recipe
    assert isinstance(recipe.credit, DeltaTTGCredit)
    assert isinstance(recipe.meter, TrainedMeter)
    assert recipe.meter.detours == (0.2,)
