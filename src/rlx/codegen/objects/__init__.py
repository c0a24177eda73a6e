"""Object files: what they define and need, and loading them without a linker."""
