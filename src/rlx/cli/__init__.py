"""The command line. `main` starts it, `app` lists the commands, each command has a small file."""
