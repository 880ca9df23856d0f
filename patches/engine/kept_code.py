"""Nothing imports this: where its bytecode would lie, :mod:`.compiler` keeps code, and pip takes it out with the rest."""
