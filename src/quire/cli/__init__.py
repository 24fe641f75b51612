"""Commands, one file each; `main` has the table of them."""
