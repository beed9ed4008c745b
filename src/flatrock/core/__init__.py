"""Level 0: threats, random numbers, borrowing, registries, records and errors; imports nothing of flatrock."""
