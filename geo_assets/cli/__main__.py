"""`python -m geo_assets.cli` is `geo-assets`."""

from geo_assets.cli import main

if __name__ == "__main__":
    main()
