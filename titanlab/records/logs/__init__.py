"""What the ranks of a run print: files of lines, read from either end, and merged by time."""
