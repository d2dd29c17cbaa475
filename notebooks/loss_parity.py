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
# # Do the recipes of a sweep train the same?
#
# Losses and gradient norms of all runs against those of one of them, step by step. Set `TITANLAB_SWEEP` to a sweep's
# folder, or change the path below. docs/parity.md and docs/techniques.md compare gradients and parameters too.

# %%
import os
from pathlib import Path

import pandas as pd

from titanlab.prove.tolerances import of_runs
from titanlab.recipe import from_mapping
from titanlab.report import figures, frames
from titanlab.report import drawings
from titanlab.report.analyses import differences_frame, largest_differences
from titanlab.sweep import SweepFolder

# %matplotlib inline

sweep = Path(os.environ.get("TITANLAB_SWEEP", "../runs/quickstart_layouts"))
runs = frames.sweep_frame(sweep)
steps = frames.metrics_frame(sweep)
# Without parallelism and in full precision, if there is such a run; otherwise the first run.
logged = runs[runs.run.isin(steps.run)]
order = logged.assign(wide=logged.precision != "fp32").sort_values(["wide", "world"], kind="stable")
reference = order.iloc[0]
print(f"{sweep.name}: reference {reference['name']} ({reference['layout.label']}, {reference.precision})")

# %%
figures.loss_by_tokens(steps)

# %% [markdown]
# ## Differences by step
#
# Relative differences from the reference, on a logarithmic axis. Two layouts of one recipe sum in another order, and the
# rounding of the sums is all that differs: 1e-7 in fp32 at the first steps. Training amplifies rounding, so that the
# lines rise. At a step at which the gradient is very sensitive to the parameters they may jump, also between two runs of
# one process whose microbatches differ. The dashed line is the tolerance of `titanlab parity` for two finished runs in the
# precision of the reference (docs/proofs.md).

# %%
differences = differences_frame(steps, reference.run)
recipe = from_mapping(SweepFolder(sweep).run(reference.run).config())
tolerance = of_runs(recipe.precision)
drawings.draw_differences(differences, tolerance=tolerance.loss)

# %% [markdown]
# The gradient norm is a derivative, and shows a difference earlier than the loss:

# %%
drawings.draw_differences(differences, column="grad_norm_difference")

# %% [markdown]
# ## The largest differences
#
# By precision: another layout of the same precision differs by rounding, another precision by its own. Repeats of one
# recipe do the same arithmetic, and do not differ at all on one machine.

# %%
largest = largest_differences(differences).merge(runs[["run", "precision", "repeat"]], on="run")
with pd.option_context("display.float_format", "{:.1e}".format):
    display(largest.drop(columns=["run"]).sort_values("loss_difference"))

# %%
by_precision = largest.groupby("precision")[["loss_difference", "grad_norm_difference"]].max()
with pd.option_context("display.float_format", "{:.1e}".format):
    display(by_precision)
