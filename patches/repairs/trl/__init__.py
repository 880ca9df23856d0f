"""TRL: trainers with a fused head of their own."""
