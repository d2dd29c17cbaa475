"""A sweep's runs as rows: watched, told, collected."""
