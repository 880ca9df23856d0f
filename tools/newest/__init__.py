"""``make newest``: what the installed releases, newer than any that was tested, mean for each patch."""
