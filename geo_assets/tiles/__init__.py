"""A tile and how it is made: key, cover, zooms, encode, work key. No orchestrator, no network, no disk."""
