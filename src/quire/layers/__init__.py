"""The parts that models are made of. They know nothing of requests, ranks or number formats."""
