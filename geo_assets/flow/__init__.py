"""Flow: what keeps a stream in bounds and in order: dedup window, breaker, bounds of a queue, stage latency, epochs.

No orchestrator, no network, no disk, no clock of its own: whoever calls brings the time.
"""
