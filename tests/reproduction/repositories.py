"""A git repository with a package, as the code of runs lies in one."""

import os
import subprocess
from pathlib import Path


def git(folder, *words):
    own = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *own, *words], cwd=folder, capture_output=True, text=True, check=True, env=environ)
    return done.stdout.strip()


def make_repository(parent: Path) -> Path:
    """A repository in a folder, with one commit, and a hook that must not run: it makes the file `ran` beside it."""
    folder = parent / "repository"
    (folder / "titanlab").mkdir(parents=True)
    (folder / "titanlab" / "code.py").write_text("value = 1\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {parent}/ran\n")
    hook.chmod(0o755)
    return folder
