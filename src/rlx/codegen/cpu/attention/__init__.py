"""Attention in flash style."""
