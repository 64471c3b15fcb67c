"""Every rule that needs several fields: it fires on the pair that breaks it, and not on the base recipe."""

import json

import pytest

from megatrl.config.checks import CHECKS, FILE_CHECKS
from megatrl.config.load import load_recipe
from megatrl.errors import ConfigError

BASE = """\
name: tiny
model: {kind: tiny}
env: {kind: evidence_hunt}
actor: {device: cpu, precision: fp32}
rollout: {servers: {device: cpu, precision: fp32}}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return str(path)


REFUSED = {
    "check_sampling_filters": [
        ("rollout.sampling.top_p=0.9", "a filtered sampler is not the policy"),
        ("rollout.sampling.top_k=20", "a filtered sampler is not the policy"),
        ("rollout.sampling.top_k=0", "would leave no token"),
    ],
    "check_group_size": [
        ("batch.group_size=1 selection.min_group_size=1", "nothing would be learned"),
        ("selection.min_group_size=9", "every group would get zero weight"),
    ],
    "check_trace_selection": [("credit.kind=trace selection.drop_equal_rewards=true", "TRACE learns from groups")],
    "check_gold_answers": [("credit.kind=trace env.kind=textworld", "TextWorld games have none")],
    "check_chat_format": [("rollout.chat_format=llama3", "a qwen3_moe model is not made for this format")],
    "check_server_degree": [("rollout.servers.tensor=3", "does not divide the model's 4 attention heads")],
    "check_meter": [
        ("credit.kind=deltattg", "DeltaTTG reads a meter"),
        ("meter.kind=trained", "only credit.kind: deltattg reads a meter"),
    ],
    "check_meter_training": [
        (
            "credit.kind=deltattg meter.kind=trained meter.num_policy_episodes=0 meter.num_scripted_episodes=0",
            "nothing to learn from",
        ),
        ("credit.kind=deltattg meter.kind=trained meter.detours=[]", "scripted episodes are asked for"),
        ("credit.kind=deltattg meter.kind=trained meter.detours.0=1.5", "1.5 is not a probability"),
    ],
    "check_meter_prompts": [
        ("env.kind=meter_prompts env.labels=labels", "meter_prompts reads recorded tokens"),
        ("env.kind=meter_prompts env.labels=labels credit.kind=gigpo", "a forecast is one action"),
    ],
    "check_label_files": [("env.kind=meter_prompts env.labels=labels", "holds no labels.json")],
    "check_readout": [
        (
            "credit.kind=deltattg meter.kind=trained credit.readout=decode credit.target=completion_prob",
            "this target reads a probability",
        ),
    ],
    "check_loss_options": [
        ("loss.reduction=constant", "divides by it"),
        ("loss.constant_length=512", "is read by loss.reduction: constant only"),
        ("loss.off_policy.kind=icepop loss.off_policy.low=3", "the band 3.0 to 2.0 is empty"),
    ],
    "check_overlong": [("reward.overlong={max_tokens: 8, buffer_tokens: 9}", "every trajectory would be penalised")],
    "check_minibatches": [("batch.num_minibatches=3", "does not divide num_groups x group_size = 16 x 8 = 128")],
    "check_router_model": [
        ("model.family=qwen3 actor.router.replay=true", "a qwen3 model is dense"),
        ("model.family=llama3 actor.router.z_loss_coefficient=0.1", "a llama3 model is dense"),
    ],
    "check_load_balancing": [
        ("actor.router.load_balancing=sequence", "the load-balancing loss would do nothing"),
        ("actor.router.load_balancing_coefficient=0.1", "is read by a load-balancing loss only"),
        ("actor.router.load_balancing=global actor.router.load_balancing_coefficient=1", "only recorded choices are"),
    ],
    "check_expert_bias": [
        ("actor.router.expert_bias_update_rate=0.001", "actor and server would choose differently"),
        ("actor.router.expert_bias_update_rate=0.001 actor.router.replay=true", "recorded choices do not read it"),
    ],
    "check_turn_limits": [("rollout.max_turns=7", "the environment allows more turns")],
    "check_token_limits": [
        ("rollout.context_tokens=512", "leaves no room"),
        ("rollout.max_observation_tokens=4096", "leaves no room"),
        ("rollout.servers.max_total_tokens=1000", "one trajectory would not fit"),
        ("rollout.servers.max_total_tokens=4103", "set it to 4104 or more"),
    ],
    "check_learning_rate": [
        ("actor.optimizer.min_lr=1", "the rate would rise"),
        ("actor.optimizer.warmup_steps=150", "the warm-up does not end"),
        ("start.kind=sft start.sft.optimizer.warmup_steps=300", "start.sft.optimizer.warmup_steps = 300"),
        (
            "credit.kind=deltattg meter.kind=trained meter.sft.optimizer.min_lr=1",
            "meter.sft.optimizer.min_lr = 1.0",
        ),
    ],
    "check_devices": [
        ("placement.kind=colocated rollout.servers.device=cuda", "colocated roles share devices"),
        (
            "placement.kind=colocated publish.route=broadcast actor.device=cuda rollout.servers.device=cuda",
            "colocated roles cannot broadcast",
        ),
        (
            "placement.kind=colocated actor.device=cuda rollout.servers.device=cuda rollout.servers.num_servers=2",
            "2 x 1 = 2 devices for servers",
        ),
    ],
    "check_sglang_arguments": [
        ("rollout.servers.sglang={tp-size: 2}", "is set by rollout.servers.tensor"),
        ("rollout.servers.sglang.port=30000", "is set by the launcher"),
    ],
    "check_tiny_model": [
        ("model.num_kv_heads=3", "is not a multiple of num_kv_heads"),
        ("model.num_experts_per_token=9", "is more than the model has experts"),
    ],
    "check_layout_fits": [
        ("actor.layout.world_size=3 actor.layout.tensor=2 actor.layout.sequence_parallel=true", "not a multiple"),
        ("actor.layout.world_size=2 actor.layout.tensor=2", "sequence_parallel: true"),
        ("actor.layout.sequence_parallel=true", "needs layout.tensor > 1"),
        ("actor.layout.world_size=3 actor.layout.pipeline=3", "num_layers=2"),
        ("actor.layout.world_size=2 actor.layout.context=4", "layout.context=4 (set) = 4"),
        (
            "actor.layout.world_size=2 actor.layout.pipeline=2 actor.layout.virtual_pipeline=2",
            "a stage of 1 layers does not divide into 2 chunks",
        ),
        ("actor.layout.last_stage_layers=1", "one stage holds all layers"),
        ("actor.layout.world_size=2 actor.layout.expert=2 model.family=qwen3", "has no experts"),
    ],
    "check_oracle_meter": [
        (
            "credit.kind=deltattg meter={kind: oracle, failure_cost: 9} env={kind: textworld} credit.terminal=carry",
            "does not know the remaining work",
        ),
        (
            "credit.kind=deltattg meter={kind: oracle, failure_cost: 9} credit.terminal=meter",
            "answers for decision states only",
        ),
    ],
    "check_scoring_backend": [
        (
            "credit.kind=trace actor.layout.world_size=2 actor.layout.context=2",
            "does not run under context parallelism (2)",
        ),
        (
            "scoring.backend=sglang loss.kl_coefficient=0.1 rollout.sampling.temperature=0.7",
            "reads given tokens at temperature 1, the KL term compares at 0.7",
        ),
    ],
    "check_context_fits_model": [
        ("rollout.context_tokens=20000", "the model has 16384 positions"),
        ("rollout.context_tokens=16377", "set it to at most 16376"),
    ],
    "check_model_files": [
        ("model={kind: hf, path: models/absent}", "config.json does not exist"),
        ("credit.kind=deltattg meter={kind: frozen, path: models/absent}", "no such directory"),
    ],
}

WARNED = {
    "check_sampling_filters": [("rollout.sampling.top_p=0.9 loss.off_policy.kind=icepop", "a filtered sampler")],
    "check_group_size": [
        ("credit.kind=trace batch.group_size=1 selection.min_group_size=1", "only TRACE's local credit remains")
    ],
    "check_loss_options": [("loss.policy.kind=gspo", "GSPO is defined as a mean over sequences")],
    "check_unused_kl_options": [("loss.kl_estimator=k1", "has no effect while loss.kl_coefficient is 0")],
    "check_precision": [("rollout.servers.precision=bf16", "differs from actor.precision")],
    "check_selection_rounds": [
        ("selection.drop_equal_rewards=true selection.max_rounds=1", "one round cannot refill a batch")
    ],
}


def split(settings: str) -> list[str]:
    """Overrides of one text; a space after a comma or colon does not separate."""
    return settings.replace(", ", ",\0").replace(": ", ":\0").replace(" ", "\n").replace("\0", " ").split("\n")


def cases(table):
    return [(name, split(settings), problem) for name, rows in table.items() for settings, problem in rows]


def test_every_check_has_a_case():
    assert {check.__name__ for check in (*CHECKS, *FILE_CHECKS)} == set(REFUSED) | set(WARNED)


def test_the_base_recipe_passes_without_warnings(recipe):
    assert load_recipe(recipe).warnings == ()


@pytest.mark.parametrize("check, overrides, problem", cases(REFUSED))
def test_a_combination_that_cannot_work_is_refused(recipe, check, overrides, problem):
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, overrides)
    lines = [line for line in refusal.value.message.splitlines()[1:] if problem in line]
    assert lines, refusal.value.message
    assert ";" in lines[0]  # the remedy


@pytest.mark.parametrize("check, overrides, problem", cases(WARNED))
def test_a_combination_that_may_surprise_is_warned_about(recipe, check, overrides, problem):
    warnings = load_recipe(recipe, overrides).warnings
    assert any(problem in warning for warning in warnings), warnings


def test_the_longest_trajectory_that_the_server_takes_is_accepted(recipe):
    load_recipe(recipe, ("rollout.context_tokens=16376", "rollout.servers.max_total_tokens=16384"))


def test_a_run_without_frozen_models_has_no_backend_that_could_mind_context_ranks(recipe):
    load_recipe(recipe, ("credit.kind=none", "actor.layout.world_size=2", "actor.layout.context=2"))


def test_a_layout_that_is_refused_tells_what_was_set_from_what_is_a_default(recipe):
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, ["actor.layout.world_size=3", "actor.layout.context=2"])
    product = "layout.tensor=1 (default) x layout.pipeline=1 (default) x layout.context=2 (set) = 2"
    assert f"layout.world_size=3 (set) is not a multiple of {product}" in refusal.value.message
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, ["actor.layout.world_size=3", "actor.layout.pipeline=3"])
    assert "layout.pipeline=3 (set) do not fit num_layers=2" in refusal.value.message


def test_a_problem_names_the_values_it_comes_from_and_their_places(recipe):
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, ["batch.num_minibatches=3"])
    message = refusal.value.message
    assert "--set: batch.num_minibatches = 3" in message
    assert "batch.num_groups = 16 (default)" in message
    assert "nearest values: 2 or 4" in message


def test_several_problems_are_reported_together(recipe):
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, ["batch.num_minibatches=3", "rollout.max_turns=2", "credit.kind=deltattg"])
    assert "3 problems" in refusal.value.message


def write_model_config(folder, **changes):
    config = {
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_the_chat_format_of_a_model_on_disk_is_only_warned_about(recipe, tmp_path):
    write_model_config(tmp_path, model_type="llama")
    model = f"model={{kind: hf, path: {tmp_path}}}"
    assert "rollout.chat_format = chatml" in load_recipe(recipe, [model]).warnings[0]
    assert load_recipe(recipe, [model, "rollout.chat_format=llama3"]).warnings == ()


def test_the_layout_is_checked_against_model_files(recipe, tmp_path):
    write_model_config(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        load_recipe(
            recipe, [f"model={{kind: hf, path: {tmp_path}}}", "actor.layout.world_size=4", "actor.layout.tensor=4"]
        )
    assert "actor.layout.tensor = 4" in refusal.value.message
    assert "num_heads=2" in refusal.value.message
