"""The canary's sample: features that are hard to draw the same way twice, and what a release makes of them.

Most are of OpenStreetMap, central Helsinki (© OpenStreetMap contributors, ODbL); the others are made up.
"""
