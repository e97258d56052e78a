"""From an adapter to an artifact: what is known at build time is decided here. Production never loads it."""
