"""Control flow, ops of the user, collectives, work in slices."""
