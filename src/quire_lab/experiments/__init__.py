"""The laboratory: experiments that compare the engine with itself, each with a table, a picture and its record."""
