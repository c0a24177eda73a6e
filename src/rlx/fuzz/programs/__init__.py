"""Random programs: the grammar, its moves, and the inputs."""
