"""The command line. `main` starts it, `app` lists the commands, each command is a small file of its own."""
