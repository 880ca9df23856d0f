"""The running process: compiled code, objects that are alive, who traces, the log."""
