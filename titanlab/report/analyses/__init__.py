"""Questions that a sweep answers, as data frames: scaling, memory by item, pipelines, differences of losses."""
