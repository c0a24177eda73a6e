"""Encoders: texts to vectors. Models like BERT, whose tokens see all of their text."""
