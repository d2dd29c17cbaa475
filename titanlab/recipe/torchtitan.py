"""The keys of torchtitan's job configs, and what each of these keys is in titanlab."""

from __future__ import annotations

import fnmatch
import re
from typing import Any, NamedTuple

VERSION = "0.2.2"


class TheirKey(NamedTuple):
    """A key of torchtitan that has a counterpart: torchtitan's default, our counterpart, and what differs.

    If `ours` is the name of one key that every recipe has, the value of torchtitan's key is copied to it.
    """

    default: Any
    ours: str
    remark: str = ""

    @property
    def is_copied(self) -> bool:
        return re.fullmatch(r"runs|seed|(training|parallelism|optimizer|compile)(\.[a-z_]+)+", self.ours) is not None


KEYS = {
    "job.description": TheirKey("default job", "notes", "none if the file has none"),
    "job.dump_folder": TheirKey("./outputs", "runs"),
    "profiling.enable_profiling": TheirKey(False, "profiler=trace"),
    "profiling.profile_freq": TheirKey(10, "profiler.every and profiler.skip"),
    "profiling.profiler_active": TheirKey(1, "profiler.steps"),
    "profiling.enable_memory_snapshot": TheirKey(False, "profiler=memory"),
    "metrics.log_freq": TheirKey(10, "training.log_every"),
    "metrics.enable_tensorboard": TheirKey(False, "tracker=tensorboard"),
    "metrics.enable_wandb": TheirKey(False, "tracker=wandb"),
    "model.name": TheirKey("llama3", "the group model, such as model=llama3_1_8b"),
    "model.flavor": TheirKey("debugmodel", "the group model, such as model=llama3_1_8b"),
    "model.hf_assets_path": TheirKey("./tests/assets/tokenizer", "data.tokenizer"),
    "model.tokenizer_path": TheirKey(None, "data.tokenizer", "the older name of hf_assets_path"),
    "model.converters": TheirKey([], "the group precision, such as precision=float8_tensorwise"),
    "optimizer.name": TheirKey("AdamW", "the group optimizer, such as optimizer=adamw"),
    "optimizer.lr": TheirKey(0.0008, "optimizer.lr"),
    "optimizer.beta1": TheirKey(0.9, "the first of optimizer.betas"),
    "optimizer.beta2": TheirKey(0.95, "the second of optimizer.betas"),
    "optimizer.eps": TheirKey(1e-08, "optimizer.eps"),
    "optimizer.weight_decay": TheirKey(0.1, "optimizer.weight_decay", "norms and biases do not decay here"),
    "lr_scheduler.warmup_steps": TheirKey(200, "optimizer.schedule.warmup_steps (at most training.steps)"),
    "lr_scheduler.decay_ratio": TheirKey(None, "optimizer.schedule.decay_fraction (none is 1)"),
    "lr_scheduler.decay_type": TheirKey("linear", "optimizer.schedule.decay"),
    "lr_scheduler.min_lr_factor": TheirKey(0.0, "optimizer.schedule.floor", "the last step has the floor itself"),
    "training.dataset": TheirKey("c4_test", "the group data, such as data=c4"),
    "training.dataset_path": TheirKey(None, "data.path (data=hf) or data.files (data=files)"),
    "training.local_batch_size": TheirKey(8, "training.microbatch (a step's sequences: training.global_batch)"),
    "training.global_batch_size": TheirKey(-1, "training.global_batch (-1: local batch × data-parallel degree)"),
    "training.seq_len": TheirKey(2048, "training.seq_len"),
    "training.max_norm": TheirKey(1.0, "training.max_grad_norm"),
    "training.steps": TheirKey(10000, "training.steps"),
    "training.enable_cpu_offload": TheirKey(False, "parallelism.cpu_offload"),
    "training.dtype": TheirKey("float32", "precision=bf16_full for bfloat16"),
    "training.mixed_precision_param": TheirKey("bfloat16", "the group precision, such as precision=bf16"),
    "training.mixed_precision_reduce": TheirKey("float32", "precision.reduce", "fp32 is the default"),
    "training.gc_freq": TheirKey(50, "training.gc_every"),
    "parallelism.data_parallel_replicate_degree": TheirKey(1, "parallelism.replicate"),
    "parallelism.data_parallel_shard_degree": TheirKey(-1, "parallelism.shard"),
    "parallelism.fsdp_reshard_after_forward": TheirKey("default", "parallelism.reshard_after_forward (or auto)"),
    "parallelism.tensor_parallel_degree": TheirKey(1, "parallelism.tensor"),
    "parallelism.disable_loss_parallel": TheirKey(False, "parallelism.loss_parallel=false"),
    "parallelism.enable_async_tensor_parallel": TheirKey(False, "parallelism.async_tensor"),
    "parallelism.pipeline_parallel_degree": TheirKey(1, "parallelism.pipeline"),
    "parallelism.module_fqns_per_model_part": TheirKey(None, "parallelism.split (the first piece of each stage)"),
    "parallelism.pipeline_parallel_schedule": TheirKey("1F1B", "the group schedule, such as schedule=interleaved_1f1b"),
    "parallelism.pipeline_parallel_schedule_csv": TheirKey("", "schedule=csv schedule.file=…"),
    "parallelism.pipeline_parallel_microbatch_size": TheirKey(1, "training.microbatch with pipeline > 1"),
    "parallelism.context_parallel_degree": TheirKey(1, "parallelism.context"),
    "parallelism.context_parallel_rotate_method": TheirKey(
        "allgather", "parallelism.context_method=all_gather or ring"
    ),
    "parallelism.expert_parallel_degree": TheirKey(1, "parallelism.expert"),
    "checkpoint.enable": TheirKey(False, "checkpoint=sync or checkpoint=off"),
    "checkpoint.interval": TheirKey(500, "checkpoint.every"),
    "checkpoint.initial_load_path": TheirKey(None, "init_from (weights) or checkpoint.load_from (a run of titanlab)"),
    "checkpoint.initial_load_in_hf": TheirKey(False, "init_from", "without a path, the weights of hf_assets_path"),
    "checkpoint.last_save_model_only": TheirKey(True, "checkpoint.last=model"),
    "checkpoint.export_dtype": TheirKey("float32", "checkpoint.last_dtype with checkpoint.last=model"),
    "checkpoint.async_mode": TheirKey("disabled", "checkpoint=async or checkpoint=async_pinned"),
    "checkpoint.keep_latest_k": TheirKey(10, "checkpoint.keep"),
    "checkpoint.load_only": TheirKey(False, "checkpoint=off"),
    "activation_checkpoint.mode": TheirKey("selective", "the group ac, such as ac=full or ac=selective_op"),
    "activation_checkpoint.selective_ac_option": TheirKey("2", "ac=selective_op, or ac=selective_layer ac.every=…"),
    "activation_checkpoint.memory_budget": TheirKey(0.5, "ac=memory_budget ac.budget=…"),
    "compile.enable": TheirKey(False, "compile=block"),
    "compile.components": TheirKey(["model", "loss"], "compile.blocks and compile.loss"),
    "compile.backend": TheirKey("inductor", "compile.backend"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": TheirKey(False, "precision.all_gather"),
    "quantize.linear.float8.recipe_name": TheirKey(None, "the group precision, such as precision=float8_rowwise"),
    "quantize.linear.float8.filter_fqns": TheirKey([], "precision.skip", "whole steps of a path, not parts of names"),
    "quantize.linear.float8.emulate": TheirKey(False, "precision.emulate=true"),
    "quantize.linear.mx.recipe_name": TheirKey("mxfp8_cublas", "precision=mxfp8"),
    "quantize.linear.mx.filter_fqns": TheirKey(["output"], "precision.skip"),
    "comm.init_timeout_seconds": TheirKey(300, "training.first_step_timeout_seconds", "default: 3600"),
    "comm.train_timeout_seconds": TheirKey(100, "training.step_timeout_seconds", "default: from the steps' times"),
    "validation.enable": TheirKey(False, "training.validate_every=0 without it"),
    "validation.local_batch_size": TheirKey(8, "training.validation_sequences, which counts them all"),
    "validation.freq": TheirKey(10, "training.validate_every if it is enabled"),
    "validation.steps": TheirKey(-1, "training.validation_sequences (a step's sequences over all processes)"),
    "debug.seed": TheirKey(None, "seed", "always given here: 0"),
    "debug.deterministic": TheirKey(False, "training.deterministic"),
}
# Patterns of keys without a counterpart → why there is none, or what to do instead.
WITHOUT_COUNTERPART = {
    "job.config_file": "the recipe has its own name",
    "job.print_config": "`titanlab train … --cfg job` prints the recipe",
    "job.save_config_file": "every run has its config.yaml",
    "job.custom_config_module": "a package of your own adds options: docs/extending.md",
    "experimental.custom_*": "a package of your own adds options: docs/extending.md",
    "profiling.save_*_folder": "a run's folder has fixed names: docs/run-folder.md",
    "profiling.profiler_warmup": "one step warms up before each window",
    "metrics.disable_color_printing": "set NO_COLOR=1 in the environment",
    "metrics.save_tb_folder": "a run's folder has fixed names: docs/run-folder.md",
    "metrics.save_for_all_ranks": "rank 0 records values that cover all ranks",
    "model.print_after_conversion": "the run's first lines say which layers are converted",
    "optimizer.implementation": "the optimizer is always fused",
    "optimizer.early_step_in_backward": "the gradients' norm needs all gradients first",
    "lr_scheduler.total_steps": "the learning rate's schedule ends with training.steps",
    "training.gc_debug": "profiler=memory shows what stays",
    "training.dataloader.*": "data=hf reads ahead in a thread: data.prefetch",
    "parallelism.pipeline_parallel_*_stage_less_layers": "stages are balanced by cost; or see parallelism.split",
    "parallelism.pipeline_parallel_layers_per_stage": "see schedule.stages_per_rank, 2 by default",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "pipeline and experts do not overlap",
    "parallelism.context_parallel_load_balancer": "sequences are always balanced, head with tail",
    "parallelism.expert_tensor_parallel_degree": "tensor parallelism does not cut experts",
    "parallelism.expert_parallel_comm_backend": "tokens go to experts by torch's all-to-all",
    "checkpoint.enable_ft_dataloader_checkpoints": "the position in the data is always saved",
    "checkpoint.folder": "a run's folder has fixed names: docs/run-folder.md",
    "checkpoint.initial_load_model_only": "optimizer states of torchtitan cannot be read",
    "checkpoint.initial_load_in_hf_quantized": "quantized weights cannot be read",
    "checkpoint.last_save_in_hf": "after the run, `titanlab export RUN --into FOLDER`",
    "checkpoint.load_step": "`titanlab train --from RUN`, or one of its checkpoints",
    "checkpoint.exclude_from_loading": "init_from reads weights only; init_from_exclude leaves some of them out",
    "checkpoint.enable_first_step_checkpoint": "`titanlab doctor` checks the disk",
    "checkpoint.create_seed_checkpoint": "initial values never depend on the layout",
    "activation_checkpoint.per_op_*": "ac.saved names operators, not shapes",
    "activation_checkpoint.visualize_*": "a sweep over ac.budget measures it",
    "activation_checkpoint.*": "recomputation has no such setting here",
    "quantize.linear.float8.precompute_*": "with precision.all_gather, scales are always computed together",
    "quantize.linear.mx.mxfp8_dim1_*": "torchao chooses the kernel",
    "quantize.grouped_mm.*": "experts multiply in bf16",
    "comm.trace_buf_size": "the Flight Recorder is always on; TORCH_FR_BUFFER_SIZE is its size",
    "comm.save_traces_*": "a run's folder has fixed names: docs/run-folder.md",
    "comm.mode": "`titanlab plan --trace` runs a step without GPUs",
    "memory_estimation.*": "`titanlab plan --explain` shows memory by item",
    "fault_tolerance.*": "all replicas stop together; launch.restarts starts them again: docs/elastic.md",
    "validation.dataset*": "held-out documents come from the training's corpus",
    "validation.seq_len": "validation has the sequences of training.seq_len",
    "validation.dataloader.*": "data=hf reads ahead in a thread: data.prefetch",
    "debug.deterministic_warn_only": "an operation without a deterministic form is an error",
    "debug.moe_force_load_balance": "the router always decides",
}
# Name of a key in older versions of torchtitan → its name in `VERSION`; empty: `VERSION` has no such key.
OLDER_KEYS = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "experimental.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    **dict.fromkeys(("job.print_args", "job.use_for_integration_test", "metrics.rank_0_only"), ""),
    **dict.fromkeys(("model.norm_type", "optimizer.fused", "checkpoint.interval_type"), ""),
    # `VERSION` has the converter `float8` instead.
    "float8.enable_float8_linear": "",
}
# Section of older versions → the sections of `VERSION` that now have some of its keys, under the same names.
OLDER_SECTIONS = {
    "training": ("parallelism", "lr_scheduler", "debug"),
    "experimental": ("parallelism",),
    "float8": ("quantize.linear.float8",),
    "mx": ("quantize.linear.mx",),
}


def reason_without(name: str) -> str | None:
    """Why a key of torchtitan has no counterpart; None: it has one, or torchtitan has no such key."""
    if name in KEYS:
        return None
    return next((why for keys, why in WITHOUT_COUNTERPART.items() if fnmatch.fnmatchcase(name, keys)), None)


def current_name(name: str) -> str | None:
    """The name in `VERSION` of a key of any version; empty: `VERSION` has no such key. None: no version has the key."""
    section, _, key = name.partition(".")
    names = (name, *(f"{newer}.{key}" for newer in OLDER_SECTIONS.get(section, ())))
    known = (each for each in names if each in KEYS or reason_without(each) is not None)
    return next(known, OLDER_KEYS.get(name))
