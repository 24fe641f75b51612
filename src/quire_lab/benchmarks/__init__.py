"""Research benchmarks and GPU measurements: `python -m quire_lab.benchmarks.NAME --help`."""
