"""How a run saves: implementations of the options of the group `checkpoint`."""
