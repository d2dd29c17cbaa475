"""Every mistake that a verb refuses: one line with key, value, rule and cure, exit code 2, and nothing is started or written.

The files that rows name are those of tests/cli/stuff.py. The sizes of the model of `train`: 2 blocks, 4 heads, 2 key/value
heads, 2048 tokens; a step has 8 sequences of 512.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli import stuff
from tests.weights.huggingface import made as huggingface
from titanlab.distributed import Host

# By verb: what is typed after it, and the line. Words in capitals at the beginning are variables of the environment.
# `…` stands for any text, `********` for eight digits of a step or of a hash.
TABLES = {
    "train": r"""
foo=3 ⇒ foo=3: is not a key of this recipe; see `titanlab train --cfg job` for all keys
hydra.launcher.timeout_min=9 ⇒ hydra.launcher.timeout_min=9: is not a key here: titanlab uses no launcher of Hydra; the group launch has these settings: launch=slurm launch.minutes=… (docs/clusters.md)
name=${hydra:job.override_dirname} ⇒ name=${hydra:job.override_dirname}: refers to itself; leave it out: runs of a sweep are named by what they vary
hydra.foo=1 ⇒ hydra.foo=1: is not a key of Hydra; see `titanlab train --cfg hydra`
model.kind=gpt ⇒ model.kind=gpt: must name the schema of the group, which is llama; leave it out, and choose with model=…
training.steps=abc ⇒ training.steps=abc: must be a whole number; try 1000
world=1.0 ⇒ world=1.0: must be a whole number or null; try null
training.deterministic=maybe ⇒ training.deterministic=maybe: must be true or false; try false
optimizer.betas=0.9 ⇒ optimizer.betas=0.9: must be a list of numbers; try [0.9,0.95]
name=[a] ⇒ name=[a]: must be text; try run
optimizer.schedule=linear ⇒ optimizer.schedule=linear: has keys of its own; give them one by one: optimizer.schedule.warmup_steps=…
model=null ⇒ model=null: is not an option of a group; `titanlab train --help` lists them
model.dim=??? ⇒ model.dim=???: has no value; give model.dim=…
'seed = 1' ⇒ arguments=seed = 1: cannot be read as an override; write key=value without spaces, the key as words with dots between them
training.steps=100,200 ⇒ training.steps=100,200: is several values; add -m to run them all; a list is [100,200]
~training.steps ⇒ training.steps=: cannot be taken out; give it a value: training.steps=…
~absent ⇒ ~absent=: removes a key or group that this recipe does not have; see `titanlab train --cfg job` for all keys
+training.steps=300 ⇒ +training.steps=300: is in the recipe already; try training.steps=300
'training.steps=${nope}' ⇒ training.steps=${nope}: Interpolation key 'nope' not found; name a key as in ${model.dim}, or a resolver
'training.steps=${name}' ⇒ training.steps=${name}: While dereferencing interpolation '${name}': Value 'run' of type 'str' could not be converted to Integer; name a key as in ${model.dim}, or a resolver
--nope ⇒ arguments=--nope: is not a flag of this verb; see `titanlab train --help`
--cfg nope ⇒ --cfg=nope: invalid choice: 'nope' …; see `titanlab train --help`
--cfg ⇒ --cfg=: expected one argument; see `titanlab train --help`
--resolve ⇒ arguments=--resolve: goes with --cfg; try --cfg job --resolve
--cfg job --info ⇒ arguments=data=synthetic --cfg job --info: --cfg and --info do not go together; choose one of them
--cfg job --package nope ⇒ arguments=data=synthetic --cfg job --package nope: package 'nope' not found in config; see `titanlab train --help`
--experimental-rerun x.pickle ⇒ --experimental-rerun=x.pickle: a run is not repeated from a pickle; try titanlab resume RUN
--config-name nope ⇒ --config-name=nope: there is no such config; leave it out, or give --config-dir too
--config-dir nope ⇒ --config-dir=nope: is not a folder; give a folder that has model, data and other groups of options
--config-path nope ⇒ --config-path=nope: is not a folder of configs; leave it out, or use --config-dir
-m hydra.job.name=a,b ⇒ hydra.job.name=a,b: is Hydra's own, with one value for all points; give one value
seed=9223372036854775808 ⇒ seed=9223372036854775808: must lie in [0, 2⁶³); try 0
training.validate_every=-1 ⇒ training.validate_every=-1: must not be negative; try 0
training.max_grad_norm=nan ⇒ training.max_grad_norm=nan: must be a positive number; try 1.0, or null
optimizer.lr=inf ⇒ optimizer.lr=inf: must be positive and finite; try 3e-4
optimizer.betas=[0.9] ⇒ optimizer.betas=[0.9]: must be two numbers in [0, 1); try [0.9,0.95]
optimizer.weight_decay=-1 ⇒ optimizer.weight_decay=-1.0: must not be negative; try 0.1
optimizer.schedule.decay=step ⇒ optimizer.schedule.decay=step: no such choice; choose one of linear, cosine, sqrt
optimizer.schedule.floor=2 ⇒ optimizer.schedule.floor=2.0: must lie between 0 and 1; try 0.1
cluster.accelerator=tpu ⇒ cluster.accelerator=tpu: no such choice; choose one of auto, cpu, cuda
data.vocab_size=1 ⇒ data.vocab_size=1: must be between 2 and 2147483648; try 2048
tracker=wandb tracker.project=a/b ⇒ tracker.project=a/b: must be 1 to 128 characters without / \ # ? % :; try tracker.project=titanlab
optimizer.lr=9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999 ⇒ optimizer.lr=999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999...: int too large to convert to float; compare with `titanlab train --cfg job`
tracker=wandb tracker.finish_seconds=inf ⇒ tracker.finish_seconds=inf: must be a finite number; try 10.0
recipe=quickstart ⇒ recipe=quickstart: names a group that not every recipe has; try +recipe=quickstart
model.attention=cudnn ⇒ model.attention=cudnn: needs a GPU; try auto, flash or math
compile.backend=tvn ⇒ compile.backend=tvn: no such backend; choose one of inductor, aot_eager, aot_eager_decomp_partition, eager, cudagraphs
compile=block compile.mode=max-autotune ⇒ compile.mode=max-autotune: records CUDA graphs, and this runs on a CPU; try max-autotune-no-cudagraphs
compile.mode=max-autotune-no-cudagraphs ⇒ compile.mode=max-autotune-no-cudagraphs: nothing is compiled; try compile=block
compile=block compile.mode=reduce-overhead compile.backend=eager ⇒ compile.mode=reduce-overhead: is a mode of inductor, and eager has none; try default, or compile.backend=inductor
training.microbatch=3 ⇒ training.microbatch=3: must divide the 8 sequences that one process has of a step; try 2 or 4
model.dim=1000000000 ⇒ model.dim=1000000000: makes a model of 6.0e+18 parameters, more bytes than there are addresses; give a smaller number
parallelism.pipeline=1000000 ⇒ parallelism.pipeline=1000000: 1f1b makes 1000000 stages of it, more than the 2 blocks of the model; try parallelism.pipeline=1 or 2, or a model of more blocks
parallelism.pipeline=2 training.global_batch=2000000000 ⇒ parallelism.pipeline=2: makes 2,000,000,000 microbatches of a step, in 2 stages: too many for a schedule; give a smaller training.global_batch, or a larger training.microbatch
training.steps=100 optimizer.schedule.warmup_steps=200 ⇒ optimizer.schedule.warmup_steps=200: is more than the 100 steps of the run; try 10
data.vocab_size=5000 ⇒ model.vocab_size=2048: is smaller than the 5000 tokens of the data's vocabulary; try model.vocab_size=5000
parallelism.pipeline=2 model.layers=4 schedule=zbv parallelism.reduce_gradients=each ⇒ parallelism.reduce_gradients=each: needs gradients block by block, and zbv computes those of a stage at once; try last, or schedule=1f1b
parallelism.cpu_offload=true ⇒ parallelism.cpu_offload=true: moves sharded parameters, and nothing is sharded; try parallelism.shard=2
parallelism=fsdp ⇒ parallelism.shard=-1: stands for the rest of the world, whose size is not given; try world=2, or parallelism.shard=2
parallelism.shard=-1 parallelism.replicate=-1 world=4 ⇒ parallelism.replicate=-1: only one degree may be -1, and parallelism.shard is too; try parallelism.shard=1
parallelism.shard=0 ⇒ parallelism.shard=0: a degree is at least 1, or -1 for the rest; try 1
world=2 ⇒ world=2: the degrees make 1 (all are 1); try world=1, or a degree of -1 for the rest
runs= ⇒ runs=: names no folder; try runs
runs=a-file/runs ⇒ runs=a-file/runs: cannot be written (a-file is not a folder); give a folder of yours: try runs=~/runs
data=files 'data.files=nope/*.txt' ⇒ data.files=nope/*.txt: matches no file; check the path, and quote a pattern, so that no shell expands it
data=files data.files=zero.txt data.vocab_size=340 ⇒ data.files=zero.txt: is empty; give files with text
data=files data.files=torn.jsonl data.vocab_size=340 ⇒ data.files=torn.jsonl:2: is not JSON (Unterminated string starting at: line 1 column 10 (char 9)); one JSON object a line is expected
data=files data.files=other.jsonl data.vocab_size=340 ⇒ data.text_field=text: is not in other.jsonl:1; its keys are: body
data=files data.files=latin.txt data.vocab_size=340 ⇒ data.files=latin.txt, byte 0: is not UTF-8 text; convert it with iconv -t UTF-8, or leave it out
data=files data.files=torn.txt.gz data.vocab_size=340 ⇒ data.files=torn.txt.gz: is not a whole .gz file (Compressed file ended before the end-of-stream marker was reached); fetch it again
data=files data.files=a.parquet data.vocab_size=340 ⇒ data.files=a.parquet: is not a readable Parquet file (Parquet magic bytes not found in footer. Either the file is corrupted or this is); write it again, or leave it out
data=files data.files=text.txt data.tokenizer=foreign.json ⇒ data.tokenizer=foreign.json: is not a tokenizer.json (expected `,` or `}` at line 1 column 8); give the tokenizer.json of a model, or a .model
data=files data.files=text.txt data.tokenizer=nope ⇒ data.tokenizer=nope: does not exist; give a .model or tokenizer.json, or null to train one
data=tokens data.folder=empty ⇒ data.folder=empty: has no index.json; make the folder with `titanlab tokenize`
data=tokens data.folder=torn-tokens ⇒ data.folder=torn-tokens/train-00000.bin: has 6 bytes, not 2000, so it is not what index.json describes; make the folder again
--config-dir conf model=bare ⇒ model=bare: has no schema of this group; begin its YAML with defaults: [llama_schema, _self_] or [mixtral_schema, _self_] or [qwen3_schema, _self_] or [qwen3_moe_schema, _self_]
--config-dir conf model=extra ⇒ model.foo=: is not a key of this recipe, and model/extra.yaml sets it; keys of model: dim, layers, heads, kv_heads, ffn_dim, vocab_size, norm_eps,…
--config-dir conf model=torn ⇒ file=conf/model/torn.yaml:2: is not YAML (…); mend that line
--config-dir conf model=lost ⇒ model=nope_schema: is no option, but model/lost names it; correct model/lost.yaml
--config-dir conf --config-name other ⇒ --config-name=other: composes no recipe; begin its defaults with recipe_schema
checkpoint.load_from=nope ⇒ checkpoint.load_from=nope: there is no such folder; give the folder of a run, or of one of its checkpoints
checkpoint.load_from=saved model.layers=3 ⇒ checkpoint.load_from=saved/checkpoints/step-********: is of another model: layers.2.attention_norm.weight is absent there and 64 here; choose the model that it was trained as
checkpoint.load_from=saved training.steps=300 ⇒ training.steps=300: the checkpoint saved/checkpoints/step-******** is of step 300 already; try 600
parallelism.shard=2 parallelism.tensor=2 world=3 ⇒ world=3: the degrees make 4 (shard 2 × tensor 2); try world=4, or a degree of -1 for the rest
parallelism.expert=2 ⇒ parallelism.expert=2: the model has no experts; try parallelism.expert=1
parallelism.tensor=4 ⇒ parallelism.tensor=4: must divide 2 key/value heads; try parallelism.tensor=1 or 2
parallelism.tensor=4 model.kv_heads=4 model.ffn_dim=190 ⇒ parallelism.tensor=4: must divide the 190 rows of layers.0.feed_forward.w1.weight; try parallelism.tensor=1 or 2
parallelism.tensor=4 model.kv_heads=4 model.vocab_size=6 data.vocab_size=5 ⇒ parallelism.tensor=4: leaves a process without a row of tok_embeddings.weight, which has 6; try parallelism.tensor=1 or 2
parallelism.tensor=2 training.seq_len=33 training.microbatch=1 ⇒ parallelism.tensor=2: with sequence_parallel, must divide the 33 tokens that a process has of a microbatch; try parallelism.tensor=1, or parallelism.sequence_parallel=false
parallelism.shard=3 parallelism.tensor=2 training.global_batch=9 ⇒ parallelism.shard=3: with tensor=2, cannot cut the 2048 rows of tok_embeddings.weight into 6 equal parts, nor its 64 columns into 3; try parallelism.shard=2 or 4, or parallelism.tensor=1
parallelism.async_tensor=true ⇒ parallelism.async_tensor=true: interleaves the collectives of tensor parallelism, and tensor=1; try false
parallelism.context=3 ⇒ training.seq_len=512: must be a multiple of 6: two chunks for each of 3 context-parallel processes; try 510
parallelism.context=2 model.attention=math ⇒ model.attention=math: needs all scores at once, and context=2 computes them in parts; try auto
parallelism.shard=2 parallelism.symmetric_memory=true ⇒ parallelism.symmetric_memory=true: is memory between GPUs, and this runs on a CPU; try false
parallelism.pipeline=2 schedule=zbv ⇒ parallelism.pipeline=2: zbv makes 4 stages of it, more than the 2 blocks of the model; try parallelism.pipeline=1, or a schedule with fewer stages a rank
parallelism.pipeline=2 model.tied_embeddings=true ⇒ parallelism.pipeline=2: the head is the embedding's table, which first and last stage would both have to own; try parallelism.pipeline=1, or model.tied_embeddings=false
parallelism.split=[1,1] ⇒ parallelism.split=[1,1]: says where a pipeline is cut, and parallelism.pipeline=1; try null
parallelism.pipeline=2 parallelism.split=[1,1,0] ⇒ parallelism.split=[1,1,0]: has 3 numbers of blocks, and the schedule has 2 stages; try null for a balanced split, or give 2 numbers
parallelism.pipeline=2 parallelism.split=[1,2] ⇒ parallelism.split=[1,2]: must add up to the model's 2 blocks; try null for a balanced split
parallelism.pipeline=2 parallelism.split=[-1,3] ⇒ parallelism.split=[-1,3]: must add up to the model's 2 blocks, with one at least for each stage between first and last; try null for a balanced split
parallelism.pipeline=2 parallelism.split=[layers.7] ⇒ parallelism.split=[layers.7]: the model has no piece layers.7; its pieces are tok_embeddings, layers.0, layers.1, norm, output
parallelism.pipeline=2 parallelism.split=[layers.0,layers.1] ⇒ parallelism.split=[layers.0,layers.1]: must name a piece for each of the 1 stages after the first, and names 2; try null for a balanced split
parallelism.pipeline=3 model.layers=4 parallelism.split=[layers.3,layers.1] ⇒ parallelism.split=[layers.3,layers.1]: stage 1 would begin with layers.3 and end before layers.1; name pieces in the order of the forward pass, each once, or null for a balanced split
parallelism.pipeline=2 parallelism.split=2 ⇒ parallelism.split=2: must be a list of texts or null; try null
parallelism.pipeline=2 model.layers=4 schedule=zbv schedule.stages_per_rank=3 ⇒ schedule.stages_per_rank=3: stages go down the ranks and back up, so each rank has two; try 2, or schedule=interleaved_zero_bubble
parallelism.pipeline=2 model.layers=4 schedule=dualpipe_v training.microbatch=4 ⇒ schedule=dualpipe_v: needs at least 4 microbatches, one for each of its stages, and a step has 2; try schedule=zbv, or training.global_batch times 2
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=nope.csv ⇒ schedule.file=nope.csv: cannot be read (No such file or directory); give a CSV, say of `titanlab schedule 1f1b --csv my.csv`
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=empty.csv ⇒ schedule.file=empty.csv: has no action; give it one line a rank, with cells like 0F0,0B0
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=malformed.csv ⇒ schedule.file=malformed.csv: line 2, cell 2: '1X0' is not an action; write stage, F, B, I or W, and microbatch, as in 0F0
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=incomplete.csv ⇒ schedule.file=incomplete.csv: line 2: 1B0, or I and W instead, is missing; each stage runs each microbatch F and B once (or F, I and W) on one rank, and after what it needs
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=deadlock.csv ⇒ schedule.file=deadlock.csv: line 1, cell 1: 0B0 on rank 0 waits for 0F0, which comes after 0B0 on rank 0; 1F0 on rank 1 waits for 0F0, which comes after 0B0 on rank 0; each stage runs each microbatch …
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=torn.csv ⇒ schedule.file=torn.csv: line 2, cell 3: 0F1: stage 0 is on rank 0 already; each stage runs each microbatch F and B once (or F, I and W) on one rank, and after what it needs
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=one-rank.csv ⇒ schedule.file=one-rank.csv: has 1 lines, one a rank, and the pipeline has 2 ranks; try parallelism.pipeline=1, or schedule=1f1b
parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=halves.csv ⇒ schedule.file=halves.csv: is for 1 microbatch a step, and a step has 8; try training.microbatch times 8, or schedule=1f1b
+recipe=early --config-dir conf ⇒ recipe=early: cannot be composed (Override 'precision : bf16' is defined before 'model: debug'); mend recipe/early.yaml
+recipe=again --config-dir conf ⇒ model=llama_2m: is chosen in a second defaults list, without override; write - override /model: … there, at the end of the defaults
+recipe=empty --config-dir conf ⇒ defaults=: x: names no group: conf/recipe/empty.yaml; write GROUP: OPTION
+recipe=nobody --config-dir conf ⇒ defaults=: x: names no group: conf/recipe/nobody.yaml; write GROUP: OPTION
+recipe=slash --config-dir conf ⇒ defaults=/: x: names no group: conf/recipe/slash.yaml; write GROUP: OPTION
+recipe=word --config-dir conf ⇒ defaults=override : x: names no group: conf/recipe/word.yaml; write GROUP: OPTION
+recipe=keys --config-dir conf ⇒ recipe=keys: has its keys below recipe, which is not a key of a recipe; make this the first line of recipe/keys.yaml: # @package _global_
+experiment=mine --config-dir conf ⇒ experiment=mine: has its keys below experiment, which is not a key of a recipe; make this the first line of experiment/mine.yaml: # @package _global_
model=llama_2m tracker=[] ⇒ tracker=[]: is not a list of options; known: jsonl, tensorboard, wandb; for none: tracker=jsonl
model=llama_2m tracker=[wandb,wandb] ⇒ tracker=[wandb,wandb]: names wandb twice; name each option once
model=llama_2m tracker=[wandb,tensorboard] tracker.project=x ⇒ tracker.project=x: is a key of one of the chosen options, wandb; try tracker.wandb.project=x
model=llama_2m precision=[bf16,fp32] ⇒ precision=[bf16,fp32]: is two options of different schemas; name one of them
-sc install=bash ⇒ --shell-completion=data=synthetic install=bash: would replace the completion of all verbs; try eval "$(titanlab completion bash)"
-m --run ⇒ arguments=data=synthetic -m --run: --run and --multirun do not go together; choose one of them
-m --info ⇒ arguments=data=synthetic -m --info: --multirun and --info do not go together; choose one of them
~hydra.output_subdir ⇒ hydra.output_subdir=: is a setting of Hydra's that titanlab does not read; leave it out: a run has its recipe in config.yaml of its folder
hydra.mode=MULTIRUN ⇒ hydra.mode=MULTIRUN: is a setting of Hydra's that titanlab does not read; add -m for several points, or use titanlab sweep
hydra/job_logging=default ⇒ hydra/job_logging=default: is a setting of Hydra's that titanlab does not read; leave it out: a run has its logs in its own folder
+hydra.callbacks.x.of=mine ⇒ hydra.callbacks.x.of=mine: is a setting of Hydra's that titanlab does not read; leave it out: nothing calls them here
'hydra={run:{dir:x}}' ⇒ hydra={run:{dir:x}}: is a setting of Hydra's that titanlab does not read; leave it out: titanlab train --help has the keys of a recipe
cluster.efficiencies.x=1 ⇒ cluster.efficiencies.x=1: is not a key of this recipe; new keys of cluster.efficiencies are added with a plus: +cluster.efficiencies.x=…
hydra.run.dir=/tmp/x ⇒ hydra.run.dir=/tmp/x: is a setting of Hydra's that titanlab does not read; a run's folder is runs/SWEEP/NAME: give runs=FOLDER, sweep=NAME or name=NAME
+hydra.callbacks.x._target_=os.system ⇒ hydra.callbacks.x._target_=os.system: names code, and a config never runs any; leave it out; code comes as an option of a package: docs/models-of-your-own.md
'hydra.searchpath=[pkg://antigravity]' ⇒ hydra.searchpath=pkg://antigravity: would import a module, and a config never runs code; give a folder, or install a package with options: docs/models-of-your-own.md
'name=${oc.env:STRANGE}' ⇒ name=${oc.env:STRANGE}: a variable of the environment may be a secret, and recipes are written down and sent to trackers; give the value itself; docs/configuration.md lists what may be read
--config-dir conf +recipe=called ⇒ hydra.job.env_set={'A': 'b'}: is a setting of Hydra's that titanlab does not read, and conf/recipe/called.yaml sets it; set it in the shell, or with launch=slurm in launch.environment
--config-dir conf model=list ⇒ file=conf/model/list.yaml: has no keys with values, as an option has; write KEY: VALUE, a key a line
--config-dir conf +recipe=minutes ⇒ recipe=minutes: cannot be composed (Value '1:30' of type 'str' could not be converted to Integer); mend recipe/minutes.yaml
--config-dir hidden ⇒ model=debug: hidden/model/debug.yaml is never read: …/conf has an option of that name; rename the file, and choose model=my_debug
'training={stepz:1}' ⇒ training={stepz:1}: has stepz, which is not a key of this recipe; did you mean training.steps?
'optimizer.schedule={nope:1}' ⇒ optimizer.schedule={nope:1}: has nope, which is not a key of this recipe; keys of optimizer.schedule: warmup_steps, decay_fraction, decay, floor
name='${nope:1}' ⇒ name=${nope:1}: Unsupported interpolation type nope; name a key as in ${model.dim}, or a resolver
tracker.wandb.project=3 ⇒ tracker.wandb.project=3: is a key only if tracker is a list of options that contains wandb; with tracker=wandb alone, write tracker.project=3
name='${oc.decode:"{a: 1}"}' ⇒ name=${oc.decode:"{a: 1}"}: cannot be read as an override; quote it: "name='${oc.decode:"{a: 1}"}'"
data.document_mask=true model=llama_2m model.attention=cudnn launch=slurm cluster=h100 precision=bf16 ⇒ model.attention=cudnn: cannot mask documents with context=1, and data.document_mask is on; try auto
launch=slurm cluster=h100 model.attention=flash ⇒ model.attention=flash: computes in 16 bits only on a GPU; try precision=bf16, or auto
launch=slurm cluster=h100 data.document_mask=true model.dim=32 ⇒ model.attention=auto: with data.document_mask is FlexAttention, which on a GPU needs a head_dim of at least 16; this model has 8; try efficient
launch=slurm cluster=h100 parallelism.tensor=2 parallelism.async_tensor=true ⇒ parallelism.async_tensor=true: is done by inductor, and the blocks are not compiled; try compile=block
launch=slurm cluster=h100 parallelism.tensor=2 parallelism.async_tensor=true compile=block compile.backend=aot_eager ⇒ parallelism.async_tensor=true: is done by inductor, and aot_eager compiles the blocks; try compile.backend=inductor
launch=slurm cluster=h100 parallelism.tensor=2 parallelism.async_tensor=true compile=block parallelism.sequence_parallel=false ⇒ parallelism.async_tensor=true: interleaves gathers and scatters of sequences, and sequence_parallel=false has none; try parallelism.sequence_parallel=true
launch=slurm cluster=h100 parallelism.replicate=2 parallelism.symmetric_memory=true ⇒ parallelism.symmetric_memory=true: is memory in which FSDP2 gathers, and nothing is sharded; try false
launch=slurm cluster=h100 parallelism.shard=2 parallelism.symmetric_memory=true parallelism.cpu_offload=true ⇒ parallelism.symmetric_memory=true: has not been tried with parameters in host memory; try false, or parallelism.cpu_offload=false
launch=slurm cluster=h100 parallelism.shard=2 parallelism.tensor=2 compile=block parallelism.symmetric_memory=true parallelism.async_tensor=true ⇒ parallelism.symmetric_memory=true: uses NCCL's symmetric memory, AsyncTP needs CUDA's, and torch allows only one of them in a process; try false, or parallelism.async_tensor=false
parallelism.context=2 model.attention=flash_attn launch=slurm cluster=h100 precision=bf16 ⇒ model.attention=flash_attn: is not a kernel of torch, which context=2 needs; try auto or flash
model=mixtral_debug parallelism.expert=0 ⇒ parallelism.expert=0: must be at least 1: the world is the product of the other degrees, so this one cannot follow from it; try 1
model=mixtral_debug parallelism.expert=2 ⇒ parallelism.expert=2: must divide the 1 processes of shard · context · tensor; try parallelism.expert=1
model=mixtral_debug parallelism.expert=3 parallelism.shard=3 training.global_batch=9 ⇒ parallelism.expert=3: must divide the 4 experts; try parallelism.expert=1
model=mixtral_debug parallelism.expert=2 parallelism.tensor=2 parallelism.sequence_parallel=false ⇒ parallelism.expert=2: needs tokens that are divided among the processes of the tensor axis, and sequence_parallel=false; try parallelism.sequence_parallel=true
model=mixtral_debug parallelism.expert=2 parallelism.tensor=2 model.balance=auxiliary_sequence ⇒ model.balance=auxiliary_sequence: counts by sequence, and with tensor > 1 and expert > 1 each process routes a part of the tokens; try auxiliary_batch or bias
parallelism.tensor=2 parallelism.loss_parallel=false training.loss_chunk=64 ⇒ training.loss_chunk=64: loss_parallel=false gathers whole logits; try 0, or parallelism.loss_parallel=true
training.on_nan=rollback checkpoint.every=0 ⇒ training.on_nan=rollback: goes back to a checkpoint, and checkpoint.every=0 saves none on the way; try checkpoint.every=100, or training.on_nan=skip
launch=slurm cluster=h100 training.check_every=3 ⇒ training.check_every=3: compares bits, and without training.deterministic=true kernels of a GPU may give others each time; set that too, or try 0
launch.restarts=-1 ⇒ launch.restarts=-1: must not be negative…
launch.min_world=2 ⇒ launch.min_world=2: says how small a restarted run may become, and launch.restarts=0…
cluster.memory_gb=-1 ⇒ cluster.memory_gb=-1.0: must be a positive number…
launch=slurm launch.minutes=2 ⇒ launch.signal_seconds=120: leaves nothing of the 2 minutes that a job has; try 20…
launch=slurm "launch.partition=' '" ⇒ launch.partition=…: must be a name…
launch=slurm +launch.environment.A-B=x ⇒ launch.environment=A-B: is not a variable name…
launch=slurm +launch.extra.ntasks_per_node=1 ⇒ launch.extra.ntasks_per_node=1: is titanlab's own…
launch=slurm "+launch.extra={time 5:x}" ⇒ launch.extra=time 5: is not a flag of sbatch; write it long, without the dashes
launch=slurm +launch.extra.exclusive=yes ⇒ launch.extra.exclusive=yes: is text, and … takes none; try true
RANK=x WORLD_SIZE=4 ⇒ RANK=x: must be a whole number…
RANK=0 WORLD_SIZE=4 ⇒ MASTER_PORT=null: is not set…
RANK=0 WORLD_SIZE=4 MASTER_PORT=99999 ⇒ MASTER_PORT=99999: is not a port…
RANK=4 WORLD_SIZE=4 MASTER_PORT=1 ⇒ RANK=4: must lie in [0, 4)…
RANK=0 WORLD_SIZE=4 MASTER_PORT=1 world=2 ⇒ world=2: 4 processes were started; try world=4, or null
RANK=0 WORLD_SIZE=4 MASTER_PORT=1 parallelism.shard=2 ⇒ WORLD_SIZE=4: the degrees make 2 (shard 2)…; start as many processes as the degrees make, or let one degree be -1
TITANLAB_CACHE=a-file/x data=files data.files=text.txt data.vocab_size=340 ⇒ TITANLAB_CACHE=a-file/x: cannot be written…export TITANLAB_CACHE=…
--from toy --cfg job model.layers=3 ⇒ checkpoint.load_from=runs/single/toy-********/checkpoints/step-********: is of another model…
--from toy checkpoint.load_from=x ⇒ checkpoint.load_from=x: follows from --from; leave it out
""",
    "generate": r"""
⇒ arguments=: the following arguments are required: run; see `titanlab generate --help`
toy --tokens 0 ⇒ --tokens=0: must be at least 1; try 1
toy --tokens many ⇒ --tokens=many: must be a whole number; see `titanlab generate --help`
toy --seed 99999999999999999999 ⇒ --seed=99999999999999999999: must be at most 9,223,372,036,854,775,807; see `titanlab generate --help`
toy --device tpu ⇒ --device=tpu: is not a device; try cpu or cuda
toy --device cuda ⇒ --device=cuda: this host shows no GPU; try cpu
toy --prompt def --lengths 3 ⇒ arguments=toy --prompt def --lengths 3: unrecognized arguments: --lengths 3; see `titanlab generate --help`
""",
    "resume": r"""
⇒ arguments=: the following arguments are required: run; see `titanlab resume --help`
toy optimizer.lr=1 ⇒ optimizer.lr=1: is not to be changed in a run that has begun; a new run from its checkpoint: titanlab train --from runs/single/toy-******** optimizer.lr=1; changeable: data.files, data.folder, data.pa…
toy parallelism=fspd ⇒ parallelism=fspd: is not an option of this group; try fsdp; known: cp, ddp, fsdp, fsdp_cp, fsdp_pp, fsdp_tp, fsdp_tp_cp, fsdp_t…
toy checkpoint=sync ⇒ checkpoint=sync: chooses a preset, which is not possible in a run that has begun; give keys of checkpoint
toy hello ⇒ overrides=hello: is not an override; write key=value
toy world=x ⇒ world=x: must be a whole number or null; try null
toy parallelism.shard=5 ⇒ training.global_batch=12: a run keeps it, and it must be a multiple of the 5 data-parallel processes; replicate × shard may be 1, 2, 3, 4, 6, 12
toy world=4 ⇒ world=4: the degrees make 2 (shard 2); try world=2, or a degree of -1 for the rest
toy --nope ⇒ arguments=toy --nope: unrecognized arguments: --nope; see `titanlab resume --help`
toy --step 3 --clear ⇒ arguments=toy --step 3 --clear: unrecognized arguments: --clear; see `titanlab resume --help`
""",
    "schedule": r"""
⇒ arguments=: the following arguments are required: kind; see `titanlab schedule --help`
1f1 ⇒ schedule=1f1: there is no such schedule; try 1f1b; known: 1f1b, csv, dualpipe_v, gpipe, interleaved_1f1b, interleaved_…
zbv --stages-per-rank 3 ⇒ --stages-per-rank=3: stages go down the ranks and back up, so each rank has two; try 2, or titanlab schedule interleaved_zero_bubble
looped_bfs --stages-per-rank 0 ⇒ --stages-per-rank=0: must be at least 1; try 2
gpipe --stages-per-rank 2 ⇒ --stages-per-rank=2: gpipe has one stage a rank; leave it out, or try titanlab schedule interleaved_1f1b
zbv --ranks two ⇒ --ranks=two: must be a whole number; see `titanlab schedule --help`
dualpipe_v --microbatches 3 ⇒ schedule=dualpipe_v: needs at least 8 microbatches, one for each of its stages, and a step has 3; try titanlab schedule zbv, or other --microbatches
1f1b --forward 0 ⇒ --forward=0.0: must be finite and positive; try 1
1f1b --transfer -1 ⇒ --transfer=-1.0: must be finite and not negative; try 1
1f1b --ranks 10000 --microbatches 1000 ⇒ --microbatches=1000: ranks × stages × microbatches is 20000000, and a timeline has 500000 at most; try fewer: the pattern repeats itself
csv ⇒ --file=: names no file; write one with `titanlab schedule 1f1b --csv my.csv`: --file=my.csv
csv --file no.csv ⇒ --file=no.csv: cannot be read (No such file or directory); give a CSV, say of `titanlab schedule 1f1b --csv my.csv`
1f1b --file no.csv ⇒ --file=no.csv: is for the schedule csv; try titanlab schedule csv
all --csv x.csv ⇒ --csv=x.csv: holds one schedule; name it instead of all: titanlab schedule 1f1b
1f1b --csv /proc/x.csv ⇒ --csv=/proc/x.csv: cannot be written: No such file or directory; name another file
1f1b --ranks 64 --microbatches 512 --plot x.png ⇒ --plot=x.png: would have 65536 cells, and 10000 can be seen; try fewer --ranks
1f1b --forward 1e-9 ⇒ --forward=1e-09: makes the longest duration more than 1,000 times the shortest; try 1
1f1b --ranks 99999999999999999999 ⇒ --ranks=99999999999999999999: must be at most 9,223,372,036,854,775,807; see `titanlab schedule --help`
""",
    "export": r"""
hub --into out --format dcp --force ⇒ --force=true: applies to --format hf or titanlab, and the format is dcp; leave it out
hub --into out --format dcp --name x ⇒ --name=x: applies to --format titanlab, and the format is dcp; leave it out
hub --into out --names torchtitan ⇒ --names=torchtitan: applies to --format dcp, and the format is hf; leave it out
run --into out --shard-size 1e400GB ⇒ --shard-size=1e400GB: is not a file size; try 5GB
""",
    "hosts": r"""
--clear n9 ⇒ --clear=n9: is not on the list; it has: none; see `titanlab hosts`
--clear n1 --all ⇒ --clear=n1: cannot stand beside --all; give one of the two
""",
    "retry": r"""
layouts --outcome oom --all-failed ⇒ --outcome=oom: is included in --all-failed; leave one of the two out
layouts --outcome , ⇒ arguments=: do not say which runs to retry; try --outcome hang,node_fail, --all-failed or --stale, or name runs
layouts --outcome oom,fire ⇒ --outcome=fire: is not an outcome; known: oom, hang, nan, crash, preempted, walltime, node_fail, cance…
layouts nonesuch ⇒ run=nonesuch: fits no run of sweep layouts; try new-********
layouts --outcome done ⇒ --outcome=done: is done…
layouts --outcome oom precision=bf16 ⇒ precision=bf16: is not to be changed in a run that has begun; changeable: notes, launch, cluster.per_node…
layouts --outcome oom launch.kind=slurm ⇒ launch.kind=slurm: cannot be changed for a sweep's runs…
layouts --outcome oom launch.at_once=soon ⇒ launch.at_once=soon: …
""",
    "best": r"""
layouts --by speed ⇒ --by=speed: runs cannot be ranked by it; known: tps, mfu, memory
layouts --max-memory 0 ⇒ --max-memory=0.0: must be a number of GiB above 0; try --max-memory 76
layouts --max-memory much ⇒ --max-memory=much: must be a number; see `titanlab best --help`
nothing ⇒ sweep=nothing: is not a sweep under runs; try single
⇒ arguments=: the following arguments are required: sweep; see `titanlab best --help`
""",
    "cancel": r"""
⇒ arguments=: the following arguments are required: sweep, run; see `titanlab cancel --help`
layouts nobody ⇒ run=nobody: fits no run of sweep layouts; try good-********
""",
    "collect": r"""
⇒ arguments=: the following arguments are required: sweep; see `titanlab collect --help`
layouts --into runs/layouts/points.jsonl ⇒ --into=runs/layouts/points.jsonl: cannot be written (File exists); name a folder of yours
""",
    "doctor": r"""
model=debug ⇒ overrides=model=debug: is not a key of launch; try launch=slurm launch.partition=gpu
""",
    "report": r"""
nope ⇒ sweep=nope: is not a sweep under runs; try single
layouts --into a-file ⇒ --into=a-file: must end in .html; try a-file.html
layouts --into a-file/a.html ⇒ --into=a-file: cannot be made…
layouts --format svg ⇒ --format=svg: is the format of figures; add --figures FOLDER
layouts --by colour ⇒ arguments=layouts --by colour: argument --by: invalid choice: 'colour' …; see `titanlab report --help`
""",
    "plan": r"""
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 --top 0 ⇒ --top=0: must lie in 1 to 1,000; try 20
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 --top many ⇒ --top=many: must be a whole number; see `titanlab plan --help`
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 --vary optimizer ⇒ --vary=optimizer: cannot be varied; try precision, compile or cluster=h100,h200; all else varies anyway
+recipe=llama3_1_8b_8gpus cluster=h100 --vary cluster ⇒ --vary=cluster: names no machines; try cluster=a100_80gb,h100,h200
+recipe=llama3_1_8b_8gpus cluster=h100 world=0 ⇒ world=0: must be at least 1; try world=8
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 cluster=local ⇒ cluster.device=null: names no GPU, and a plan is for machines whose facts are known; name one, such as cluster=h100
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 --plot a.svg ⇒ --plot=a.svg: goes with --explain; add --explain
+recipe=llama3_1_8b_8gpus cluster=h100 --explain --why ⇒ --why=true: goes with a plan of many layouts; leave it out
+recipe=llama3_1_8b_8gpus cluster=h100 --explain --top 3 ⇒ --top=3: goes with a plan of many layouts; leave it out
+recipe=llama3_1_8b_8gpus cluster=h100 --explain parallelism.pipeline=64 parallelism.shard=1 world=64 ⇒ parallelism.pipeline=64: 1f1b makes 64 stages of it, more than the 32 blocks of the model; try parallelism.pipeline=31 or 32, or a model of more blocks
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 precision=mxfp8 ⇒ precision=mxfp8: NVIDIA H100 80GB HBM3 is too old for mxfp8 products: it has compute capability 9.0, they need 10.0; try precision=bf16, or precision.emulate=true, which is slow
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 --fast ⇒ arguments=--fast: is not a flag of this verb; see `titanlab train --help`
+recipe=llama3_1_8b_8gpus cluster=h100 world=8 training.seq_len=4096,8192 ⇒ training.seq_len=4096,8192: is several values; add -m to run them all; a list is [4096,8192]
+recipe=llama3_1_8b_8gpus cluster=h100 --trace --rank one ⇒ --rank=one: must be whole numbers with commas between them; try --rank 0
+recipe=llama3_1_8b_8gpus cluster=h100 --rank 0 ⇒ --rank=0: goes with --trace; add --trace
+recipe=llama3_1_8b_8gpus cluster=h100 --trace --explain ⇒ --explain=true: excludes --trace; leave one out
+recipe=llama3_1_8b_8gpus cluster=h100 --trace --vary compile ⇒ --vary=compile: goes with a plan of many layouts; leave it out
--calibrate nothing ⇒ sweep=nothing: is not a sweep under runs; try single
--calibrate layouts --measure ⇒ --calibrate=layouts: excludes --measure; leave one out
--calibrate layouts --why ⇒ --why=true: goes with a plan of many layouts; leave it out
--calibrate layouts cluster=h100 ⇒ arguments=cluster=h100: is not for --calibrate, which takes recipes and cluster from the runs; leave it out
--calibrate ⇒ arguments=--calibrate: argument --calibrate: expected one argument; see `titanlab plan --help`
cluster=cpu --out cluster/a.yaml ⇒ --out=cluster/a.yaml: goes with --calibrate or --measure; add --calibrate
cluster=cpu --runs runs ⇒ --runs=runs: goes with --calibrate; add --calibrate
--calibrate layouts --out cores.yaml ⇒ --out=cores.yaml: must lie in a folder named cluster, so that --config-dir finds it; try cluster/cores.yaml
--calibrate layouts --out cluster/cores.json ⇒ --out=cluster/cores.json: is not the name of a cluster file; try cluster/mine.yaml
--calibrate layouts --out cluster/h100.yaml ⇒ --out=cluster/h100.yaml: has the name of a cluster that comes with titanlab, and cluster=h100 would choose that one; try cluster/my_h100.yaml
--calibrate layouts --out /proc/cluster/cores.yaml ⇒ --out=/proc/cluster/cores.yaml: cannot be written: No such file or directory; choose another folder, or make room
--calibrate layouts --out conf/cluster/own.yaml ⇒ --out=conf/cluster/own.yaml: is a file that titanlab has not written; give another name
--calibrate layouts --json ⇒ --json=true: goes with a plan of many layouts or --explain or --trace; leave it out
--calibrate layouts --top 3 ⇒ --top=3: goes with a plan of many layouts; leave it out
--measure --trace ⇒ --trace=true: excludes --measure; leave one out
--measure --explain ⇒ --explain=true: excludes --measure; leave one out
--measure model=llama_5m ⇒ --measure=model=llama_5m: is set by the measurement, which trains no recipe; give only cluster, launch, world and runs
--measure launch=slurm cluster=local ⇒ world=null: is not known: the cluster does not say how many processes a node takes; give world=8, or a cluster such as cluster=h100
--measure profiler.seconds=0 ⇒ profiler.seconds=0.0: must be a positive number; try 0.2
""",
    "logs": r"""
bad --grep '(' ⇒ --grep=(: is not a regular expression (missing ), unterminated subpattern at position 0); put \ before ( [ { * + ?
bad --tail -1 ⇒ --tail=-1: must not be negative; try 100
bad --tail x ⇒ --tail=x: must be a whole number; see `titanlab logs --help`
bad --rank 7 ⇒ --rank=7: the run has no log of this rank; it has those of rank 0; try --rank 0
bad --follow --attempt 1 ⇒ --attempt=1: an attempt that has ended prints no more; leave out --attempt or --follow
""",
    "status": r"""
layout ⇒ sweep=layout: is not a sweep under runs; try layouts
layouts nothing ⇒ run=nothing: fits no run of sweep layouts; try big-********
--watch ⇒ --watch=true: is for the table of one sweep; give a sweep, and nothing else
""",
    "completion": r"""
fish ⇒ completion=fish: is not a known shell; try bash (in zsh, run bashcompinit first)
""",
    "tokenize": r"""
⇒ arguments=: the following arguments are required: files, folder; see `titanlab tokenize --help`
'nope/*.txt' out ⇒ files=nope/*.txt: matches no file; check the path, and quote a pattern, so that no shell expands it
text.txt a-file ⇒ folder=a-file: exists already; name another, or remove it
text.txt out --vocab-size few ⇒ --vocab-size=few: must be a whole number; see `titanlab tokenize --help`
corpus.txt shards --tokenizer t.model --vocab-size 2048 ⇒ --vocab-size=2048: applies to a tokenizer that is trained, and --tokenizer names one; leave one of them out
""",
    "download-tokenizer": r"""
⇒ arguments=: the following arguments are required: repo; see `titanlab download-tokenizer --help`
a/b/c ⇒ repo=a/b/c: is not a model of the hub; give <owner>/<model>, as in its address
""",
    "import": r"""
nothing ⇒ source=nothing: there is no such folder; give a folder of Hugging Face's, or a model of its hub as owner/name
theirs --model debug --into ours --name mine ⇒ --model=debug: is for a folder with .metadata only; theirs names its model itself; leave it out
theirs --into ours --name null ⇒ --name=null: cannot be chosen: model=null means no model; try null_imported
""",
    "sync": r"""
⇒ arguments=: the following arguments are required: RUN | SWEEP; see `titanlab sync --help`
layouts --tracker x ⇒ arguments=layouts --tracker x: argument --tracker: invalid choice: 'x' …; see `titanlab sync --help`
""",
    "workspace": r"""
⇒ arguments=: the following arguments are required: sweep; see `titanlab workspace --help`
""",
    "diagnose": r"""
⇒ arguments=: the following arguments are required: run; see `titanlab diagnose --help`
""",
    "checkpoints": r"""
⇒ arguments=: the following arguments are required: run; see `titanlab checkpoints --help`
""",
    "repro": r"""
⇒ arguments=: the following arguments are required: run; see `titanlab repro --help`
good --into a-file/x ⇒ --into=a-file/x: cannot be made (Not a directory); give another folder
""",
    "clean": r"""
--what everything ⇒ --what=everything: everything is not a kind; choose from checkpoints, superseded, temporary, code, all
--keep 0 ⇒ --keep=0: must be at least 1; resume needs the newest checkpoint
--runs a-file ⇒ --runs=a-file: is not a folder; name the folder of runs
""",
    "sweep": r"""
+sweeps=nope ⇒ sweeps=nope: is not an option of this group; known: ac_memory, cpu_1d_to_4d, cpu_calibration, llama3_8b_8gpus_la…
--config-dir hidden seed=1,2 ⇒ model=debug: hidden/model/debug.yaml is never read: …/conf has an option of that name; …
seed=1,2 ++seed=3,4 ⇒ seed=3,4: is swept twice; …
seed=1,2 seed=7 ⇒ seed=7: is one value for all points…
seed=1,1 ⇒ space.product.seed=1: occurs twice; …
seed=1,1.0 ⇒ seed=1.0: must be a whole number; …
seed=range(0,10,nan) ⇒ seed=range(0,10,nan): has infinitely many values, or none; …
seed=glob(*) ⇒ seed=glob(*): fits no value; …
"=1,2" ⇒ space.product=: is not a key of a recipe; …
optimizer.schedule=3,4 ⇒ optimizer.schedule=3: has keys of its own; …
hydra/sweeper=space seed=1,2 hydra.sweeper.repeats=true ⇒ repeats=true: must be a whole number, at least 1; …
hydra/sweeper=space seed=1,2 hydra.sweeper.repeats=1001 ⇒ repeats=1001: is more than 1000; …
hydra/sweeper=space seed=1,2 hydra.sweeper.where=[null] ⇒ where=null: is not a condition; …
seed=1,2 hydra.sweeper=null ⇒ hydra.sweeper=null: removes a part of Hydra that titanlab needs for sweeps; …
seed=1 --wait --dry-run ⇒ --dry-run=true: submits nothing to wait for (--wait); leave one out
seed=0,1 --keep --prune ⇒ --prune=true: excludes --keep; leave one out
seed=0,1 --json --wait ⇒ --json=true: prints no table, and --wait shows one; leave one out
+hydra.callbacks.x._target_=os.system seed=0,1 ⇒ hydra.callbacks.x._target_=os.system: names code, and a config never runs any; leave it out; code comes as an option of a package: docs/models-of-your-own.md
""",
    "parity": r"""
nope ⇒ sweep=nope: is not a sweep under runs; try single
--cfg job ⇒ arguments=--cfg job: name no recipe; try +recipe=quickstart, or +sweeps=NAME
quickstart "+recipe=quickstart parallelism=fsdp world=2 seed=1" ⇒ seed=1: cannot be compared with +recipe=quickstart, which has seed=0; compare recipes that differ in layout or technique only
quickstart "+recipe=quickstart seed=1,2" ⇒ recipe=+recipe=quickstart seed=1,2: describes 2 recipes, and two are compared; leave the others out, or prove all: titanlab parity +sweeps=…
quickstart nonesuch ⇒ recipe=nonesuch: is neither a run nor a recipe; try +recipe=NAME, or name two runs (--runs FOLDER)
quickstart "+recipe=quickstart 'world=2" ⇒ recipe=+recipe=quickstart 'world=2: cannot be read (No closing quotation); try '+recipe=quickstart world=2'
good "+recipe=quickstart seed=1" ⇒ run=+recipe=quickstart seed=1: is not a finished run, and good is one; compare two runs, or two recipes
good over --steps=5 ⇒ --steps=5: applies to recipes, which are trained; finished runs are compared as they were logged; leave it out, or give two recipes
+sweeps=quickstart_layouts --only pp9 ⇒ --only=pp9: is in no run's name of quickstart_layouts (sweeps/quickstart_layouts); try single-********
nope seed=1 ⇒ recipe=nope: is neither a recipe nor a sweep of conf; try +recipe=quickstart
quickstart --steps 0 ⇒ --steps=0: must lie in 1 to 100; try 3
""",
    "rehearse": r"""
nope ⇒ sweep=nope: is not a sweep under runs; try single
quickstart --keep a-file ⇒ --keep=a-file: cannot be made (File exists); give a folder of yours
quickstart --keep conf ⇒ --keep=conf: has files already; give an empty folder, or a new one
""",
}
ROWS = [(verb, *row.split("⇒ ")) for verb, rows in TABLES.items() for row in rows.strip().splitlines()]


def rows_by_layer() -> list[object]:
    """In `make test`, of the rows of a verb whose rules begin alike, the first."""
    seen, rows = set(), []
    for verb, typed, line in ROWS:
        words = (verb, re.sub(r"[\W\d]+", " ", line.partition(": ")[2])[:8])
        rows.append(pytest.param(verb, typed, line, marks=[pytest.mark.full] if words in seen else []))
        seen.add(words)
    return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    huggingface.folder(folder / "hub")
    stuff.make(folder)
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with everything that a row may name."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("TITANLAB_CACHE", str(place.parent / "cache"))
    monkeypatch.setenv("STRANGE", "not-for-others")
    return place


def words_of(verb: str, typed: str) -> tuple[list[str], dict[str, str]]:
    """The words of a row and its variables; `train` gets the quickest data unless the row names some."""
    words = shlex.split(typed)
    environ = {}
    while words and re.match("[A-Z_]+=", words[0]):
        name, _, environ[name] = words.pop(0).partition("=")
    if verb == "train" and not any(word.startswith(("data=", "--config-name", "--from")) for word in words):
        words.insert(0, "data=synthetic")
    return [*verb.split(), *words], environ


@pytest.mark.parametrize(("verb", "typed", "line"), rows_by_layer(), ids=lambda text: text[:60])
def test_a_mistake_is_its_line(command, verb, typed, line):
    words, environ = words_of(verb, typed)
    said = command(words, **environ)
    found = re.sub(r"(?<=-)[0-9a-f]{8}\b", "********", said.err.replace(f"{Path.cwd()}/", ""))
    assert re.fullmatch(f"error: {'.*'.join(map(re.escape, line.split('…')))}\n", found, re.DOTALL), found
    assert said.refusal
    assert "not-for-others" not in said.err


def test_no_mistake_is_there_twice():
    assert len({(verb, typed) for verb, typed, _ in ROWS}) == len(ROWS) > 300


# What a cure offers: a key, or an override. Those of these keys want other files, another host or another flag.
FOLLOWED = re.compile(r"did you mean (?P<key>\S+?)\?|\btry (?P<override>\S+?)[,;]?(?: |$)")
NOT_HERE = ("-", "arguments", "data.data_files", "data.streams", "run", "sweep", "hydra", "cluster.accelerator")
NOT_HERE += ("schedule.file", "tracker", "model.experts")
# Of these, another key has to be changed too, or only the beginning of the cure is there.
NOT_ALONE = re.compile(r"cannot cut|={|try \S*…")


def cured() -> list[str]:
    """Command lines of `train` in which what a cure offers stands in place of what it mends."""
    lines = []
    for verb, typed, line in ROWS:
        key, value, cure = re.fullmatch(r"([^=]*)=(.*?): .*?(?:; (.*))?", line).groups()
        key, found = key.lstrip("+"), FOLLOWED.search(cure or "")
        if (
            verb != "train"
            or found is None
            or NOT_ALONE.search(line)
            or key.startswith(NOT_HERE)
            or re.search("launch=slurm|-m |^[A-Z]|--cfg|--from|=fsdpp", typed)
        ):
            continue
        override = found["override"] or f"{found['key']}={value}"
        override = override if re.match(r"\+?\w[\w.]*=", override) else f"{key}={override}"
        mended = {override.partition("=")[0].lstrip("+"), key if found["key"] else ""}
        words = [word for word in shlex.split(typed) if not re.search(rf"={{{key.rpartition('.')[2]}:", word)]
        words = [word for word in words if word.partition("=")[0].lstrip("+") not in mended]
        lines.append(shlex.join([*words, override]))
    return list(dict.fromkeys(lines))


@pytest.mark.full
@pytest.mark.parametrize("typed", cured(), ids=lambda text: text[:60])
def test_a_cure_is_accepted(command, typed):
    said = command(words_of("train", typed)[0])
    assert (said.code, said.err, len(said.started)) == (0, "", 1)


def test_a_corpus_that_is_too_small_says_how_far_it_goes(command):
    words = "train data=files data.files=text.txt"
    refusal = command(f"{words} data.vocab_size=2048").refusal
    assert (refusal["key"], refusal["value"]) == ("data.vocab_size", "2048")
    words += " data.vocab_size=" + re.match(r"try (\d+), or give more text", refusal["cure"])[1]
    assert command(words).code == 0
    refusal = command(f"{words} training.seq_len=100000").refusal
    assert refusal["rule"].startswith("the corpus is shorter than one sequence")
    words += " training.seq_len=" + re.match(r"try (\d+) or less", refusal["cure"])[1]
    assert command(words).code == 0


def test_a_host_with_fewer_gpus_than_the_recipe_wants(command, monkeypatch):
    gpus = Host(accelerator="cuda", device="NVIDIA H200", count=2)
    monkeypatch.setattr("titanlab.launch.execute.this_host", lambda: gpus)
    said = command("train data=synthetic parallelism=fsdp world=4")
    assert said.err == "error: world=4: this host has 2 GPUs; try world=2\n"
    assert command("train data=synthetic parallelism=fsdp world=2").started[0].cluster.device == "NVIDIA H200"


def test_a_host_with_too_little_memory(command, monkeypatch):
    small = Host(accelerator="cpu", device="cpu", count=2, memory_bytes=2**30)
    for module in ("titanlab.launch.execute", "titanlab.sweep.plan"):
        monkeypatch.setattr(f"{module}.this_host", lambda: small)
    for line in ("train model=llama3_8b", "train -m model=llama3_8b seed=0,1"):
        said = command(f"{line} data=synthetic data.vocab_size=2048")
        assert said.refusal["key"] == "model"
        assert "8,030,261,248 parameters and their gradients take at least 59.8 GiB here" in said.err
    # What is composed for another machine is composed here.
    assert command("train model=llama3_1_405b --cfg job").code == 0


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_whose_package_is_not_installed(command, monkeypatch, tracker):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rule, cure = "the package is not installed", f"pip install {tracker}, or try tracker=jsonl"
    assert command(f"train data=synthetic tracker={tracker}").err == f"error: tracker={tracker}: {rule}; {cure}\n"


def test_a_bad_point_is_told_before_the_data_of_a_good_one_is_prepared(command):
    said = command("train -m data=files data.files=text.txt data.vocab_size=341 seed=0,-1")
    assert (said.refusal["key"], said.out) == ("seed", "")


def test_nothing_was_started(command, monkeypatch):
    """No process, no thread, no import of torch: there is nothing that could hang."""

    def never(*arguments, **how):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.setattr(os, "fork", never)
    monkeypatch.setattr(threading.Thread, "start", never)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    split = "parallelism.pipeline=2 model.layers=4 schedule=csv schedule.file=deadlock.csv"
    for layout in ("parallelism.tensor=3", "parallelism.context=3", "parallelism.pipeline=3", split):
        assert command(f"train data=synthetic {layout}").refusal
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("typed", "environ"),
    [
        ("train data=synthetic training.stepz=3", {}),
        ("train data=synthetic parallelism=tp", {"RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "1"}),
        ("generate nope", {"HYDRA_FULL_ERROR": "1"}),
        pytest.param("train data=synthetic runs=/dev/null/runs", {}, marks=pytest.mark.full),
        pytest.param("train -m data=synthetic training.steps=200,0", {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_process_says_the_same(command, here, typed, environ):
    expected = command(typed, **environ)
    words = [sys.executable, "-m", "titanlab", *shlex.split(typed)]
    done = subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected.err)
