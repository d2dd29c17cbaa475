"""Estimates of memory and time of recipes, without a GPU."""
