"""Quire, OpenVINO GenAI and llama.cpp on this CPU: `python -m quire_lab.benchmarks.compare_cpu`."""
