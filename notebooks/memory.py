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
# # Memory: estimate against measurement
#
# What the planner says that each run of a sweep needs, item by item, beside what was measured. Set `TITANLAB_SWEEP` to a
# sweep's folder, or change the path below; docs/planner.md says what the items are.

# %%
import os
from pathlib import Path

import pandas as pd

from titanlab.report import drawings
from titanlab.report.analyses import memory_frame
from titanlab.report.figures import estimate_against_measurement
from titanlab.report.frames import sweep_frame

# %matplotlib inline

sweep = Path(os.environ.get("TITANLAB_SWEEP", "../runs/quickstart_layouts"))
memory = memory_frame(sweep)
print(f"{sweep.name}: runs with an estimate {len(memory)}, with a measurement {memory.measured_gib.notna().sum()}")

# %% [markdown]
# ## The account
#
# The items are the tensors of the rank that needs most, at the moment of a step when they are most: `moment` names it.
# `estimated_gib` adds what the allocator takes beside tensors. On a CPU the measurement is the resident memory of a
# process, with torch and its libraries: `estimated_gib` has a process of 0.45 GB, unless the cluster's config says what a
# process takes here.

# %%
with pd.option_context("display.float_format", "{:,.4f}".format):
    display(memory.set_index("name").drop(columns=["run", "pipeline_rank"]).T)

# %%
drawings.draw_memory(memory)

# %% [markdown]
# ## Time and memory of all runs
#
# A point for each run that is done: on the line the estimate is right, between the dashed lines it is within 20 %. Of CPUs
# that nobody has measured there is no such estimate: `titanlab plan --measure` measures this machine, and writes a file for
# `cluster=`.

# %%
runs = sweep_frame(sweep)
known = runs["estimate.memory_gib"].notna().sum()
print(f"runs with an estimate of time and memory: {known}")
estimate_against_measurement(runs) if known else None

# %% [markdown]
# ## Differences between layouts
#
# On a CPU most of a small run's memory is the process. What a layout saves is seen in differences from the run that needs
# most: there the process is gone, and tensors are left.

# %%
done = memory.dropna(subset=["measured_gib"])
largest = done.loc[done.tensors_gib.idxmax()]
saved = pd.DataFrame(
    {
        "estimate saves (MiB)": 1024 * (largest.tensors_gib - done.tensors_gib),
        "measurement saves (MiB)": 1024 * (largest.measured_gib - done.measured_gib),
    }
)
saved.set_axis(done.name).round(1)
