"""Simulated devices: routes through streets, how devices move on them, and which crossings of fences follow. No I/O."""
