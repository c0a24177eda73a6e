"""The NumPy reference: what every op means, and the oracle of every backend."""
