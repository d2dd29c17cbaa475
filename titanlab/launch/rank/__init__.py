"""What the process of a rank runs: `python -m titanlab.launch.rank FOLDER [-]`. It does not use Hydra."""
