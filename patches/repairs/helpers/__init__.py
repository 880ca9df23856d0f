"""What several patches share. No patch is here."""
