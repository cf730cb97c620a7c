"""The sample: central Helsinki from OpenStreetMap, with its layers and the mapping that makes features of it."""
