"""What Hydra's flags print (`--cfg`, `--info`, `--help`), and completion for shells."""
