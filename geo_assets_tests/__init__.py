"""Tests, mirroring the tree. Contract tests run each port's suite against every adapter."""
