"""What the library is worth and what it costs; every result is a JSON file with the machine it ran on."""
