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
# # Pipeline schedules and their bubbles
#
# Who computes what when, how much of all ranks' time is idle, and how many microbatches a rank keeps: simulated for every
# schedule, then for the pipelines of a sweep. Set `TITANLAB_SWEEP` to a sweep's folder, or change the path below;
# docs/schedules.md explains the schedules.

# %%
import os
from pathlib import Path

import pandas as pd

from titanlab.report import drawings
from titanlab.report.analyses import pipelines_frame, schedules_frame, timeline_of
from titanlab.techniques.schedule.plot import rows

# %matplotlib inline

ranks, microbatches = 4, 8

# %% [markdown]
# ## One timeline
#
# `0F3` would be stage 0, forward, microbatch 3; in the grid the row is the rank. F is a forward pass, B a backward pass; I
# and W are its two halves.

# %%
for name in ("1f1b", "zbv"):
    print(name, "\n", *(f"{line}\n" for line in rows(timeline_of(name, ranks=ranks, microbatches=microbatches), width=None, coloured=False)))

# %% [markdown]
# ## All schedules
#
# `step` is the time of a step, where the forward pass of a microbatch through all layers of a rank takes 1. Without idle
# time it would be three times the number of microbatches.

# %%
compared = schedules_frame(ranks=[ranks], microbatches=[microbatches])
compared.sort_values(["bubble_percent", "peak_in_flight"]).round(2)

# %% [markdown]
# ## More microbatches, less idle time
#
# A bubble has a fixed length: with more microbatches it is a smaller share. Their number is limited by the batch, and in
# GPipe and looped BFS also by memory, since every rank keeps all of them.

# %%
drawings.draw_bubbles(schedules_frame(ranks=[ranks], microbatches=[4, 8, 12, 16, 24, 32]))

# %% [markdown]
# ## Slow transfers
#
# 1F1B waits for a neighbour in each of its forward passes, so that it feels the time of a transfer more than others.

# %%
transfers = [schedules_frame([ranks], [microbatches], transfer=time).assign(transfer=time) for time in (0, 0.1, 0.25, 0.5)]
pd.concat(transfers).pivot(index="schedule", columns="transfer", values="bubble_percent").round(1)

# %% [markdown]
# ## The pipelines of a sweep
#
# The bubble is that of the simulation, and `step_seconds` was measured. `busy_seconds` is what would be left without the
# bubble. Where `oversubscribed` is true, the processes took turns, and the time says nothing about the layout.

# %%
sweep = Path(os.environ.get("TITANLAB_SWEEP", "../runs/quickstart_layouts"))
pipelines = pipelines_frame(sweep)
print(f"{sweep.name}: pipelines {len(pipelines)}")
pipelines.drop(columns=["run"]).round(3)
