"""The table of sources that the plugin ships: which functions its patches rest on, and their digests in each release."""
