"""The tests: a package, so that workers can import what a test sends them."""
