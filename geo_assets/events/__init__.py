"""What may come in: event models, signatures, geometry, CRS, dead letters. No orchestrator, no network, no disk."""
