"""The laboratory: experiments, baselines and simulated devices over the engine of `quire`."""
