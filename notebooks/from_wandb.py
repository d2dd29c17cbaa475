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
# The same tables and figures from a project on wandb's server, where the folders of the runs are not at hand. Set
# `TITANLAB_WANDB` to ENTITY/PROJECT; wandb needs a network and a key. `titanlab sync` uploads what runs have written
# offline.

# %%
import os

import pandas as pd

from titanlab.report import figures, wandb_frames
from titanlab.report import drawings
from titanlab.report.analyses import scaling_frame

# %matplotlib inline

project = os.environ.get("TITANLAB_WANDB", "titanlab")
recorded = wandb_frames.runs_of_project(project)
print(f"{project}: runs {len(recorded)}, rows {sum(len(run.rows) for run in recorded)}")

# %% [markdown]
# ## What is in the record
#
# `exit_code` is empty where a run has not ended.

# %%
pd.DataFrame(
    [{"run": run.name, "group": run.group, "rows": len(run.rows), "exit_code": run.exit_code} for run in recorded]
)

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
