"""The package in `package/` is importable, here and in the pool's workers; nothing says that it is installed."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "package"
# Workers get the path of this process, and they start with a test: after all tests were collected.
sys.path.insert(0, str(PACKAGE))
