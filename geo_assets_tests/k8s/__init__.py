"""End to end in a cluster of the lab (deploy/lab), marked `k8s`: `make test-k8s`."""
