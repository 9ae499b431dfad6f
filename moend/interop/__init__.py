"""moend beside other people's tools. Nothing else of the library imports this package."""
