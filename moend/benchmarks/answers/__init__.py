"""Final answers of generated texts: what a text says in the end (extract), and whether that is the gold answer."""
