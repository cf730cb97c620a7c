"""The map page: what the tile server serves to browsers. No Python; npm's packages stand beside it in node_modules."""
