"""Who guesses tokens ahead, and how many guesses a step verifies."""
