"""What ``adopt`` runs on releases that nobody has tested, beside the reproducers."""
