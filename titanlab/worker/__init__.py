"""What the process of a rank runs: `python -m titanlab.worker FOLDER [-]`. It does not use Hydra."""
