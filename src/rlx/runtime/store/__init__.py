"""Programs in files: containers, artefacts, caches, trust."""
