"""The parts of a step's time: blocks, communication, stages, pipelines."""
