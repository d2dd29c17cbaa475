"""Whether the main thread of a rank that hangs computes, also on a host with more processes than cores."""

import subprocess
import sys

# The process and its competitors share one core, and it comes last.
SCRIPT = """
import os, subprocess, sys, threading, time
from titanlab.distributed.hang import main_thread_is_busy

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
loop = "import time\\nwhile time.process_time() < 60: pass"
others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(4)]
os.nice(19)
found = []
waited = threading.Event()

def measure():
    for _ in range(2):
        # Until the main thread has come to where it waits or computes.
        time.sleep(1.0)
        found.append(main_thread_is_busy())
        waited.set()

measures = threading.Thread(target=measure)
measures.start()
waited.wait()
while len(found) < 2:
    pass
measures.join()
for other in others:
    other.kill()
print(*found)
"""


def test_a_thread_that_computes_is_busy_also_where_it_hardly_gets_a_core():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    # First it waits, then it computes.
    assert done.stdout.split() == ["False", "True"]
