"""The cost model of simulated devices, fitted to measured steps."""
