"""One file per remedy: what it proposes for a kernel, and how a change is written into the program."""
