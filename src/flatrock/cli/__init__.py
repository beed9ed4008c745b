"""Level 4: the command line; reads words, calls one function, prints."""
