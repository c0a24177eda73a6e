"""What is known about sizes and small values while a model is imported."""
