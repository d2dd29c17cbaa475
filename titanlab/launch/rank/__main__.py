"""The process of one rank: `python -m titanlab.launch.rank FOLDER [-]`.

It reads the config.yaml of the run's latest attempt; with `-`, it reads the same config as a line of JSON from stdin.
"""

import contextlib
import os
import sys

from titanlab.system import kept_imports

with kept_imports():
    from titanlab.launch.rank.rank import main, show_stacks

if __name__ == "__main__":
    show_stacks()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        # The log may be on a full disk.
        with contextlib.suppress(OSError):
            stream.flush()
    # Everything is on disk. An ordinary exit would destroy torch's threads, which sometimes aborts ("terminate called
    # without an active exception", torch 2.13 on gloo): a finished run would look like a failed process. This can go
    # when torch joins its threads at exit.
    os._exit(code)
