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
# # The recipes of a sweep, side by side
#
# Throughput, MFU, scaling efficiency and memory by layout, loss against tokens, and how the runs ended. Set
# `TITANLAB_SWEEP` to a sweep's folder, or change the path below; docs/comparing.md has every column.

# %%
import os
from pathlib import Path

import pandas as pd

from titanlab.report import figures, frames
from titanlab.report import drawings
from titanlab.report.analyses import ranking_text
from titanlab.report.analyses import scaling_frame
from titanlab.report.figures import pareto

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
# Tokens per second of one device with the MFU, so that layouts with different numbers of devices can be compared, then of
# all devices. A bar is the median over the repeats of a recipe, and points are its runs: a difference that is smaller than
# the distance between the points of one recipe is noise. Where there were more processes than cores, they took turns:
# those bars are hatched, and say nothing about the layout.

# %%
figures.throughput_by_layout(runs)

# %%
figures.throughput_by_layout(runs, together=True)

# %% [markdown]
# ## Scaling efficiency
#
# The speed of one device, in percent of the speed of one device of the same recipe on the fewest devices. With 100 %,
# twice the devices are twice as fast. `weak=True` compares recipes with the same batch of one device instead of the same
# global batch.

# %%
scaling = scaling_frame(runs)
drawings.draw_scaling(scaling)

# %% [markdown]
# ## Is the difference more than noise?
#
# The recipes in order of speed, as `titanlab best` prints them: medians over repeats, with an interval of 95 % that follows
# from the noise of all repeats. Runs without a core for each process do not count.

# %%
print(ranking_text(runs))

# %% [markdown]
# ## Memory against speed
#
# The line joins the recipes that no other one beats in both. Failed runs are crosses. With `speed="mfu_percent"` the axis is
# the MFU.

# %%
pareto(runs)

# %% [markdown]
# ## Memory
#
# The peak of one process. Sharding and splitting take it down; on a CPU a process's libraries are part of it.

# %%
figures.memory_by_layout(runs)

# %% [markdown]
# ## Loss
#
# The same training under another layout draws the same curve: what differs is speed and memory. The notebook
# `loss_parity` measures how far the curves are from each other.

# %%
figures.loss_by_tokens(steps)
