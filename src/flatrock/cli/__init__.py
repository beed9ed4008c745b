"""Level 5: the command line; reads words, calls one function, prints."""
