"""The fast lane: a long-lived worker that builds what `[tiles]` hints at within milliseconds.

It is an accelerator. The sensor and its runs are the guarantee: they build what the lane did not.
"""
