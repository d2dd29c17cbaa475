"""A sweep's runs as rows: collected, listed and watched."""
