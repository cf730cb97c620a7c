"""Guard: keys with a time to live, leases with fencing. protocol.py says what is promised, the others keep it."""
