"""One rank of any run, on one machine: its own part is computed, the other ranks are its mirrors."""
