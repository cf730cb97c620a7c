"""A stand-in for a Kubernetes node: runs the pods that the real scheduler bound to it, with runc over unpacked images.

It keeps what the platform relies on: probes, readiness that gates endpoints, addresses and names of services,
volumes, restarts, grace periods, memory limits, logs. It is no kubelet: pods share the machine's network, nobody
enforces network policies, nothing is pulled, and `kubectl exec` and `port-forward` are not there.
"""
