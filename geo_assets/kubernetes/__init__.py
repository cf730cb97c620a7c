"""Runs as Jobs of Kubernetes: who launches them, who takes away what is left of them, and how large their pods are."""
