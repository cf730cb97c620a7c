"""Purge: caches forget the URLs of tiles that changed. protocol.py says what is promised, http.py keeps it."""
