"""The RL loop: act, judge, score, credit, learn, publish, record."""

from megatrl.algorithms.advantages import estimate_advantages
from megatrl.batching.flatten import flatten_groups
from megatrl.batching.packing import pack
from megatrl.orchestration.progress import Progress
from megatrl.orchestration.run import Run


def train(run: Run) -> Progress:
    """Alternates rollouts and policy updates until `train.num_steps` steps are done.

    Only `rollout`, `actor` and `scorers` touch devices; each call is collective over that role's
    processes and returns when all have answered. Everything under "credit" is pure driver code over
    whole prompt groups, before any sharding.
    """
    config, actor = run.config, run.actor
    progress = run.checkpoints.restore_latest()
    run.weight_sync.publish(progress.policy_version)
    if progress.step == 0 and config.evaluation.is_due(0):
        run.evaluator.run(progress).report_to(run.observe.baseline)

    while progress.step < config.train.num_steps:
        step = progress.step + 1
        with run.observe.step(step) as record:
            # Act and judge: play every episode to its end under one policy version, reward outcomes.
            with record.span("act"), run.devices.lend_to_rollout():
                batch = run.rollout.fill(run.prompts, progress)
            record.trajectories(batch.groups, batch.dropped)  # on disk before anything can go wrong
            batch.check()

            with run.devices.lend_to_actor():
                # Score: the frozen models read the trajectories; no gradients here.
                with record.span("score"):
                    scores = run.scorers.score(batch.kept)
                    reference_logprobs = run.scorers.reference_logprobs(batch.kept)

                # Credit: rewards -> advantages -> packed batch with one global denominator.
                with record.span("credit"):
                    estimate = estimate_advantages(batch.kept, scores, **run.credit)
                    samples = flatten_groups(batch.kept, estimate.per_turn, reference_logprobs)
                    packed = pack(samples, num_data_ranks=actor.num_data_ranks, **run.packing)

                # Learn: freeze the old policy's logprobs, then take the optimizer steps.
                with record.span("learn"):
                    old_logprobs = actor.logprobs(packed)
                    run.mismatch.check(progress, packed, old_logprobs)
                    update = actor.update(run.with_old_logprobs(packed, old_logprobs), step)

            # Publish: the next rollouts come from the weights just trained, proven to be there.
            with record.span("publish"):
                progress = progress.advance(
                    optimizer_steps=update.num_optimizer_steps, prompt_position=run.prompts.position
                )
                run.weight_sync.publish(progress.policy_version)

            # Record: the trajectories again with their credit, dropped ones too; evaluate where due.
            record.trajectories(batch.groups, batch.dropped, estimate.per_turn, scores, estimate.details)
            record.add(run.step_metrics(batch, packed, estimate, update))
            if config.evaluation.is_due(step):
                with record.span("evaluate"):
                    evaluation = run.evaluator.run(progress)
                evaluation.report_to(record.evaluation)

        # After the step's row is written: a kill in between repeats a step and never loses one.
        run.checkpoints.step_done(progress)
    return progress
