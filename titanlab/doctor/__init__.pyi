from .checkup import checks as checks
from .checkup import run_checks as run_checks
