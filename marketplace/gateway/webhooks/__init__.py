"""Calls outward: what became of a renter's jobs and batches, told to addresses that the renter named."""
