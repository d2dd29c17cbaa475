# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The recipes of a sweep, side by side
#
# Throughput and memory by layout, loss against tokens, and how the runs ended. Set `TITANLAB_SWEEP` to a sweep's folder,
# or change the path below; docs/comparing.md has every column.

# %%
import os
from pathlib import Path

import pandas as pd

from titanlab.report import figures, frames

# %matplotlib inline

sweep = Path(os.environ.get("TITANLAB_SWEEP", "../runs/quickstart_layouts"))
runs = frames.sweep_frame(sweep)
steps = frames.metrics_frame(sweep)
dropped = (runs.state == "dropped").sum()
print(f"{sweep.name}: runs {len(runs) - dropped}, points dropped {dropped}, rows of metrics {len(steps)}")

# %% [markdown]
# ## What came of every run
#
# Points that broke a rule are rows too: `cause` says which.

# %%
figures_of = ["tokens_per_second", "mfu_percent", "memory_gib", "loss"]
with pd.option_context("display.max_colwidth", None, "display.float_format", "{:,.4g}".format):
    display(runs[["name", "layout.label", "world", "state", "outcome", "step", *figures_of, "cause"]])

# %%
figures.outcomes(runs)

# %% [markdown]
# ## Throughput
#
# Tokens per second of one device, so that layouts with different numbers of devices can be compared, then of all devices.
# Where there were more processes than cores, they took turns: those bars are hatched, and say nothing about the layout.

# %%
figures.throughput_by_layout(runs)

# %%
figures.throughput_by_layout(runs, together=True)

# %% [markdown]
# ## Memory
#
# The peak of one process. Sharding and splitting take it down; on a CPU a process's libraries are part of it.

# %%
figures.memory_by_layout(runs)

# %% [markdown]
# ## Loss
#
# The same training under another layout draws the same curve: what differs is speed and memory.

# %%
figures.loss_by_tokens(steps)

# %% [markdown]
# How far the last losses of equal trainings are from each other:

# %%
done = runs[runs.outcome == "done"]
losses = done.groupby(["precision", "optimizer", "global_batch", "seq_len", "steps", "seed"]).loss.agg(["count", "min", "max"])
losses.assign(spread=losses["max"] - losses["min"])
