"""The programs, by what the user is doing. Each is a generator that is given a layer and yields its checks."""
