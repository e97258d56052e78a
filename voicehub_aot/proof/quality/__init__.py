"""Does speech survive an approximation? A candidate is held to a reference over a set of utterances."""
