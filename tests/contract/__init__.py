"""Every record against its stored verdicts; and each of its numbers matters."""
