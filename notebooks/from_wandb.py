# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A sweep from wandb
#
# The same tables and figures from what wandb has recorded, where the folders of the runs are not at hand: from files that
# were written offline (`tracker=wandb tracker.mode=offline`), or from a project on wandb's server.
#
# Set `TITANLAB_WANDB_FILES` to a folder with such files below it, or `TITANLAB_WANDB` to ENTITY/PROJECT for a project on
# the server, which needs a network and a key.

# %%
import os
from pathlib import Path

import pandas as pd

from titanlab.report import figures, wandb_frames
from titanlab.report.analyses import drawings
from titanlab.report.analyses.scaling import scaling_frame
from titanlab.tracker.wandb_reader import read_runs, runs_of_project

# %matplotlib inline

project = os.environ.get("TITANLAB_WANDB")
files = Path(os.environ.get("TITANLAB_WANDB_FILES", "../runs/quickstart_layouts"))
recorded = runs_of_project(project) if project else read_runs(files)
print(f"{project or files.name}: runs {len(recorded)}, rows {sum(len(run.rows) for run in recorded)}")

# %% [markdown]
# ## What is in the record
#
# `exit_code` is empty where the record ends before the run did: the process was killed, or runs still. `damaged` counts
# places in a file that could not be read.

# %%
pd.DataFrame([{"run": run.name, "group": run.group, "rows": len(run.rows), "exit_code": run.exit_code, "damaged": run.damaged} for run in recorded])

# %% [markdown]
# ## The table
#
# The columns are those of `titanlab collect` (docs/comparing.md). What only a run's folder knows is empty: causes of
# failures, jobs, dropped points.

# %%
runs = wandb_frames.sweep_frame(recorded)
steps = wandb_frames.metrics_frame(recorded)
known = ["name", "layout.label", "world", "outcome", "step", "tokens_per_second", "mfu_percent", "memory_gib", "loss"]
with pd.option_context("display.float_format", "{:,.4g}".format):
    display(runs[known])

# %%
figures.throughput_by_layout(runs)

# %%
drawings.draw_scaling(scaling_frame(runs))

# %%
figures.memory_by_layout(runs)

# %%
figures.loss_by_tokens(steps)
