"""What only the commands and benchmarks use. The library does not import it."""
