"""A Kubernetes cluster on this machine for the end-to-end tests: a real control plane and a stand-in node.

Here: its control plane binary, its processes, its command line. In `node/`: what runs the pods. No test, no manifest.
"""
