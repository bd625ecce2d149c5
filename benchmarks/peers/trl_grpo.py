"""One run of TRL's GRPOTrainer on a Laminar recipe: same model, task, batch, loss and evaluation; the rest is TRL's.

Started by benchmarks/quickstart.py in a process of its own, so that nothing else imports TRL. Writes the run to --out
as one JSON object (`Trace` in quickstart.py). Its clock stands still during evaluation, which is ours and not TRL's.

Besides what the recipe says, three settings are not TRL's defaults: gradient checkpointing is off, since memory is
plenty; bfloat16 is off, since the recipe is float32; and a step is cut into micro-batches, which is faster. Two options
of TRL were tried and left alone because they are slower on CPU: continuous batching (15 times the CPU time
of `generate` for 256 answers of 60 tokens) and eager attention (1.7 times that of SDPA).

    python benchmarks/peers/trl_grpo.py --recipe recipes/gcd.yaml --out /tmp/trl.json [--seed 0] [--threads 1]
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from laminar.config.loading import load_recipe
from laminar.config.run_config import RunConfig
from laminar.tasks.loading import build_task
from laminar.tasks.protocol import Problem, Task

Tokenizer = Any


MICRO_BATCH = 64
"""Answers in one forward and backward pass: 6.8 s of CPU for 256 answers of 300 tokens, against 9.1 s all at once."""


class StepTimer(TrainerCallback):
    """What each step took and where, on a clock that stands still during evaluation; stops at the target."""

    def __init__(
        self, evaluate: "Evaluation | None", *, every_steps: int, target: float, give_up_after_s: float
    ) -> None:
        self._evaluate, self._every_steps, self._target = evaluate, every_steps, target
        self._give_up_after_s = give_up_after_s
        self._paused_s = self._step_began_s = self._generated_s = 0.0
        self._first_step_at_s: float | None = None
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    @property
    def first_step_at(self) -> float:
        """When training began, in seconds since the epoch, if the evaluation before it had taken no time."""
        assert self._first_step_at_s is not None
        return time.time() - (self._now_s() - self._first_step_at_s) - self._paused_s

    def generated(self, seconds: float) -> None:
        """The model made answers for so long."""
        self._generated_s += seconds

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(0)

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began_s, self._generated_s = self._now_s(), 0.0
        if self._first_step_at_s is None:
            self._first_step_at_s = self._step_began_s

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        now_s = self._now_s()
        self.steps.append(
            {
                "step": state.global_step,
                "end_s": self._since_first_step_s(now_s),
                "wait_s": self._generated_s,
                "train_s": now_s - self._step_began_s - self._generated_s,
            }
        )
        if state.global_step % self._every_steps == 0 and self._measure(state.global_step) >= self._target:
            control.should_training_stop = True
        if self._since_first_step_s(now_s) >= self._give_up_after_s:
            control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "reward" in logs:  # the log at the end of training has none
            self.steps[-1]["reward_mean"] = logs["reward"]
            self.steps[-1]["tokens_mean"] = logs["completions/mean_length"]
            self.steps[-1]["tokens_max"] = logs["completions/max_length"]

    def _now_s(self) -> float:
        return time.monotonic() - self._paused_s

    def _since_first_step_s(self, now_s: float) -> float:
        return 0.0 if self._first_step_at_s is None else now_s - self._first_step_at_s

    def _measure(self, step: int) -> float:
        if self._evaluate is None:
            return 0.0
        at_s, began_s = self._since_first_step_s(self._now_s()), time.monotonic()
        accuracy = self._evaluate(step)
        self._paused_s += time.monotonic() - began_s
        self.evaluations.append({"step": step, "at_s": at_s, "accuracy": accuracy})
        print(f"step {step}, {at_s:.1f} s, held-out accuracy {accuracy:.3f}", flush=True)
        return accuracy


class Evaluation:
    """Mean reward of the recipe's held-out prompts, one sample each; leaves the training's random numbers alone."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, task: Task, config: RunConfig) -> None:
        self._model, self._tokenizer, self._task = model, tokenizer, task
        self._problems = task.problems("heldout")[: config.evaluation.num_prompts]
        self._seed = config.seed
        self._sampling = {
            "do_sample": True,
            "temperature": config.evaluation.sampling.temperature,
            "top_p": config.evaluation.sampling.top_p,
            "top_k": config.evaluation.sampling.top_k,
            "max_new_tokens": config.rollout.max_new_tokens,
        }

    def __call__(self, step: int) -> float:
        prompts = self._tokenizer(
            [problem.prompt for problem in self._problems], return_tensors="pt", padding=True, padding_side="left"
        )
        was_training = self._model.training
        self._model.eval()
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(1_000_003 * self._seed + step)
            ids_BT = self._model.generate(
                input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"], **self._sampling
            )
        self._model.train(was_training)
        answers = self._tokenizer.batch_decode(ids_BT[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = [self._task.grade(problem, answer) for problem, answer in zip(self._problems, answers, strict=True)]
        return sum(rewards) / len(rewards)


def trl_config(config: RunConfig, folder: str, *, max_steps: int) -> GRPOConfig:
    """The recipe in TRL's words."""
    optimizer, algorithm, sampling = config.trainer.optimizer, config.trainer.algorithm, config.rollout.sampling
    num_answers = config.trainer.groups_per_step * config.data.group_size
    micro_batch = math.gcd(MICRO_BATCH, num_answers)
    return GRPOConfig(
        output_dir=folder,
        seed=config.seed,
        max_steps=max_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_answers // micro_batch,
        num_generations=config.data.group_size,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        warmup_steps=optimizer.warmup_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        loss_type={"token_mean": "dapo", "sequence_mean": "grpo"}[algorithm.loss],
        scale_rewards={"grpo": "group", "grpo_no_std": "none"}[algorithm.advantage],
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        beta=algorithm.kl_coefficient,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def rewards(
    completions: Sequence[str], problem_index: Sequence[int], *, task: Task, problems: Sequence[Problem], **_: Any
) -> list[float]:
    """The task's own grades."""
    return [task.grade(problems[index], answer) for index, answer in zip(problem_index, completions, strict=True)]


def time_generation(model: PreTrainedModel, timer: StepTimer) -> None:
    """Add up what the model's generate takes."""
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        try:
            return generate(*args, **kwargs)
        finally:
            timer.generated(time.monotonic() - began_s)

    model.generate = timed


def train(
    config: RunConfig, folder: str, *, max_steps: int, target: float, give_up_after_s: float, evaluate: bool
) -> dict[str, Any]:
    """Train until the target, the last step or the deadline; what was measured."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    task = build_task(config.task.path, config.task.options)
    problems = task.problems("train")
    timer = StepTimer(
        Evaluation(model, tokenizer, task, config) if evaluate else None,
        every_steps=config.evaluation.every_steps,
        target=target,
        give_up_after_s=give_up_after_s,
    )
    time_generation(model, timer)
    columns = {"prompt": [problem.prompt for problem in problems], "problem_index": list(range(len(problems)))}
    reward = partial(rewards, task=task, problems=problems)
    reward.__name__ = "grade"  # TRL names its metrics after the function
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=trl_config(config, folder, max_steps=max_steps),
        train_dataset=Dataset.from_dict(columns),
        callbacks=[timer],
    )
    trainer.train()
    return {"first_step_at": timer.first_step_at, "steps": timer.steps, "evaluations": timer.evaluations}


def main() -> None:
    """Train and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--target", type=float, default=1.0, help="held-out accuracy to stop at")
    parser.add_argument("--give-up-after-s", type=float, default=math.inf, help="on the clock of training")
    parser.add_argument("--no-evaluation", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = load_recipe(options.recipe, [f"seed={options.seed}"])
    with tempfile.TemporaryDirectory() as folder:
        measured = train(
            config,
            folder,
            max_steps=options.max_steps,
            target=options.target,
            give_up_after_s=options.give_up_after_s,
            evaluate=not options.no_evaluation,
        )
    options.out.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
