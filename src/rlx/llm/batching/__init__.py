"""What an engine runs on: requests, their pages, and which tokens a step computes."""
