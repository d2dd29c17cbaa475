"""The oracle: what titanlab answers today, in golden files, to compare after each step of a refactoring.

`python -m tests.oracle` compares, `python -m tests.oracle --write` writes the golden files anew, and names after it
choose sections. `python -m tests.oracle.plant` shows which planted faults the tests catch.
"""
