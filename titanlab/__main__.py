"""`python -m titanlab`: the command line, also where a launcher wants a module (`torchrun -m titanlab train …`)."""

import sys

from titanlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
