"""Published tilesets: a region of the map as it stood, in files of its own that no later edit changes.

`snapshot` says what is published and whether it may be, `publishing` writes and verifies it, `formats` are the files,
`registry` is the pointer to the version in force, `keeping` prunes and sweeps, `reading` serves. `registry` and
`reading` load without numpy: the tile server needs no more.
"""
