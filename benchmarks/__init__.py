"""How fast the parts that matter are. Each module prints medians of several runs, as JSON with `--json`."""
