"""The root of the configuration, the rules that cross groups, the pipeline split, composition by Hydra."""
